"""Low-rank adapters: y += B A x, with another pair of matrices for each request of a step.

Tokens are grouped by the adapter of their request: a tile is up to `Tiling.rows` tokens of one slot, so that a matrix
is read once for all of them. First h = A x (`shrink`), of all products that share an input at once, in sums over parts
of the input that nobody adds up until y += B h (`expand`) does, always in the same order. Grids depend on the number of
tokens and of slots only; tiles beyond the last are empty, and leave.

On Hopper, 16-bit numbers of usual ranks go through the kernels of lora_gluon.py, all others through lora_triton.py's.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..launch.pdl import launched_plainly, pdl_options
from ..linear import linear_gluon
from ..norm.activation import silu_mul
from .lora_gluon import lora_expand_kernel, lora_expand_silu_kernel, lora_shrink_kernel
from .lora_triton import expand_kernel, look_up_kernel, shrink_kernel

STEP = 128  # of the input, at a time; whoever cuts it cuts multiples
COLUMNS = 256  # rows of B, at a time
ROUNDS = 4  # of a program of shrink_gluon, about: each waits for the memory
MAX_SPLITS = 16
ROWS_PRESENT = int(linear_gluon.ROWS_PRESENT.value)  # tokens of a line of ByToken.present
ROWS_BESIDE = 64  # up to so many A x may have a stream of its own; see engine/adapters/tables.py
ROWS_DEPENDENT = 512  # up to so many A x and B h are dependent launches
BEHIND_PRESENT = 4  # numbers that are no slot's
LOW_COLUMNS = 64  # of the input, a warp of shrink_gluon at a time: 16 bytes a thread


class Tiling(NamedTuple):
    """How the work on tiles of so many rows is cut. From `chunk` on, it is about lora_gluon.py."""

    tokens: int  # up to so many in a step
    rows: int  # tokens of a tile
    splits: int  # of the input: programs of few tiles are many then; but whoever expands reads the sums of all
    chunk: int  # tokens of B h at once, a divisor of rows and multiple of 8
    warps: int  # of its programs, each for 64 · groups · warps columns, where the rank is 16
    groups: int
    low_warps: int  # of programs of A x; 0: lora_triton.py's are faster


TILINGS = (
    Tiling(16, rows=8, splits=16, chunk=8, warps=2, groups=2, low_warps=4),
    Tiling(512, rows=8, splits=4, chunk=8, warps=4, groups=1, low_warps=4),
    Tiling(1 << 30, rows=64, splits=8, chunk=16, warps=4, groups=2, low_warps=0),
)


class Tiles(NamedTuple):
    """Which tokens of a step have which adapter. Tokens of none are in no tile."""

    slots: Tensor  # int32 [tiles]
    starts: Tensor  # int32 [tiles]: of each, its first place in `order`
    ends: Tensor  # int32 [tiles]; an empty tile ends where it starts
    order: Tensor  # int32 [≤ T]: tokens, those of one slot side by side, those of none behind
    tiling: Tiling  # of the step whose tokens these are


def tiling_of(num_tokens: int) -> Tiling:
    """That of a step of so many tokens."""
    return next(tiling for tiling in TILINGS if num_tokens <= tiling.tokens)


def max_tiles(num_tokens: int, num_slots: int) -> int:
    """Tiles that the tokens of a step can need: each slot has at most one that is not full, and a token there."""
    slots = min(num_tokens, num_slots)
    return (num_tokens - slots) // tiling_of(num_tokens).rows + slots


def _dependence(tensor: Tensor, num_tokens: int) -> dict[str, Any]:
    """pdl_options of a step of so many tokens. It pays for these kernels where it no longer does for others (256 tokens
    of 32 adapters: 3 us a layer), for they have tables, A and B to read before they wait; but not beside a stream of
    A x's own."""
    few = num_tokens if num_tokens <= ROWS_BESIDE or num_tokens > ROWS_DEPENDENT else 1
    return pdl_options(tensor, few, yields=True)


def _plainly(tensor: Tensor) -> dict[str, Any]:
    """pdl_options of who waits for all before it: whoever it lets start finds x."""
    launched_plainly(tensor.device)
    return {"PDL": False}


