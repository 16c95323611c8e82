"""What requests want of their prompts themselves: log-probabilities of tokens; embeddings, classes and scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.sampling.sampling import token_logprobs
from ..cache.rows import RowTables, Upload
from ..link.plan import StepPlan, TokenLogprobs
from ..link.sampling_params import ALL, CLS, LAST, MEAN, Pooling


@dataclass
class PromptScores:
    """Of N prompt tokens, those of one row after those of another."""

    counts: list[int]  # tokens of each row
    tops: list[int]  # how many of the most likely tokens each row wants
    tensors: list[Tensor]  # logprob [N], rank [N], top ids [N, k], top logprobs [N, k]; empty when N = 0

    def lists(self, logprobs: Tensor, ranks: Tensor, top_ids: Tensor, tops: Tensor) -> list[list[TokenLogprobs]]:
        """One list a row, from the tensors once they are on the host."""
        rows, start = [], 0
        for count, k in zip(self.counts, self.tops, strict=True):
            part = slice(start, start + count)
            columns = (logprobs[part], ranks[part], top_ids[part, :k], tops[part, :k])
            rows.append([TokenLogprobs(*entry) for entry in zip(*(c.tolist() for c in columns), strict=True)])
            start += count
        return rows


class PromptScorer:
    """Computes logits for a slice of tokens at a time, so that they take no more memory than the sampler's."""

    def __init__(self, tables: RowTables, logits: Callable[[Tensor], Tensor], slice_size: int) -> None:
        self.tables = tables
        self.logits = logits
        self.slice_size = slice_size

    def __call__(self, plan: StepPlan, hidden: Tensor) -> PromptScores:
        """hidden [T, H] of the step's tokens: of the plan's rows in their order, then padding."""
        starts = np.cumsum([0, *plan.num_tokens])
        indexes, rows, positions, ends, counts, tops = [], [], [], [], [], []
        for i in plan.scored:
            row, first = plan.rows[i], plan.num_computed[i]
            sampling = self.tables.sampling[row]
            assert sampling is not None and sampling.prompt_logprobs is not None
            count = min(plan.num_tokens[i], int(self.tables.prompt_len[row]) - 1 - first)
            counts.append(count)
            tops.append(sampling.prompt_logprobs)
            indexes.append(np.arange(starts[i], starts[i] + count))
            rows.append(np.full(count, row))
            ends.append(np.full(count, first + plan.num_tokens[i]))
            positions.append(np.arange(first + 1, first + count + 1))
        upload = Upload()
        for column in (indexes, rows, positions, ends):
            upload.add(np.concatenate(column))
        index, row_ids, position, computed = upload.send(hidden.device)
        targets = self.tables.history.read(row_ids, position, computed)
        k, size = max(tops), self.slice_size
        parts = [
            token_logprobs(self.logits(hidden.index_select(0, index[at : at + size])), targets[at : at + size], k)
            for at in range(0, len(index), size)
        ]
        return PromptScores(counts, tops, [torch.cat(column) for column in zip(*parts, strict=True)])


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
