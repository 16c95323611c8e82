"""Greedy sampling: the index of the greatest logit of each row, at the speed at which logits stream from memory.

A row is cut into pieces, so that even a few rows give every SM something to read and many leave none idle at the end.
One kernel finds the best of each piece; another, launched with programmatic dependent launch, the best of a row's.
Where ranks share a row's columns, the best of pieces are all that they have to exchange.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from .threshold import float_key

_TILE = 1024
_TILES = 8  # of a piece: the loads of most of them are on their way at once
# threshold.float_key of -inf and inf; that of a NaN is here the greatest int32
KEY_NEGATIVE_INFINITY = tl.constexpr(-2139095041)
KEY_INFINITY = tl.constexpr(2139095040)
_LAST_INDEX = 2147483647  # of an int32


def argmax(logits: torch.Tensor, out: torch.Tensor | None = None, finite: torch.Tensor | None = None) -> torch.Tensor:
    """The index of the greatest logit of each row → int32 [N], the lowest of several; NaN counts as the greatest.

    logits fp32 [N, V], last dimension contiguous, V > 0; out int32 [N], made when absent. finite bool [N], filled when
    given: whether the greatest is a finite number, so that the row holds no NaN, no +inf, and not -inf alone. Raises
    ValueError for other layouts and dtypes on a GPU.
    """
    return argmax_triton(logits, out, finite) if logits.is_cuda else argmax_torch(logits, out, finite)


def best_of_pieces(logits: torch.Tensor, first: int = 0, width: int | None = None) -> torch.Tensor:
    """Of each piece of a row its greatest logit and the lowest index of that, as one number: int64 [N, pieces], whose
    greatest in a row tells what `argmax` is (`of_pieces`), also of several parts of it beside one another.

    logits as for `argmax`, but with any number of columns, of which the first is token `first`; width: columns of the
    widest part, as many pieces as which has each (default: this one's).
    """
    width = logits.shape[1] if width is None else width
    return best_triton(logits, first, width) if logits.is_cuda else best_torch(logits, first)


def of_pieces(best: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [N, pieces] of `best_of_pieces` → what `argmax` returns and its `finite`."""
    return of_pieces_triton(best) if best.is_cuda else of_pieces_torch(best)


def argmax_torch(
    logits: torch.Tensor, out: torch.Tensor | None = None, finite: torch.Tensor | None = None
) -> torch.Tensor:
    values = logits.numpy()  # torch's own argmax takes ten times as long
    tokens = values.argmax(axis=-1)
    if finite is not None:
        np.isfinite(values[np.arange(len(values)), tokens], out=finite.numpy())
    found = torch.from_numpy(tokens)
    return found.int() if out is None else out.copy_(found)


def best_torch(logits: torch.Tensor, first: int = 0) -> torch.Tensor:
    """best_of_pieces, a piece a row."""
    if not logits.shape[1]:  # of a rank that no column was left for
        return torch.full((len(logits), 1), torch.iinfo(torch.int64).min)
    values = logits.numpy()
    index = values.argmax(axis=-1)
    greatest = values[np.arange(len(values)), index]
    bits = np.where(greatest == 0, 0, greatest.view(np.int32))
    key = np.where(np.isnan(greatest), _LAST_INDEX, bits ^ ((bits >> 31) & _LAST_INDEX)).astype(np.int64)
    return torch.from_numpy((key << 32) | (_LAST_INDEX - first - index))[:, None]


def of_pieces_torch(best: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    greatest = best.amax(dim=1)
    key = greatest >> 32
    finite = (key > KEY_NEGATIVE_INFINITY.value) & (key < KEY_INFINITY.value)
    return (_LAST_INDEX - (greatest & _LAST_INDEX)).int(), finite


def argmax_triton(
    logits: torch.Tensor, out: torch.Tensor | None = None, finite: torch.Tensor | None = None, tile: int = _TILE
) -> torch.Tensor:
    """argmax, by a program for every `_TILES` tiles of a row and one more a row.

    tile: the logits that a program takes at once, a power of two.
    """
    return of_pieces_triton(best_triton(logits, 0, logits.shape[1], tile), out, finite)[0]


def best_triton(logits: torch.Tensor, first: int, width: int, tile: int = _TILE) -> torch.Tensor:
    num_rows, columns = logits.shape
    if logits.stride(1) != 1 or logits.dtype != torch.float32:
        raise ValueError(
            f"argmax takes fp32 logits with a last stride of 1, got {logits.dtype}, {logits.stride()}: use float()"
        )
    # What is compiled follows from the vocabulary alone: a first step with so many rows must not compile anything.
    pieces = triton.cdiv(width, _TILES * tile)
    best = torch.empty((num_rows, pieces), dtype=torch.int64, device=logits.device)
    if num_rows:
        _piece_kernel[(num_rows * pieces,)](
            logits, best, logits.stride(0), columns, first, PIECES=pieces, TILE=tile, TILES=_TILES,
            num_warps=max(1, tile // 128), **pdl_options(logits),
        )  # fmt: skip
    return best


def of_pieces_triton(
    best: torch.Tensor, out: torch.Tensor | None = None, finite: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, pieces = best.shape
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int32, device=best.device)
    if finite is None:  # written all the same: one variant of the kernel
        finite = torch.empty(num_rows, dtype=torch.bool, device=best.device)
    if num_rows:
        best = best.contiguous()
        _row_kernel[(num_rows,)](
            best, out, finite, PIECES=pieces, BLOCK=triton.next_power_of_2(pieces), num_warps=1, **pdl_options(best)
        )
    return out, finite


@triton.jit(do_not_specialize=["first"])
def _piece_kernel(
    logits_ptr, best_ptr, row_stride, columns, first, PIECES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    row_ptr = logits_ptr + (program // PIECES).to(tl.int64) * row_stride
    start = program % PIECES * (TILES * TILE)
    lanes = tl.arange(0, TILE)
    if PDL:
        gdc_wait()

    # Of every lane: its greatest logit, and the tile where it first met it.
    best = tl.full([TILE], float("-inf"), tl.float32)
    tile = tl.zeros([TILE], tl.int32)
    for i in tl.static_range(TILES):
        index = start + i * TILE + lanes
        logits = tl.load(row_ptr + index, mask=index < columns, other=float("-inf"))
        better = (logits > best) | ((logits != logits) & (best == best))
        best = tl.where(better, logits, best)
        tile = tl.where(better, i, tile)

    # The order of these pairs is that of the logits, then that of the indices from the last to the first: theirs is the
    # one maximum, however the pieces are put together. A lane beyond the end has an index beyond the others', and where
    # that is another rank's, -inf: the first token of all is before it.
    key = tl.where(best == best, float_key(best), 2147483647)
    index = first + start + tile * TILE + lanes
    tl.store(best_ptr + program, tl.max((key.to(tl.int64) << 32) | (2147483647 - index), axis=0))


@triton.jit
def _row_kernel(best_ptr, out_ptr, finite_ptr, PIECES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    best = tl.load(best_ptr + row.to(tl.int64) * PIECES + lanes, mask=lanes < PIECES, other=-9223372036854775808)
    greatest = tl.max(best, axis=0)
    tl.store(out_ptr + row, 2147483647 - (greatest & 2147483647).to(tl.int32))
    key = (greatest >> 32).to(tl.int32)
    tl.store(finite_ptr + row, (key > KEY_NEGATIVE_INFINITY) & (key < KEY_INFINITY))