def shrink(x: Tensor, a: Tensor, used: Tensor, tiles: Tiles, beside: bool = False, leads: bool = False) -> Tensor:
    """x [T, K], a [slots, N, K] → fp32 [splits, T, N], whose sum over splits is A x by places of
    `tiles.order`; what no tile has stays undefined. used int32 [slots]: 0 where an adapter has nothing here, and so
    nothing is computed. beside: the launch just before is a product with x that lets others start once x is there
    (small_linear that is `late`, quant_few); this runs beside it where it can. leads, where is_shrunk_by_gluon: a
    product that is launched as a dependent one may start at once, and wait (Share.runs)."""
    if x.device.type == "cuda":
        if is_shrunk_by_gluon(x, a, tiles):
            return shrink_gluon(x, a, used, tiles, beside, leads)
        return shrink_triton(x, a, used, tiles)
    return shrink_torch(x, a, used, tiles)


def look_up(ids: Tensor, a: Tensor, used: Tensor, tiles: Tiles) -> Tensor:
    """The same of a one-hot x: ids int [T], a [slots, vocabulary, N] → fp32 [1, T, N]."""
    h = torch.empty((1, *ids.shape, a.shape[2]), dtype=torch.float32, device=ids.device)
    if ids.device.type == "cuda":
        look_up_kernel[(len(tiles.slots),)](
            ids, a, used, h, *tiles[:4], a.shape[2], a.stride(0), a.stride(1),
            BLOCK_M=tiles.tiling.rows, BLOCK_N=triton.next_power_of_2(a.shape[2]), num_warps=4,
        )  # fmt: skip
        launched_plainly(ids.device)
        return h
    for slot, start, tokens in _groups(used, tiles):
        h[0, start : start + len(tokens)] = a[slot, ids[tokens].long()].float()
    return h


def expand(h: Tensor, b: Tensor, columns: Columns, used: Tensor, tiles: Tiles, y: Tensor) -> None:
    """y [T, out] += B h, in place. h: of shrink; b [slots, out, r], whose rows are those of several products one after
    the other; `columns` say whose part of h belongs to which rows."""
    if y.device.type == "cuda":
        expand_cuda = expand_gluon if is_expanded_by_gluon(b, columns, y) else expand_triton
        expand_cuda(h, b, columns, used, tiles, y)
    else:
        expand_torch(h, b, columns, used, tiles, y)


def expand_silu_mul(
    h: Tensor, b: Tensor, columns: Columns, used: Tensor, tiles: Tiles, counts: Tensor, y: Tensor
) -> Tensor:
    """silu_mul (activation.py) of y after expand, whose halves are two products, or one's → [T, out / 2]. counts: of
    ByToken."""
    if y.device.type == "cuda" and is_activated_by_gluon(b, columns, tiles, y):
        return expand_silu_mul_gluon(h, b, used, tiles, counts, y)
    expand(h, b, columns, used, tiles, y)
    return silu_mul(y)


class Columns(NamedTuple):
    """Rows of B, which are columns of y, in blocks, each of one product alone."""

    blocks: dict[int, Tensor]  # by their most rows; int32 [3, blocks]: the first row, the one behind the last, product
    multiple: int  # of which every first row is one


def column_blocks(sizes: list[int], device: torch.device | str = "cpu") -> Columns:
    """`sizes`: rows of each product."""
    tables = {}
    for width in {COLUMNS, *(64 * tiling.groups * tiling.warps for tiling in TILINGS)}:
        blocks, start = [], 0
        for part, size in enumerate(sizes):
            blocks += [(at, min(at + width, start + size), part) for at in range(start, start + size, width)]
            start += size
        tables[width] = torch.tensor(blocks, dtype=torch.int32).T.contiguous().to(device)
    return Columns(tables, gcd(16, *sizes))


# ---- twins ----
def shrink_torch(x: Tensor, a: Tensor, used: Tensor, tiles: Tiles) -> Tensor:
    h = torch.empty((1, x.shape[0], a.shape[1]), dtype=torch.float32, device=x.device)
    for slot, start, tokens in _groups(used, tiles):
        h[0, start : start + len(tokens)] = x[tokens].float() @ a[slot].float().T
    return h


