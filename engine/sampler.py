"""From logits to tokens, on the device. A step pays only for what its rows ask for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.penalties import apply_logit_bias, apply_penalties
from ..kernels.sampling import sample, token_logprobs
from .batch import SampleBatch
from .request import SamplingParams
from .rows import BIAS, LOGPROBS, MIN_TOKENS, PENALTIES, PROMPT_LEN, RANDOM, SEED, TOP_K, RowTables


@dataclass
class Samples:
    """Device tensors of one step; S rows sampled, L of them with log-probabilities."""

    tokens: Tensor  # int32 [S]
    logprob_rows: np.ndarray | None = None  # int [L], host: which of the S
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # logprob [L], rank [L], top ids [L, k], top [L, k]


class Sampler:
    """Order: log-probabilities of the raw logits; bias and min_tokens; penalties; temperature, min-p, top-k, top-p."""

    def __init__(self, tables: RowTables) -> None:
        self.tables = tables

    def __call__(self, logits: Tensor, batch: SampleBatch) -> Samples:
        """logits: fp32 [S, V], changed in place."""
        rows = batch.rows_cpu
        flags = self.tables.flags[rows]
        used = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        raw = logits.clone() if used & LOGPROBS and used & (BIAS | MIN_TOKENS | PENALTIES) else logits
        if used & (BIAS | MIN_TOKENS):
            self._apply_bias(logits, batch, flags)
        if used & (PENALTIES | RANDOM):
            params = self.tables.params.index_select(0, batch.rows).t().contiguous()
            floats = params[:6].view(torch.float32)
            if used & PENALTIES:
                apply_penalties(
                    logits, self.tables.token_ids, batch.rows, params[PROMPT_LEN], batch.seq_lens,
                    floats[3], floats[4], floats[5],
                )  # fmt: skip
        if used & RANDOM:
            # little-endian halves of the int64 seed
            seeds = (params[SEED + 1].long() << 32) | (params[SEED].long() & 0xFFFFFFFF)
            tokens = sample(
                logits, floats[0], params[TOP_K], floats[1], floats[2], seeds, batch.seq_lens.long(), all_greedy=False
            )
        else:
            tokens = logits.argmax(dim=-1).int()
        if not used & LOGPROBS:
            return Samples(tokens)
        chosen = np.flatnonzero(flags & LOGPROBS)
        k = max(self._sampling(rows[i]).logprobs or 0 for i in chosen)
        picked = raw
        if len(chosen) < len(rows):
            index = torch.from_numpy(chosen).to(logits.device)
            picked, tokens_picked = raw.index_select(0, index), tokens.index_select(0, index)
        else:
            tokens_picked = tokens
        return Samples(tokens, chosen, token_logprobs(picked, tokens_picked, k))

    def _sampling(self, row: int) -> SamplingParams:
        sampling = self.tables.sampling[row]
        assert sampling is not None
        return sampling

    def _apply_bias(self, logits: Tensor, batch: SampleBatch, flags: np.ndarray) -> None:
        """logit_bias, and minus infinity on what would end a request before its min_tokens."""
        index: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        plan = batch.plan
        for i in np.flatnonzero(flags & (BIAS | MIN_TOKENS)):
            sampling = self._sampling(batch.rows_cpu[i])
            bias = dict(sampling.logit_bias or {})
            at = plan.sampled[i]
            num_outputs = plan.num_computed[at] + plan.num_tokens[at] - int(self.tables.prompt_len[batch.rows_cpu[i]])
            if num_outputs < sampling.min_tokens:
                ends = sampling.stop_token_ids + (() if sampling.ignore_eos else sampling.eos_token_ids)
                bias |= dict.fromkeys(ends, float("-inf"))
            index += [int(i)] * len(bias)
            tokens += bias.keys()
            values += bias.values()
        if index:
            device = logits.device
            apply_logit_bias(
                logits,
                torch.tensor(index, device=device),
                torch.tensor(tokens, device=device),
                torch.tensor(values, dtype=torch.float32, device=device),
            )
