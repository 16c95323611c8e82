"""Codes out of packed words: streams of bits, fields of a word, nibbles. Any device; no element is looked at alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

assert sys.byteorder == "little"  # words are read byte by byte


def bit_stream(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 or uint8 [..., words] → uint8 [..., count]: value i in the bits from i * bits on, of each row.

    The lowest bit comes first, and values may straddle words, so that eight of them take `bits` bytes.
    """
    data = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    turns = -(-count // 8)
    if missing := turns * bits - data.shape[-1]:  # the last turn may be cut off, or be filled up
        data = torch.nn.functional.pad(data, (0, missing)) if missing > 0 else data[..., : turns * bits]
    data = data.unflatten(-1, (turns, bits))
    values = data.new_empty(*data.shape[:-1], 8)
    mask = (1 << bits) - 1
    for i in range(8):
        byte, skipped = divmod(i * bits, 8)
        value = data[..., byte] >> skipped
        if skipped + bits > 8:
            value |= data[..., byte + 1] << (8 - skipped)
        torch.bitwise_and(value, mask, out=values[..., i])
    return values.flatten(-2)[..., :count].contiguous()


def fields(words: Tensor, bits: int, shifts: Sequence[int], dim: int) -> Tensor:
    """uint8, as words with a new dimension `dim`: there, index i is the `bits` bits of a word from shifts[i] on."""
    mask = (1 << bits) - 1
    return torch.stack([((words >> shift) & mask).to(torch.uint8) for shift in shifts], dim)


def nibbles(data: Tensor, count: int) -> Tensor:
    """uint8 of any shape → uint8 [count]: two codes a byte, the first in the high half."""
    return fields(data.flatten(), 4, (4, 0), 1).flatten()[:count]