def expand_torch(h: Tensor, b: Tensor, columns: Columns, used: Tensor, tiles: Tiles, y: Tensor) -> None:
    rank, total = b.shape[2], h.sum(0)
    parts: dict[int, tuple[int, int]] = {}
    for first, end, part in columns.blocks[COLUMNS].T.tolist():
        parts[part] = (parts.get(part, (first, end))[0], end)
    for slot, start, tokens in _groups(used, tiles):
        low = total[start : start + len(tokens)]
        for part, (first, end) in parts.items():
            delta = low[:, part * rank : (part + 1) * rank] @ b[slot, first:end].float().T
            y[tokens, first:end] = (y[tokens, first:end].float() + delta).to(y.dtype)


def _groups(used: Tensor, tiles: Tiles) -> list[tuple[int, int, Tensor]]:
    """(slot, first place, tokens) of all tiles of a slot together."""
    found: list[tuple[int, int, int]] = []
    there = used.tolist()
    for slot, start, end in zip(tiles.slots.tolist(), tiles.starts.tolist(), tiles.ends.tolist(), strict=True):
        if start == end or not there[slot]:
            continue
        if found and found[-1][0] == slot and found[-1][2] == start:
            found[-1] = (slot, found[-1][1], end)
        else:
            found.append((slot, start, end))
    return [(slot, start, tiles.order[start:end].long()) for slot, start, end in found]


# ---- Triton ----
def shrink_triton(x: Tensor, a: Tensor, used: Tensor, tiles: Tiles) -> Tensor:
    (num_tokens, k), n = x.shape, a.shape[1]
    if x.stride(1) != 1 or a.stride(2) != 1:
        raise ValueError("the last dimensions of x and A must be contiguous: call contiguous()")
    block_n = min(64, max(16, triton.next_power_of_2(n)))
    blocks = triton.cdiv(n, block_n)
    steps = triton.cdiv(k, tiles.tiling.splits * STEP)  # of a split
    splits = triton.cdiv(k, steps * STEP)
    h = torch.empty((splits, num_tokens, n), dtype=torch.float32, device=x.device)
    shrink_kernel[(len(tiles.slots), blocks, splits)](
        x, a, used, h, *tiles[:4], num_tokens, n, k, steps, x.stride(0), a.stride(0), a.stride(1),
        EVEN_K=k % STEP == 0, BLOCK_M=max(16, tiles.tiling.rows), BLOCK_N=block_n, STEP=STEP,
        BLOCK_K=STEP if tiles.tiling.rows <= 16 else STEP // 2, num_warps=4, num_stages=3, **_dependence(x, num_tokens),
    )  # fmt: skip
    return h


def expand_triton(h: Tensor, b: Tensor, columns: Columns, used: Tensor, tiles: Tiles, y: Tensor) -> None:
    splits, num_tokens, n = h.shape
    rank = b.shape[2]
    if y.stride(1) != 1 or b.stride(2) != 1 or rank % 16:
        raise ValueError("the last dimensions of y and B must be contiguous, and the rank a multiple of 16")
    blocks = columns.blocks[COLUMNS]
    expand_kernel[(len(tiles.slots), blocks.shape[1])](
        h, b, blocks, used, y, *tiles[:4], num_tokens, n, blocks.shape[1], splits,
        b.stride(0), b.stride(1), y.stride(0),
        SPLITS=triton.next_power_of_2(splits), RANK=rank, MULTIPLE=columns.multiple, BLOCK_M=max(16, tiles.tiling.rows),
        BLOCK_N=COLUMNS, BLOCK_R=16, num_warps=4 if tiles.tiling.rows <= 16 and rank <= 64 else 8,
        **_dependence(y, num_tokens),
    )  # fmt: skip


