"""Experts of a mixture as packed codes beside a few pairs (token, expert) on Hopper: each pair by itself, in the time
in which its expert's codes stream from memory.

What moe_codes.py computes for an order that is not sorted, as quant_few.py does it for a matrix: a warp loads codes as
the tensor cores want them, and waits for no other (moe_few_gluon.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from ..launch.pdl import pdl_options
from ..launch.tiles import fits, tile_table
from ..linear.planes import BITS, TILE, times_power_of_two, unscaled_decoders
from ..linear.quant_few import streams_codes
from .expert_codes import ExpertCodes
from .gating import kind_of
from .moe_blocks import Order
from .moe_few_gluon import ROWS, experts_few_kernel


class ExpertsFewTile(NamedTuple):
    """A program's warps take `ahead` blocks of columns each at a time: powers of two."""

    warps: int = 8
    ahead: int = 1


@lru_cache
def experts_few_tile(bits: int, blocks: int) -> ExpertsFewTile:
    for row in tile_table("experts_few"):
        if row["bits"] == bits and fits(row["max_blocks"], blocks):
            return ExpertsFewTile(row["warps"], row["ahead"])
    return ExpertsFewTile()


def takes(x: torch.Tensor, order: Order) -> bool:
    """Whether experts_few is for this step: on Hopper, with pairs too few to share an expert."""
    return not order.sort and streams_codes(x.device)


def experts_few(
    x: torch.Tensor,
    matrices: ExpertCodes,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    order: Order,
    top_k: int,
    num_tokens: int,
    limit: float = 0.0,
    tile: ExpertsFewTile | None = None,
) -> None:
    """x: row pair // top_k is a pair's → out [pairs, N], of two parts activated and multiplied. What pairs of experts
    that are not here have is left as it is. `tile` overrides the choice."""
    if order.sort:
        raise ValueError(
            f"experts_few takes pairs in their own order, got {order.max_blocks} sorted blocks: sort=False"
        )
    one, scales, shifts = matrices.of(0), matrices.scales, matrices.shifts
    tile = tile or experts_few_tile(BITS[matrices.kind], one.blocks)
    asm, exponent = unscaled_decoders(matrices.kind, matrices.table, x.dtype)
    # Half of what numbers of bf16 lack goes to x, so that products are far from the ends of what fp32 holds.
    to_x = exponent // 2 if x.dtype == torch.bfloat16 else 0
    row_stride, block_stride, tile_stride = one.strides
    even = matrices.columns % one.block_columns == 0 and one.blocks % (tile.warps * tile.ahead) == 0
    width = int(ROWS.value) // matrices.parts
    experts_few_kernel[(triton.cdiv(matrices.rows, width), order.max_blocks)](
        x, matrices.words, scales, scales if shifts is None else shifts, scales if bias is None else bias, out,
        order.experts, len(matrices.words), matrices.rows, matrices.columns, matrices.padded_rows, one.blocks,
        scales.shape[1], x.stride(0), matrices.words.stride(0), scales.stride(0), row_stride, block_stride, tile_stride,
        scales.stride(1), 0 if bias is None else bias.stride(0), limit,
        ASM0=asm[0], ASM1=asm[1], ASM2=asm[-2], ASM3=asm[-1], TO_X=times_power_of_two(to_x) if to_x else "",
        UNIT=2.0**-exponent, BACK=2.0 ** (exponent - to_x), PLANE=one.plane, PLANES=len(asm), GROUP=matrices.group,
        HAS_SHIFT=shifts is not None, HAS_BIAS=bias is not None, EVEN=even, TOP_K=top_k, GATED=matrices.parts == 2,
        ACT=kind_of(limit), TILE_ROWS=TILE, AHEAD=tile.ahead, num_warps=tile.warps, **pdl_options(x, num_tokens),
    )  # fmt: skip
