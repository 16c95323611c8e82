"""Products of many rows on Hopper GPUs, with SwiGLU or an addition in the same pass: the launch of the kernel in
linear_gluon.py, and where it beats cuBLAS."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from ..launch.pdl import pdl_available
from ..launch.tiles import assign_rows, tile_table
from ..launch.tma import ALIGNMENT, descriptor, num_processors
from .linear_gluon import BLOCK_K, BLOCK_N, HALF_N, ROWS, linear_kernel


class HopperTile(NamedTuple):
    """consumers: warpgroups of 64 rows, 1 or 2, in a tile; stages: tiles of x and the weight that are on their way;
    group: tiles of x that programs which run together share."""

    consumers: int
    stages: int
    group: int


class ByToken(NamedTuple):
    """The same by tokens, and which slots each ROWS_PRESENT of them have."""

    counts: Tensor  # int32 [2]: how many tokens have a slot, and how many tiles are theirs
    slots: Tensor  # int32 [T]; -1: none
    places: Tensor  # int32 [T], of those that have one: in `order`
    present: Tensor  # int32 [lines, ≥ 1 + slots + BEHIND_PRESENT]: how many slots, which, and -2 behind them


class Share(NamedTuple):
    """What is added to a product in its own pass (linear_hopper.py): B h of each token."""

    h: Tensor  # of shrink
    b: Tensor  # [slots, out, r]. Its numbers are finite: each token meets those of its neighbours' slots, times 0
    used: Tensor
    by_token: ByToken
    runs: bool  # shrink still does, and has let the product start: this has to wait before it reads h


HopperTiles = tuple[HopperTile | None, ...]
MANY_ROWS = HopperTile(consumers=2, stages=3, group=16)
# Of B of all slots side by side, where tokens meet their neighbours': at worst an 8B's product takes half again.
MOST_LOW_COLUMNS = 1024


def linear_hopper(
    x: torch.Tensor, weight: torch.Tensor, tile: HopperTile = MANY_ROWS, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x Wᵀ, added up in fp32 and rounded once to x's dtype.

    x [M, K] and weight [N, K], both bf16 or both fp16, contiguous rows that start on multiples of 16 bytes, N a
    multiple of 8 → [M, N]. Where that holds and pays: `hopper_tiles`. residual, like such a result: is added to, before
    the rounding, and returned.
    """
    return _launch(x, weight, tile, gated=False, residual=residual)


def silu_mul_linear_hopper(
    x: torch.Tensor, weight: torch.Tensor, tile: HopperTile = MANY_ROWS, share: Share | None = None
) -> torch.Tensor:
    """silu(x Gᵀ) · (x Uᵀ) of weight [2I, K] = cat(G, U) → [M, I], rounded once, at the end; else as linear_hopper.
    share, for which `takes`: of what adapters add to both."""
    return _launch(x, weight, tile, gated=True, share=share)


