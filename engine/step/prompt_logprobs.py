"""Log-probabilities of prompt tokens: what `logprobs` says of outputs, said of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.sampling.sampling import token_logprobs
from ..cache.rows import RowTables, Upload
from ..link.plan import StepPlan, TokenLogprobs


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
        places, rows, positions, ends, counts, tops = [], [], [], [], [], []
        for i in plan.scored:
            row, first = plan.rows[i], plan.num_computed[i]
            sampling = self.tables.sampling[row]
            assert sampling is not None and sampling.prompt_logprobs is not None
            count = min(plan.num_tokens[i], int(self.tables.prompt_len[row]) - 1 - first)
            counts.append(count)
            tops.append(sampling.prompt_logprobs)
            places.append(np.arange(starts[i], starts[i] + count))
            rows.append(np.full(count, row))
            ends.append(np.full(count, first + plan.num_tokens[i]))
            positions.append(np.arange(first + 1, first + count + 1))
        upload = Upload()
        for column in (places, rows, positions, ends):
            upload.add(np.concatenate(column))
        place, row_ids, position, computed = upload.send(hidden.device)
        targets = self.tables.history.read(row_ids, position, computed)
        k, size = max(tops), self.slice_size
        parts = [
            token_logprobs(self.logits(hidden.index_select(0, place[at : at + size])), targets[at : at + size], k)
            for at in range(0, len(place), size)
        ]
        return PromptScores(counts, tops, [torch.cat(column) for column in zip(*parts, strict=True)])
