"""From logits to tokens, on the device. A step pays only for what its rows ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.sampling.argmax import argmax
from ...kernels.sampling.masks import apply_bad_words, apply_token_mask
from ...kernels.sampling.penalties import apply_logit_bias, apply_penalties
from ...kernels.sampling.sampling import sample, token_logprobs
from ..cache.batch import SampleBatch
from ..cache.rows import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    LOGPROBS,
    MIN_TOKENS,
    NUM_COLUMNS,
    PENALTIES,
    PROMPT_LEN,
    RANDOM,
    SEED,
    TOP_K,
    RowTables,
    Upload,
    aligned,
)
from ..link.sampling_params import SamplingParams
from .mask import TokenMask

COUNT_ROWS = 64  # that penalties are counted for at once: what that takes is kept
LIMITS = BIAS | MIN_TOKENS | ALLOWED | BAD_WORDS  # what may leave no token to sample, as may a grammar


@dataclass
class Samples:
    """Device tensors of one step; S rows sampled, L of them with log-probabilities."""

    tokens: Tensor  # int32 [S]
    finite: Tensor  # bool [S]: whether the greatest raw logit is finite: no NaN in the row, no inf, and not -inf alone
    logprob_rows: np.ndarray | None = None  # int [L], host: which of the S
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # logprob [L], rank [L], top ids [L, k], top [L, k]
    possible: Tensor | None = None  # bool [S]: whether any token was allowed; None when nothing was excluded


class Sampler:
    """Order: log-probabilities of the raw logits; bias and min_tokens; allowed tokens, grammars and bad words;
    penalties; temperature, min-p, top-k, top-p."""

    def __init__(self, tables: RowTables) -> None:
        self.tables = tables
        # What was made of a row's parameters, and of whose: a row goes from one request to another.
        self._allowed: dict[int, tuple[SamplingParams, Tensor]] = {}
        self._bad_words: dict[int, tuple[SamplingParams, np.ndarray, np.ndarray]] = {}
        self._biases: dict[int, tuple[SamplingParams, Tensor]] = {}  # int32 [n, 2]
        self._counts: Tensor | None = None  # int32 [min(R, COUNT_ROWS), V], of zeros

    def wants(self, batch: SampleBatch) -> int:
        """What rows ask for beside the greatest logit: bits of rows.py. Grammars are not among them."""
        return _any_of(self.tables.flags[batch.rows_cpu])

    def __call__(self, logits: Tensor, batch: SampleBatch, mask: TokenMask | None = None) -> Samples:
        """logits: fp32 [S, V], changed in place. mask: of the rows with a grammar."""
        rows = batch.rows_cpu
        flags = self.tables.flags[rows]
        used = _any_of(flags)
        if mask is not None and not mask.limits:
            mask = None
        limited = used & LIMITS or mask is not None
        raw = logits.clone() if used & LOGPROBS and (limited or used & PENALTIES) else logits
        finite = torch.empty(len(rows), dtype=torch.bool, device=logits.device)
        if limited or used & (PENALTIES | RANDOM):
            argmax(logits, finite=finite)  # of the raw logits: what follows may hide a NaN, and excludes with -inf
        possible = None
        if used & (PENALTIES | RANDOM | BAD_WORDS):
            # Whatever their number, every line of parameters is aligned: kernels need one variant.
            params = self.tables.params.new_empty(NUM_COLUMNS, aligned(len(rows)))[:, : len(rows)]
            params.copy_(self.tables.params.index_select(0, batch.rows).t())
            floats = params[:6].view(torch.float32)
        if limited:
            if used & BIAS:
                self._apply_bias(logits, batch, flags)
            if used & MIN_TOKENS:
                self._forbid_ends(logits, batch, flags)
            if used & ALLOWED:
                self._apply_allowed(logits, batch, flags)
            if used & BAD_WORDS:
                self._apply_bad_words(logits, batch, flags, params[PROMPT_LEN])
            if mask is not None:
                index, bits = _upload(logits.device, mask.rows, mask.bits.reshape(-1))
                apply_token_mask(logits, index, bits.view(mask.bits.shape))
            possible = logits.amax(dim=-1) > float("-inf")
        if used & PENALTIES:
            if self._counts is None:
                shape = (min(self.tables.dummy_row, COUNT_ROWS), logits.shape[1])
                self._counts = torch.zeros(shape, dtype=torch.int32, device=logits.device)
            (index,) = _upload(logits.device, np.flatnonzero(flags & PENALTIES))
            apply_penalties(
                logits, self.tables.history, batch.rows, params[PROMPT_LEN], batch.seq_lens,
                floats[3], floats[4], floats[5], index, self._counts,
            )  # fmt: skip
        if used & RANDOM:
            # little-endian halves of the int64 seed
            seeds = (params[SEED + 1].long() << 32) | (params[SEED].long() & 0xFFFFFFFF)
            tokens = sample(logits, floats[0], params[TOP_K], floats[1], floats[2], seeds, batch.seq_lens.long())
        elif limited or used & PENALTIES:
            tokens = argmax(logits)
        else:
            tokens = argmax(logits, finite=finite)
        if not used & LOGPROBS:
            return Samples(tokens, finite, possible=possible)
        chosen = np.flatnonzero(flags & LOGPROBS)
        k = max(self._sampling(rows[i]).logprobs or 0 for i in chosen)
        picked = raw
        if len(chosen) < len(rows):
            (index,) = _upload(logits.device, chosen)
            picked, tokens_picked = raw.index_select(0, index), tokens.index_select(0, index)
        else:
            tokens_picked = tokens
        found = token_logprobs(picked, tokens_picked, k)
        self._name_logprobs(picked, [self._sampling(rows[i]).logprob_token_ids for i in chosen], *found[2:])
        return Samples(tokens, finite, chosen, found, possible)

    def _name_logprobs(
        self, raw: Tensor, named: Sequence[tuple[int, ...]], top_ids: Tensor, top_logprobs: Tensor
    ) -> None:
        """Puts tokens that rows name into the place of their likeliest ones."""
        if not any(named):
            return
        places = [(row, column, id) for row, ids in enumerate(named) for column, id in enumerate(ids)]
        row, column, id = _upload(raw.device, *(np.array(part) for part in zip(*places, strict=True)))
        top_ids[row, column] = id.int()
        top_logprobs[row, column] = raw[row, id] - raw.logsumexp(dim=-1)[row]

    def _sampling(self, row: int) -> SamplingParams:
        sampling = self.tables.sampling[row]
        assert sampling is not None
        return sampling

    def _apply_bias(self, logits: Tensor, batch: SampleBatch, flags: np.ndarray) -> None:
        """logit_bias."""
        chosen = np.flatnonzero(flags & BIAS)
        entries = []
        for row in batch.rows_cpu[chosen].tolist():
            sampling = self._sampling(row)
            known = self._biases.get(row)
            if known is None or known[0] is not sampling:
                known = self._biases[row] = (sampling, _lay_out_bias(sampling, logits.device))
            entries.append(known[1])
        index, starts = _upload(logits.device, chosen, np.cumsum([0, *map(len, entries)]))
        apply_logit_bias(logits, index, starts, torch.cat(entries))

    def _forbid_ends(self, logits: Tensor, batch: SampleBatch, flags: np.ndarray) -> None:
        """Minus infinity on what would end a request before its min_tokens. How many it has, the device knows."""
        index, tokens, lengths = [], [], []
        for i in np.flatnonzero(flags & MIN_TOKENS).tolist():
            row = int(batch.rows_cpu[i])
            sampling = self._sampling(row)
            ends = sampling.stop_token_ids + (() if sampling.ignore_eos else sampling.eos_token_ids)
            forbidden = [token for token in dict.fromkeys(ends) if 0 <= token < logits.shape[1]]
            tokens += forbidden
            index += [i] * len(forbidden)
            lengths += [int(self.tables.prompt_len[row]) + sampling.min_tokens] * len(forbidden)
        at, token, length = _upload(logits.device, index, tokens, lengths)
        place = at.long(), token.long()
        logits[place] = logits[place].masked_fill_(batch.seq_lens[place[0]] < length, float("-inf"))

    def _apply_allowed(self, logits: Tensor, batch: SampleBatch, flags: np.ndarray) -> None:
        chosen = np.flatnonzero(flags & ALLOWED)
        bits = []
        for row in batch.rows_cpu[chosen].tolist():
            sampling = self._sampling(row)
            known = self._allowed.get(row)
            if known is None or known[0] is not sampling:
                allowed = np.zeros(-(-logits.shape[1] // 32) * 32, dtype=bool)
                allowed[list(sampling.allowed_token_ids or ())] = True
                (sent,) = _upload(logits.device, np.packbits(allowed, bitorder="little").view(np.int32))
                known = self._allowed[row] = (sampling, sent)
            bits.append(known[1])
        (index,) = _upload(logits.device, chosen)
        apply_token_mask(logits, index, torch.stack(bits))

    def _apply_bad_words(self, logits: Tensor, batch: SampleBatch, flags: np.ndarray, prompt_lens: Tensor) -> None:
        index, lengths, words = [], [], []
        for i in np.flatnonzero(flags & BAD_WORDS).tolist():
            row = int(batch.rows_cpu[i])
            sampling = self._sampling(row)
            known = self._bad_words.get(row)
            if known is None or known[0] is not sampling:
                sizes = np.array([len(word) for word in sampling.bad_words])
                tokens = np.array([token for word in sampling.bad_words for token in word], dtype=np.int32)
                known = self._bad_words[row] = (sampling, sizes, tokens)
            index.append(i)
            lengths.append(known[1])
            words.append(known[2])
        offsets = np.cumsum(np.concatenate([[0], *lengths]))
        of_words = np.repeat(index, [len(sizes) for sizes in lengths])
        sent = _upload(logits.device, of_words, offsets, np.concatenate(words))
        apply_bad_words(logits, self.tables.history, batch.rows, prompt_lens, batch.seq_lens, *sent)


def _any_of(flags: np.ndarray) -> int:
    return int(np.bitwise_or.reduce(flags)) if len(flags) else 0


def _upload(device: torch.device, *arrays: np.ndarray | list[int]) -> list[Tensor]:
    upload = Upload()
    for array in arrays:
        upload.add(array)
    return upload.send(device)


def _lay_out_bias(sampling: SamplingParams, device: torch.device) -> Tensor:
    """As apply_logit_bias wants it, on the device."""
    bias = sampling.logit_bias or {}
    pairs = np.empty((len(bias), 2), dtype=np.int32)
    pairs[:, 0], pairs[:, 1] = list(bias), np.array(list(bias.values()), dtype=np.float32).view(np.int32)
    (sent,) = _upload(device, pairs.reshape(-1))
    return sent.view(-1, 2)
