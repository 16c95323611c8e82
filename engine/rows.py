"""Stable rows: what the device knows of each running request. A request keeps one row for as long as it runs."""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from ..kernels.batch_inputs import scatter_rows
from .plan import StepPlan
from .request import SamplingParams

# Columns of the parameter table: six float32 (as bits), then integers. A 64-bit seed takes two.
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
TOP_K, PROMPT_LEN, SEED = 6, 7, 8
NUM_COLUMNS = 12
PACK = struct.Struct("<6fiiq8x")

# What a row asks of the sampler, so that a step pays only for what its rows use.
RANDOM, PENALTIES, BIAS, LOGPROBS, MIN_TOKENS, ALLOWED, BAD_WORDS = 1, 2, 4, 8, 16, 32, 64


ALIGNMENT = 16  # int32s: Triton compiles another variant for pointers that are not 16-byte aligned


def aligned(size: int) -> int:
    """The room that `size` int32s take where others follow them."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Upload:
    """Many small int32 arrays in one copy to the device."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._starts: list[int] = []
        self._end = 0

    def add(self, values: np.ndarray | list[int]) -> int:
        """Returns the index of the array in what `send` gives back."""
        values = np.asarray(values, dtype=np.int32)
        self._arrays.append(values)
        self._starts.append(self._end)
        self._end += aligned(max(values.size, 1))
        return len(self._arrays) - 1

    def send(self, device: torch.device) -> list[Tensor]:
        # A fresh pinned buffer each time: torch's host allocator hands it out again only once the copy has been made,
        # so the host never writes what an in-flight copy still reads.
        host = torch.empty(self._end, dtype=torch.int32, pin_memory=device.type == "cuda")
        flat = host.numpy()
        for start, values in zip(self._starts, self._arrays, strict=True):
            flat[start : start + values.size] = values
        sent = host.to(device, non_blocking=True)
        return [sent[start : start + a.size] for start, a in zip(self._starts, self._arrays, strict=True)]


class RowTables:
    """Device tables with one row a running request, and one dummy row (the last) that padding points to."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, max_blocks: int, num_groups: int, device: torch.device
    ) -> None:
        num_rows = max_num_seqs + 1
        self.device = device
        self.dummy_row = max_num_seqs
        self.token_ids = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        self.num_computed = torch.zeros(num_rows, dtype=torch.int32, device=device)
        # Of the tokens behind those that there are: drafts that somebody has proposed. Others stand there by chance.
        self.num_proposed = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.params = torch.zeros(num_rows, NUM_COLUMNS, dtype=torch.int32, device=device)
        self.block_tables = [
            torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        # The host's side of the rows: only what decides which sampling steps run.
        self.sampling: list[SamplingParams | None] = [None] * num_rows
        self.prompt_len = np.zeros(num_rows, dtype=np.int32)
        self.flags = np.zeros(num_rows, dtype=np.uint8)

    def stage(self, plan: StepPlan, upload: Upload) -> list[tuple[Tensor, tuple[int, int, int, int]]]:
        """Adds the plan's changes to the upload; `apply` writes them to the tables once it has been sent."""
        writes: list[tuple[Tensor, tuple[int, int, int, int]]] = []
        if plan.new_rows:
            rows = [new.row for new in plan.new_rows]
            zeros = [0] * len(rows)
            tokens = [np.frombuffer(new.token_ids, np.int32) for new in plan.new_rows]
            lengths, values = list(map(len, tokens)), np.concatenate(tokens)
            writes.append((self.token_ids, _stage(upload, rows, zeros, lengths, values)))
            counts = [new.num_computed_tokens for new in plan.new_rows]
            ones = [1] * len(rows)
            writes.append((self.num_computed[:, None], _stage(upload, rows, zeros, ones, counts)))
            # Nobody has drafted for them: a prompt's last token may come in a step with drafts of the row's former one.
            writes.append((self.num_proposed[:, None], _stage(upload, rows, zeros, ones, zeros)))
            packed = b"".join(self._pack(new.row, new.num_prompt_tokens, new.sampling) for new in plan.new_rows)
            params = np.frombuffer(packed, dtype=np.int32)
            writes.append((self.params, _stage(upload, rows, zeros, [NUM_COLUMNS] * len(rows), params)))
        for table, blocks in zip(self.block_tables, plan.new_blocks, strict=True):
            if blocks:
                values = np.array([block for write in blocks for block in write.block_ids], dtype=np.int32)
                rows, starts = [write.row for write in blocks], [write.start for write in blocks]
                writes.append((table, _stage(upload, rows, starts, [len(w.block_ids) for w in blocks], values)))
        return writes

    def apply(self, writes: list[tuple[Tensor, tuple[int, int, int, int]]], sent: list[Tensor]) -> None:
        for table, (rows, starts, offsets, values) in writes:
            scatter_rows(table, sent[rows], sent[starts], sent[offsets], sent[values])

    def _pack(self, row: int, prompt_len: int, sampling: SamplingParams) -> bytes:
        self.sampling[row] = sampling
        self.prompt_len[row] = prompt_len
        self.flags[row] = (
            RANDOM * (sampling.temperature > 0)
            | PENALTIES * sampling.has_penalties
            | BIAS * bool(sampling.logit_bias)
            | LOGPROBS * (sampling.logprobs is not None)
            | MIN_TOKENS * (sampling.min_tokens > 0)
            | ALLOWED * (sampling.allowed_token_ids is not None)
            | BAD_WORDS * bool(sampling.bad_words)
        )
        return PACK.pack(*(getattr(sampling, name) for name in FLOATS), sampling.top_k, prompt_len, sampling.seed or 0)


def _stage(
    upload: Upload, rows: list[int], starts: list[int], lengths: list[int], values: np.ndarray | list[int]
) -> tuple[int, int, int, int]:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return upload.add(rows), upload.add(starts), upload.add(offsets), upload.add(values)
