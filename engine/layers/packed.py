"""Texts, or pictures, one behind the other, each of which attends to itself alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HALVES = (torch.bfloat16, torch.float16)


@dataclass
class Packed:
    """N texts of T tokens in all, neighbours of equal length where that can be arranged."""

    lengths: list[int]  # tokens of each
    starts: Tensor  # int32 [N + 1] on the device
    longest: int = field(init=False)
    runs: list[tuple[int, int, int]] = field(init=False)  # (first token, texts, tokens of each), in order
    _masks: dict[tuple[int, int], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.longest, self.runs = max(self.lengths), []
        start = 0
        for length, texts in groupby(self.lengths):
            count = len(list(texts))
            self.runs.append((start, count, length))
            start += count * length

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int = 0) -> Tensor:
        """query [T, H, D], key and value [T, KV, D] → [T, H, D]. window: a token sees those less than so far; 0: all.

        On a GPU torch's flash attention for texts of different lengths, in one launch; in float32, and on the CPU, a
        call of scaled_dot_product_attention for each length that is there.
        """
        if query.is_cuda and query.dtype in HALVES and query.shape[2] % 8 == 0 and query.shape[2] <= 256:
            return self._flash(query, key, value, scale, window)
        out = query.new_empty(query.shape)
        for start, count, length in self.runs:
            end = start + count * length
            q, k, v = (part[start:end].unflatten(0, (count, length)).transpose(1, 2) for part in (query, key, value))
            found = scaled_dot_product_attention(
                q, k, v, attn_mask=self._mask(length, window, query.device), scale=scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )  # fmt: skip
            out[start:end].unflatten(0, (count, length)).copy_(found.transpose(1, 2))
        return out

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # of CUDA alone

        given: dict[str, Any] = {}
        if key.shape[1] != query.shape[1]:
            given["enable_gqa"] = True
        if 0 < window < self.longest:
            given["window_size"] = (window - 1, window - 1)
        found = varlen_attn(
            query, key, value, self.starts, self.starts, self.longest, self.longest, scale=scale, **given
        )
        assert isinstance(found, Tensor)
        return found

    def _mask(self, length: int, window: int, device: torch.device) -> Tensor | None:
        """bool [length, length], made once for all layers; None: everything is seen."""
        if not 0 < window < length:
            return None
        if (length, window) not in self._masks:
            positions = torch.arange(length, device=device)
            self._masks[length, window] = (positions[:, None] - positions).abs() < window
        return self._masks[length, window]
