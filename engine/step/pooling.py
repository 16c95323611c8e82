"""Embeddings, classes and scores: the hidden states of a prompt become one vector, or one a token, and go through the
model's head, however many steps compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cache.rows import RowTables
from ..link.plan import StepPlan
from ..link.sampling_params import ALL, CLS, LAST, MEAN, Pooling

Head = Callable[[Tensor], Tensor]  # fp32 [N, hidden] → fp32 [N, width]


@dataclass
class Pooled:
    """E prompts that end in a step."""

    vectors: Tensor  # fp32, flat: what was pooled of each, one after the other
    sizes: list[int]  # numbers of each
    poolings: list[Pooling]

    def embeddings(self, vectors: Tensor) -> list[bytes | None]:
        """From the vectors once they are on the host. None: not finite."""
        ends = np.cumsum(self.sizes)[:-1]
        return [_embedding(*each) for each in zip(np.split(vectors.numpy(), ends), self.poolings, strict=False)]


class Pooler:
    """Between two chunks of a prompt what is pooled so far waits on the device, by the request's row: a sum, the first
    state, or what is made of every token."""

    def __init__(self, tables: RowTables, head: Head | None = None) -> None:
        self.tables, self.head = tables, head
        self._waiting: dict[int, Tensor] = {}  # fp32

    def forget(self, rows: list[int]) -> None:
        """What waits of requests that have left."""
        for row in rows:
            self._waiting.pop(row, None)

    def needs_all(self, plan: StepPlan) -> bool:
        """Whether a row wants more than the hidden state of its last token. After the plan's rows have been written."""
        return any(self._pooling(plan.rows[i]).kind != LAST for i in plan.pooled)

    def __call__(self, plan: StepPlan, last: Tensor, hidden: Tensor | None) -> Pooled:
        """last [P, H]: of each pooled row's last token in this step; hidden [T, H]: of all tokens of the plan's rows in
        their order, then padding; None where they are not needed.

        What pools all tokens or the first one never starts behind a cached prefix, so its first chunk begins at 0.
        """
        ends = np.cumsum(plan.num_tokens).tolist()
        found: list[Tensor] = []  # fp32 [n, H or the head's width]
        poolings: list[Pooling] = []
        for place, i in enumerate(plan.pooled):
            row, begin, count = plan.rows[i], plan.num_computed[i], plan.num_tokens[i]
            pooling, length = self._pooling(row), int(self.tables.prompt_len[row])
            kind, is_last = pooling.kind, begin + count == length
            if kind == LAST:
                vector = last[place : place + 1]
            elif begin and kind == CLS:
                vector = self._waiting.pop(row)
            else:
                assert hidden is not None
                chunk = hidden[ends[i] - count : ends[i]]
                if kind == ALL:  # at once: what waits is then no wider than the head
                    vector = self._through_head(chunk.float(), pooling)
                    vector = torch.cat((self._waiting.pop(row), vector)) if begin else vector
                else:
                    vector = chunk.sum(0, keepdim=True, dtype=torch.float32) if kind == MEAN else chunk[:1]
                    vector = vector + self._waiting.pop(row) if begin else vector
            if is_last:
                found.append(vector.float() / length if kind == MEAN else vector.float())
                poolings.append(pooling)
            elif kind != LAST:
                # A copy: the next step overwrites what its CUDA graph shares with this one.
                self._waiting[row] = vector.to(torch.float32, copy=True)
        self._send_through_head(found, poolings)
        vectors = torch.cat([last.new_empty(0, dtype=torch.float32), *(vector.flatten() for vector in found)])
        return Pooled(vectors, [vector.numel() for vector in found], poolings)

    def _send_through_head(self, found: list[Tensor], poolings: list[Pooling]) -> None:
        """All that have one vector, in one product; puts the results in their places."""
        wanted = [j for j, pooling in enumerate(poolings) if pooling.head and pooling.kind != ALL]
        if wanted and self.head is not None:
            for j, vector in zip(wanted, self.head(torch.cat([found[j] for j in wanted])).split(1), strict=True):
                found[j] = vector

    def _through_head(self, states: Tensor, pooling: Pooling) -> Tensor:
        return self.head(states) if pooling.head and self.head is not None else states

    def _pooling(self, row: int) -> Pooling:
        sampling = self.tables.sampling[row]
        assert sampling is not None and sampling.pooling is not None
        return sampling.pooling


def _embedding(vector: np.ndarray, pooling: Pooling) -> bytes | None:
    """fp32 [width], or [tokens × width] → little-endian float32."""
    vector = vector if pooling.kind == ALL else vector[: pooling.dimensions]
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    if not np.isfinite(norm):
        return None
    if pooling.normalize and norm:
        vector = vector / norm
    return vector.astype("<f4").tobytes()
