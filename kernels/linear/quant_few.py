"""Products of up to eight rows with packed codes on Hopper: y = x Wᵀ + b.

The operands of quant_linear.py's go through shared memory, and warps wait for one another there; with few rows that,
and not the memory, takes the time. Here a warp is by itself (quant_few_gluon.py): it loads the codes of 16 rows of the
weight as the tensor cores want them, and the warps of a program take every so many-th block of columns each. The codes'
layout (planes.py) is such that nothing has to be shuffled for that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from ..attention.attention_parts import processors
from ..launch.pdl import pdl_options
from ..launch.tiles import fits, tile_table
from .planes import BITS, TILE, Packed, decoders
from .quant_few_gluon import COLUMNS, quant_few_kernel

MAX_ROWS = int(COLUMNS.value)  # of x
SHARED_KIB, WARPS = 228, 64  # of a multiprocessor
SHARED_BY_ITSELF = 1  # KiB that each program takes of it beside what it asks for


class FewTile(NamedTuple):
    """A program multiplies block_n rows of the weight, a multiple of 16; each of its warps `ahead` blocks at a time."""

    warps: int = 8
    ahead: int = 1
    block_n: int = 16
    prefetch: int = 2  # how often as much goes into the L2 cache before the wait; pipelined, once less
    pipelined: bool = False  # codes are loaded before those that precede them are multiplied, the first before the wait


@lru_cache
def few_tile(n: int, k: int, kind: str) -> FewTile:
    """The fastest of those measured with one row."""
    for row in tile_table("quant_few"):
        if row["bits"] == BITS[kind] and fits(row["max_n"], n) and fits(row["max_k"], k):
            return FewTile(**{name: row[name] for name in FewTile._fields if name in row})
    raise LookupError(f"no tile of quant_few is for {kind} codes")


@lru_cache
def streams_codes(device: torch.device) -> bool:
    """Whether this way is taken there: on Hopper, for whose own matrix instructions few rows are too few."""
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] == 9


def quant_few(
    x: torch.Tensor,
    matrix: Packed,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: FewTile | None = None,
    *,
    add: bool = False,
) -> torch.Tensor:
    """quant_linear for x [M, K], M <= 8; `tile` overrides the choice. add: to what out has, before the rounding."""
    (m, k), n = x.shape, matrix.rows
    if m > MAX_ROWS:
        raise ValueError(f"quant_few takes {MAX_ROWS} rows at most, got {m}: use quant_linear")
    if m == 0:
        return out
    aligned = k % 16 == x.data_ptr() % 16 == 0  # else x comes number by number, and many of them spill registers
    tile = tile or (few_tile(n, k, matrix.kind) if aligned else FewTile(prefetch=0))
    asm = decoders(matrix.kind, matrix.table, x.dtype)
    row_stride, block_stride, tile_stride = matrix.strides
    scales, shifts = matrix.scales, matrix.shifts
    batch, programs = tile.warps * tile.ahead, triton.cdiv(n, tile.block_n)
    even = k % matrix.block_columns == 0 and matrix.blocks % batch == 0
    # Programs that are launched early go where there is room: as many on one multiprocessor as fit, none on another. So
    # about as many fit as there are for each.
    most = min(triton.cdiv(programs, processors(x.device)), WARPS // tile.warps)
    room = SHARED_KIB // most - SHARED_BY_ITSELF
    steps = triton.next_power_of_2(triton.cdiv(matrix.blocks, batch)) if m == 1 and aligned else 0
    used = triton.cdiv(steps * batch * matrix.block_columns * x.element_size(), 1024)
    if used > room:
        steps = used = 0
    sums = triton.cdiv(tile.warps * tile.block_n * MAX_ROWS * 4, 1024)  # where the warps' meet
    quant_few_kernel[(programs,)](
        x, matrix.words, scales, scales if shifts is None else shifts, x if bias is None else bias, out,
        m, n, k, matrix.blocks, len(scales), x.stride(0), out.stride(0), row_stride, block_stride, tile_stride,
        scales.stride(0),
        ASM0=asm[0], ASM1=asm[1], ASM2=asm[-2], ASM3=asm[-1], PLANE=matrix.plane, PLANES=len(asm), GROUP=matrix.group,
        HAS_SHIFT=shifts is not None, HAS_BIAS=bias is not None, ADD=add, EVEN=even, BLOCK_N=tile.block_n,
        TILE_ROWS=TILE, AHEAD=tile.ahead, PREFETCH=tile.prefetch, PIPELINED=tile.pipelined, STEPS=steps,
        UNUSED=max(0, room - max(used, sums)), num_warps=tile.warps, **pdl_options(x, m),
    )  # fmt: skip
    return out
