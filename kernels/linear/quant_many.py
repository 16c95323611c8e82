"""Products of many rows with packed codes on Hopper: y = x Wᵀ + b, where they would else be made numbers in a scratch.

What multiplies them (quant_many_gluon.py) is bound by the tensor cores, as a product of numbers is; a tile of the
weight becomes numbers once a tile of x. Scales of groups go into the numbers, each rounded again, as with `fold` in
quant_linear.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from triton import cdiv

from ..launch.pdl import launched_plainly
from ..launch.tiles import Row, fits, tile_table
from ..launch.tma import ALIGNMENT, descriptor, num_processors
from .linear import prepare
from .planes import BITS, TILE, Packed, decoders, unscaled_decoders
from .quant_many_gluon import CONSUMERS, HALF, ROWS, STEP, quant_many_kernel

# Powers of two that numbers may lack while they are summed: with more, sums of small x lose bits at the end of what
# fp32 holds, and large scales are infinite once they make up for it. Half of it cannot go to x, which tensor cores take
# straight from memory.
MOST_LACKING = 120


class ManyTile(NamedTuple):
    """A program multiplies 128 rows of the weight and `tokens` of x at a time; stages: tiles of 64 columns of x,
    code_stages: of 128 columns of codes that are on their way; splits: of the columns, over programs; without room for
    their sums there is one."""

    tokens: int = 256  # 64, 128 or 256
    stages: int = 4
    code_stages: int = 3
    splits: int = 1


@lru_cache
def many_tile(m: int, n: int, bits: int) -> ManyTile | None:
    """The fastest of those measured; None: other products are faster."""
    for row in tile_table("quant_many"):
        if row["bits"] == bits and fits(row["max_rows"], m) and fits(row["max_n"], n):
            return ManyTile(*(row[name] for name in ManyTile._fields)) if m >= row["min_rows"] else None
    return None


@lru_cache
def many_rows(n: int, kind: str, device: torch.device) -> int:
    """Up to how many rows this way is the fastest there; 0: it never is."""
    if device.type != "cuda" or torch.version.cuda is None or not num_processors(device):
        return 0
    return max((row["max_rows"] for row in _rows_of_table(n, kind)), default=0)


def rows_of_tiles(n: int, kind: str) -> set[int]:
    """Numbers of rows that together meet every tile."""
    return {row["min_rows"] for row in _rows_of_table(n, kind)}


def _rows_of_table(n: int, kind: str) -> list[Row]:
    return [row for row in tile_table("quant_many") if row["bits"] == BITS[kind] and fits(row["max_n"], n)]


def takes_many(x: torch.Tensor) -> bool:
    """Whether TMA can fetch x: rows start on multiples of 16 bytes."""
    return x.data_ptr() % ALIGNMENT == 0 and x.stride(0) * x.element_size() % ALIGNMENT == 0


def quant_many(
    x: torch.Tensor, matrix: Packed, bias: torch.Tensor | None, out: torch.Tensor, tile: ManyTile
) -> torch.Tensor:
    """quant_linear for x [M, K] whose rows start on multiples of 16 bytes, on a Hopper GPU."""
    (m, k), n = x.shape, matrix.rows
    if not takes_many(x):
        raise ValueError(f"quant_many takes rows that start on multiples of {ALIGNMENT} bytes: use quant_linear")
    scales, shifts = matrix.scales, matrix.shifts
    fold = matrix.group > 0 or shifts is not None
    factor = 1.0
    if fold:
        asm = decoders(matrix.kind, matrix.table, x.dtype, True, shifts is not None)
    else:  # what the numbers lack goes into the rows' scales
        asm, exponent = unscaled_decoders(matrix.kind, matrix.table, x.dtype)
        if exponent > MOST_LACKING:
            asm, exponent = decoders(matrix.kind, matrix.table, x.dtype), 0
        factor = 2.0**exponent
    bits, plane, blocks = BITS[matrix.kind], matrix.plane, matrix.blocks
    # Of 8 bits, a row's words follow each other whatever the blocks are.
    width = plane if bits == 4 else STEP.value // 2
    height = len(scales[0]) * blocks if bits == 4 else len(scales[0])
    columns = plane if bits == 4 else blocks * plane
    steps = cdiv(blocks * matrix.block_columns, STEP.value)
    tiles_m, tiles_n = cdiv(m, tile.tokens), cdiv(n, CONSUMERS.value * ROWS.value)
    workspace = prepare(x.device)
    splits = max(1, min(tile.splits, steps))
    tiles = tiles_m * tiles_n * CONSUMERS.value
    if tiles * splits * TILE * tile.tokens > workspace.partials.numel() or tiles > len(workspace.counters):
        splits = 1
    launched_plainly(x.device)
    quant_many_kernel[(min(num_processors(x.device), tiles_m * tiles_n * splits),)](
        descriptor(x.data_ptr(), x.dtype, m, k, x.stride(0), tile.tokens, HALF.value),
        descriptor(matrix.words.data_ptr(), torch.int16, height, columns, columns, TILE, width, width * 2),
        scales, scales if shifts is None else shifts, x if bias is None else bias, out,
        workspace.partials, workspace.counters, m, n, len(scales), scales.stride(0), out.stride(0),
        tiles_m, tiles_n, steps, splits, blocks,
        ASM0=asm[0], ASM1=asm[1], ASM2=asm[-2], ASM3=asm[-1], PLANE=plane, PLANES=len(asm), GROUP=matrix.group,
        HAS_SHIFT=shifts is not None, HAS_BIAS=bias is not None, FACTOR=factor, TOKENS=tile.tokens,
        BOXES=STEP.value // matrix.block_columns if bits == 4 else 1, STAGES=tile.stages,
        CODE_STAGES=tile.code_stages, SPLIT=splits > 1, num_warps=4,
    )  # fmt: skip
    return out