def takes(x: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a gated product of x adds B [slots, N, r] x A x in its own pass."""
    slots, _, rank = b.shape
    return (
        b.dtype == x.dtype and rank in (16, 32) and slots * rank <= MOST_LOW_COLUMNS
        and b.stride(2) == 1 and b.stride(1) == rank and b.stride(0) % rank == 0 and b.data_ptr() % ALIGNMENT == 0
        and slots * b.stride(0) < rank << 31
    )  # fmt: skip


def _launch(
    x: torch.Tensor, weight: torch.Tensor, tile: HopperTile, gated: bool, residual: torch.Tensor | None = None,
    share: Share | None = None,
) -> torch.Tensor:  # fmt: skip
    (m, k), n = x.shape, weight.shape[0]
    width = n // 2 if gated else n
    out = x.new_empty(m, width) if residual is None else residual
    if m == 0:
        return out
    rows = tile.consumers * ROWS.value
    tiles_m, tiles_n = cdiv(m, rows), cdiv(width, HALF_N.value if gated else BLOCK_N.value)
    weight_boxes = descriptor(weight.data_ptr(), weight.dtype, n, k, weight.stride(0), HALF_N.value, BLOCK_K.value)
    pointers: tuple[Any, ...] = (weight_boxes, x, x, x, x, x)  # of no adapters
    numbers: tuple[int, ...] = (0,) * 6
    constants: dict[str, Any] = dict(RANK=0, RUNS=False)
    if share is not None:
        pointers, numbers, constants = _low_operands(share, m)
    linear_kernel[(min(num_processors(x.device), tiles_m * tiles_n),)](
        descriptor(x.data_ptr(), x.dtype, m, k, x.stride(0), rows, BLOCK_K.value), weight_boxes,
        descriptor(out.data_ptr(), out.dtype, m, width, out.stride(0), ROWS.value, HALF_N.value), *pointers,
        tiles_m, tiles_n, cdiv(k, BLOCK_K.value), tile.group, n // 2, *numbers,
        GATED=gated, ADD=residual is not None, CONSUMERS=tile.consumers, STAGES=tile.stages, num_warps=4, **constants,
    )  # fmt: skip
    return out


def _low_operands(share: Share, tokens: int) -> tuple[tuple[Any, ...], tuple[int, ...], dict[str, Any]]:
    """What linear_kernel gets of it: pointers, numbers, constants."""
    h, b, used, (_, slots, places, present), runs = share
    (num_slots, n, rank), slot_rows = b.shape, b.stride(0) // b.shape[2]
    # A slot's rows go on in the next matrix: what a box reads of that is nobody's column. Behind the last are zeros.
    rows = (num_slots - 1) * slot_rows + n
    boxes = descriptor(b.data_ptr(), b.dtype, rows, rank, rank, HALF_N.value, rank, swizzle=2 * rank)
    runs = runs and pdl_available(b.device)
    constants = dict(RANK=rank, RUNS=runs, **({"launch_pdl": True} if runs else {}))
    return (
        (boxes, h, slots, places, used, present),
        (tokens, len(h), slot_rows, rows, present.stride(0), h.shape[2]),
        constants,
    )


def even_rows(device: torch.device, rows: int) -> int:
    """About as many rows, such that the device's multiprocessors get the same number of MANY_ROWS' tiles each.

    That holds for weights with a multiple of 4 x 256 rows (with SwiGLU, of 8 x 128). On 132 multiprocessors 4224 rows
    are 33 rows of tiles; with 4096 some multiprocessors have nothing to do at the end, and a row takes 1 % more time.
    Unchanged where no such number is near, and on other devices.
    """
    try:
        processors = num_processors(device) if device.type == "cuda" else 0
    except (AssertionError, RuntimeError):  # what is planned is another machine's card, and here is none
        processors = 0
    step = MANY_ROWS.consumers * ROWS.value * (processors // 4)
    if not step or processors % 4:
        return rows
    even = max(round(rows / step), 1) * step
    return even if abs(even - rows) * 16 <= rows else rows


@lru_cache
def hopper_tiles(n: int, k: int, dtype: torch.dtype, gated: bool) -> HopperTiles:
    """By number of rows: the tile with which this beats cuBLAS (gated: and the activation after it) for a weight [n, k]
    on this process's GPU; None: it does not. The last entry holds for all larger numbers. Empty: nowhere.

    Measured for the weights of an 8B model. For gated weights of other sizes, what holds there from 1024 rows on.
    """
    bytes_apart = (n // 2 if gated else n) * dtype.itemsize, k * dtype.itemsize
    if dtype not in (torch.bfloat16, torch.float16) or any(distance % ALIGNMENT for distance in bytes_apart):
        return ()
    if not torch.cuda.is_available() or not num_processors(torch.device("cuda", torch.cuda.current_device())):
        return ()
    found: list[HopperTile | None] = []
    for row in tile_table("linear_hopper"):
        if (row["n"], row["k"], row["gated"]) == (n, k, gated):
            assign_rows(found, row, HopperTile(row["consumers"], row["stages"], row["group"]))
    if not found and gated and n * k >= 1 << 25:
        found = [*[None] * 1024, MANY_ROWS]
    return tuple(found)
