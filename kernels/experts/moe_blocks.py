"""In which blocks of rows the products of a mixture are computed: rows of one expert, or one by one.

Grids are bounded by shapes: programs past the last block leave.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .moe_route import sort_pairs_triton


class Order(NamedTuple):
    """In which blocks of rows pairs (token, one of its experts) are multiplied: as moe_route.SortedPairs has them, or
    each pair by itself."""

    pairs: torch.Tensor
    experts: torch.Tensor
    num_blocks: torch.Tensor
    sort: bool

    @property
    def max_blocks(self) -> int:
        return len(self.experts)


def order_pairs(ids: torch.Tensor, num_experts: int, block_m: int, sort: bool) -> Order:
    if sort:
        return Order(*sort_pairs_triton(ids, num_experts, block_m), True)
    return Order(ids, ids.view(-1), ids, False)


@triton.jit
def place_of_program(
    experts_ptr, num_blocks_ptr, max_blocks, num_experts, tiles, GROUP: tl.constexpr, SORTED: tl.constexpr
):
    """A block of rows, a tile of the weight, and the expert, int64: num_experts or more where there is nothing to do,
    for there are no more blocks, or another rank has the expert.

    GROUP blocks take turns at a tile of the weight: what the tensor cores read again comes from the L2 cache."""
    program = tl.program_id(0)
    first = program // (GROUP * tiles) * GROUP
    width = tl.minimum(GROUP, max_blocks - first)
    inside = program % (GROUP * tiles)
    block = first + inside % width
    expert = tl.load(experts_ptr + block)
    if SORTED:
        expert = tl.where(block < tl.load(num_blocks_ptr), expert, num_experts)
    return block, inside // width, expert.to(tl.int64)


@triton.jit
def pairs_of_block(pairs_ptr, block, num_pairs, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, SORTED: tl.constexpr):
    """int32 [ROWS], the first of the block's; num_pairs where it has no more."""
    m = tl.arange(0, ROWS)
    if SORTED:
        return tl.load(pairs_ptr + block * BLOCK_M + m)
    else:
        return tl.where(m == 0, block, num_pairs)