# ---- Gluon ----
@lru_cache
def _has_mma(device: torch.device) -> bool:
    """Whether the kernels of lora_gluon.py are for this card: others than Hopper are untested."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] == 9


def is_expanded_by_gluon(b: Tensor, columns: Columns, y: Tensor) -> bool:
    """Not by expand_kernel: 16 bit each, ranks whose B a program can hold, and whole pieces of eight columns."""
    return (
        b.dtype == y.dtype and y.dtype in (torch.bfloat16, torch.float16) and b.shape[2] in (16, 32, 64)
        and columns.multiple % 8 == 0 and y.stride(0) % 16 == 0 and _has_mma(y.device)
    )  # fmt: skip


def is_activated_by_gluon(b: Tensor, columns: Columns, tiles: Tiles, y: Tensor) -> bool:
    """Not by the activation's own kernel: tiles of one chunk, ranks whose two B fit into registers, halves that begin
    with whole pieces of eight columns."""
    return (
        tiles.tiling.rows == tiles.tiling.chunk and b.shape[2] <= 32 and b.shape[1] % 16 == 0
        and is_expanded_by_gluon(b, columns, y)
    )  # fmt: skip


def is_shrunk_by_gluon(x: Tensor, a: Tensor, tiles: Tiles) -> bool:
    """Not by shrink_kernel: 16 bit each, few tokens, strides that Triton knows to be whole pieces of eight."""
    return (
        a.dtype == x.dtype and x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] % 16 == x.stride(0) % 16 == 0
        and a.stride(1) % 16 == 0 and tiles.tiling.low_warps > 0 and _has_mma(x.device)
    )  # fmt: skip


def shrink_gluon(x: Tensor, a: Tensor, used: Tensor, tiles: Tiles, beside: bool = False, leads: bool = False) -> Tensor:
    (num_tokens, k), n, tiling = x.shape, a.shape[1], tiles.tiling
    if x.stride(1) != 1 or a.stride(2) != 1:
        raise ValueError("the last dimensions of x and A must be contiguous: call contiguous()")
    block_n, step = 16 if n <= 48 else 32, tiling.low_warps * LOW_COLUMNS
    splits = max(tiling.splits, min(MAX_SPLITS, triton.cdiv(k, ROUNDS * step)))
    rounds = triton.cdiv(k, splits * step)  # of a split
    splits = triton.cdiv(k, rounds * step)
    h = torch.empty((splits, num_tokens, n), dtype=torch.float32, device=x.device)
    lora_shrink_kernel[(triton.cdiv(n, block_n), splits, len(tiles.slots))](
        x, a, used, h, *tiles[:4], num_tokens, n, k, rounds, x.stride(0), a.stride(0), a.stride(1),
        EVEN=k % step == 0, TOKENS=tiling.rows, BLOCK_N=block_n, BLOCK_K=LOW_COLUMNS, BESIDE=beside, LEADS=leads,
        num_warps=tiling.low_warps, **(_plainly(x) if leads else _dependence(x, num_tokens)),
    )  # fmt: skip
    return h


def expand_gluon(h: Tensor, b: Tensor, columns: Columns, used: Tensor, tiles: Tiles, y: Tensor) -> None:
    (splits, num_tokens, n), rank, tiling = h.shape, b.shape[2], tiles.tiling
    if y.stride(1) != 1 or b.stride(2) != 1:
        raise ValueError("the last dimensions of y and B must be contiguous")
    groups = max(1, tiling.groups * 16 // rank)
    warps = tiling.warps * tiling.groups // groups  # as many columns in all
    blocks = columns.blocks[64 * groups * warps]
    lora_expand_kernel[(blocks.shape[1], len(tiles.slots))](
        h, b, blocks, used, y, *tiles[:4], num_tokens, n, blocks.shape[1], splits,
        b.stride(0), b.stride(1), y.stride(0),
        SPLITS=triton.next_power_of_2(splits), RANK=rank, CHUNK=tiling.chunk, CHUNKS=tiling.rows // tiling.chunk,
        GROUPS=groups, num_warps=warps, **_dependence(y, num_tokens),
    )  # fmt: skip


def expand_silu_mul_gluon(h: Tensor, b: Tensor, used: Tensor, tiles: Tiles, counts: Tensor, y: Tensor) -> Tensor:
    (splits, num_tokens, low), (num_slots, n, rank) = h.shape, b.shape
    if y.stride(1) != 1 or b.stride(2) != 1:
        raise ValueError("the last dimensions of y and B must be contiguous")
    out = y.new_empty(num_tokens, n // 2)
    warps, tokens_of_none = 2, 1  # like those of one slot more
    lora_expand_silu_kernel[(triton.cdiv(n // 2, 64 * warps), max_tiles(num_tokens, num_slots + tokens_of_none))](
        h, b, used, y, out, *tiles[:4], counts, num_tokens, low, n // 2, splits,
        b.stride(0), b.stride(1), y.stride(0), out.stride(0),
        SPLITS=triton.next_power_of_2(splits), RANK=rank, CHUNK=tiles.tiling.chunk, GROUPS=1, num_warps=warps,
        **_dependence(y, num_tokens),
    )  # fmt: skip
    return out
