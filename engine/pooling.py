"""Embeddings: the hidden states of a prompt become one vector, however many steps compute them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .plan import StepPlan
from .request import CLS, LAST, MEAN, Pooling
from .rows import RowTables


@dataclass
class Pooled:
    """E prompts that end in a step."""

    vectors: Tensor  # fp32 [E, hidden]: a token's hidden state, or the sum of all tokens'
    lengths: list[int]  # tokens that each of them is the sum of
    poolings: list[Pooling]

    def embeddings(self, vectors: Tensor) -> list[bytes | None]:
        """From the vectors once they are on the host. None: not finite."""
        return [
            _embedding(vector / length, pooling)
            for vector, length, pooling in zip(vectors.numpy(), self.lengths, self.poolings, strict=True)
        ]


class Pooler:
    """Between two chunks of a prompt its sum (or its first state) waits on the device, by the request's row."""

    def __init__(self, tables: RowTables) -> None:
        self.tables = tables
        self._waiting: dict[int, Tensor] = {}  # fp32 [hidden]; of a request that was aborted until its row has another

    def needs_all(self, plan: StepPlan) -> bool:
        """Whether a row wants more than the hidden state of its last token. After the plan's rows have been written."""
        return any(self._pooling(plan.rows[i]).kind != LAST for i in plan.pooled)

    def __call__(self, plan: StepPlan, last: Tensor, hidden: Tensor | None) -> Pooled:
        """last [P, H]: of each pooled row's last token in this step; hidden [T, H]: of all tokens of the plan's rows in
        their order, then padding; None where they are not needed.

        What pools all tokens or the first one never starts behind a cached prefix, so its first chunk begins at 0.
        """
        ends = np.cumsum(plan.num_tokens).tolist()
        vectors, lengths, poolings = [last.new_empty(0, last.shape[1])], [], []
        for place, i in enumerate(plan.pooled):
            row, begin, count = plan.rows[i], plan.num_computed[i], plan.num_tokens[i]
            pooling, length = self._pooling(row), int(self.tables.prompt_len[row])
            kind, is_last = pooling.kind, begin + count == length
            if kind == LAST:
                vector = last[place]
            elif begin and kind == CLS:
                vector = self._waiting.pop(row)
            else:
                assert hidden is not None
                chunk = hidden[ends[i] - count : ends[i]]
                vector = chunk.sum(0, dtype=torch.float32) if kind == MEAN else chunk[0]
                if begin:
                    vector += self._waiting.pop(row)
            if is_last:
                vectors.append(vector[None])
                lengths.append(length if kind == MEAN else 1)
                poolings.append(pooling)
            elif kind != LAST:
                # A copy: the next step overwrites what its CUDA graph shares with this one.
                self._waiting[row] = vector.to(torch.float32, copy=True)
        return Pooled(torch.cat(vectors).float(), lengths, poolings)

    def _pooling(self, row: int) -> Pooling:
        sampling = self.tables.sampling[row]
        assert sampling is not None and sampling.pooling is not None
        return sampling.pooling


def _embedding(vector: np.ndarray, pooling: Pooling) -> bytes | None:
    """fp32 [hidden] → little-endian float32."""
    vector = vector[: pooling.dimensions]
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    if not np.isfinite(norm):
        return None
    if pooling.normalize and norm:
        vector = vector / norm
    return vector.astype("<f4").tobytes()
