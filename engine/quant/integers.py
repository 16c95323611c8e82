"""Codes of the integer formats: out of packed words, in groups of columns, and random ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import gcd, sqrt

import torch
from torch import Tensor

from ..errors import ModelError
from .codes import Codes
from .format import DUMMY_STD


def integer_codes(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    bits: int,
    symmetric: bool,
    groups: Tensor | None = None,
) -> Codes:
    """Of w = (code - zero) · scale.

    codes: uint8 [N, K]; scales: [N, G]; zeros: whole numbers [N, G], or None for 2 ** (bits - 1) everywhere. Then, and
    where they are that in a file that is said to be symmetric, codes become signed and have no zeros. groups: [K], the
    group of each column, where columns were quantised in an order of their own. Raises ModelError where it is none.
    """
    half = 1 << (bits - 1)
    order = None if groups is None else _order(groups, group, scales.shape[1])
    if order is not None:
        codes = codes[:, order]
    if zeros is None or (symmetric and bool((zeros == half).all())):
        # uint8 wraps around: 0 - 8 is 248, and as int8 -8
        return Codes((codes - half).view(torch.int8), scales.float().contiguous(), group, bits, order=order)
    return Codes(codes, scales.float().contiguous(), group, bits, zeros=zeros.float().contiguous(), order=order)


def _order(groups: Tensor, group: int, count: int) -> Tensor | None:
    """Columns by their group, those of a group as they lie; None where they lie so already. groups: [K]."""
    columns = groups.shape[0]
    wanted = torch.arange(columns, device=groups.device) // group
    groups = groups.long()
    if torch.equal(groups, wanted):
        return None
    if columns and not (int(groups.min()) >= 0 and int(groups.max()) < count):
        raise ModelError(
            f"g_idx holds groups from {int(groups.min())} to {int(groups.max())}, there are scales for 0 to "
            f"{count - 1}: download the checkpoint again"
        )
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], wanted):
        sizes = torch.bincount(groups, minlength=count)
        raise ModelError(
            f"g_idx has groups of {int(sizes.min())} to {int(sizes.max())} columns, each needs {group}: quantize the "
            "model again"
        )
    return order


def flat_groups(values: Tensor, size: int, rows: int, columns: int) -> tuple[Tensor, int]:
    """values: [ceil(N · K / size)], one for `size` elements of the flattened matrix → [N, K / group], and the group.

    Groups that cross the ends of rows are divided into the largest that do not.
    """
    group = gcd(size, columns)
    blocks = torch.arange(0, rows * columns, group, device=values.device) // size
    return values.flatten()[blocks].view(rows, columns // group), group


def random_codes(rows: int, columns: int, bits: int, group: int, symmetric: bool, generator: torch.Generator) -> Codes:
    """Even, of the deviation DUMMY_STD, around zero: the lowest code has no counterpart, and comes with 1 bit only."""
    half, device = 1 << (bits - 1), generator.device
    lowest = 0 if bits == 1 else 1
    codes = torch.randint(lowest, 2 * half, (rows, columns), dtype=torch.uint8, generator=generator, device=device)
    deviation = sqrt(half * (half - 1) / 3) if bits > 1 else 0.5
    scales = torch.full((rows, -(-columns // group)), DUMMY_STD / deviation, device=device)
    zeros = None if symmetric else torch.full_like(scales, half)
    return integer_codes(codes, scales, zeros, group, bits, symmetric)


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
