"""Sums over the ranks of one host through memory that all of them can reach, alone or with the norm behind them.

Each program has a row. It writes the row of this rank into a buffer that the others read, tells them, waits until each
has told it the same, and sums the rows of all in their order, in fp32: so every rank has the same bits, in every run.

Who tells whom is a number for every row and rank, which only grows: how often the row has been summed. Two buffers take
turns. That one wait is enough: a rank writes into a buffer again only after it has heard of the others in the sum
between, whose kernels begin when those before them, which read that buffer, have ended. So nothing in a launch depends
on how many came before it, and it can be captured in a CUDA graph; all ranks replay equally often.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .norm import rms_scale
from .pdl import pdl_options


@dataclass(frozen=True)
class Exchange:
    """Memory through which ranks exchange rows of `row_bytes`, as many as `max_rows` at a time.

    Every rank's buffer: int32 [max_rows, ranks], how often the others' rows have come; then two times
    [max_rows, row_bytes].
    """

    rank: int
    buffers: torch.Tensor  # int64 [ranks]: where each rank's buffer begins, as this rank reaches it
    counts: torch.Tensor  # int32 [max_rows], this rank's own: how often each row has been summed
    max_rows: int  # a multiple of 4
    row_bytes: int

    @staticmethod
    def buffer_bytes(size: int, max_rows: int, row_bytes: int) -> int:
        return max_rows * (4 * size + 2 * row_bytes)

    def takes(self, x: torch.Tensor) -> bool:
        rows_fit = x.dim() == 2 and x.shape[1] * x.itemsize == self.row_bytes and 0 < x.shape[0] <= self.max_rows
        return rows_fit and x.stride(1) == 1


def all_reduce(x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """x [T, D] of every rank → their sum, written over x. `exchange.takes(x)`; all ranks call it alike."""
    _launch(x, x, x, 0.0, 1.0, exchange, norm=False)
    return x


def all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float, exchange: Exchange
) -> tuple[torch.Tensor, torch.Tensor]:
    """kernels.norm.add_rms_norm of the ranks' sum of x, which is not rounded on the way."""
    _launch(x, residual, weight, eps, scale, exchange, norm=True)
    return x, residual


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float, exchange: Exchange,
    *, norm: bool,
) -> None:  # fmt: skip
    num_rows, dim = x.shape
    block = triton.next_power_of_2(dim)
    _all_reduce_kernel[(num_rows,)](
        x, residual, weight, exchange.buffers, exchange.counts, x.stride(0), residual.stride(0), exchange.max_rows, eps,
        RANK=exchange.rank, SIZE=len(exchange.buffers), DIM=dim, BLOCK=block, NORM=norm, SCALE=scale,
        num_warps=min(32, max(4, block // 512)), **pdl_options(x, num_rows),
    )  # fmt: skip


@triton.jit
def _rows(buffer, max_rows, SIZE: tl.constexpr, x_ptr):
    """Where the rows of a rank's buffer begin: behind its counts."""
    return tl.multiple_of((buffer + max_rows * (SIZE * 4)).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)


@triton.jit(do_not_specialize=["max_rows"])
def _all_reduce_kernel(
    x_ptr, residual_ptr, weight_ptr, buffers_ptr, counts_ptr, x_row, residual_row, max_rows, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < DIM
    if NORM:  # a weight, which no kernel writes
        gain = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()

    count = tl.load(counts_ptr + row) + 1
    mine = tl.load(x_ptr + row * x_row + column, mask=mask, other=0.0)
    # Of this row in every rank's buffer: past the counts, in the half whose turn it is.
    place = ((count & 1) * max_rows + row) * DIM + column
    here = tl.load(buffers_ptr + RANK)
    tl.store(_rows(here, max_rows, SIZE, x_ptr) + place, mine, mask=mask)
    tl.debug_barrier()  # all of the row, before anybody hears of it
    for other in tl.static_range(SIZE):
        if other != RANK:
            told = tl.load(buffers_ptr + other).to(tl.pointer_type(tl.int32)) + row * SIZE + RANK
            tl.atomic_xchg(told, count, sem="release", scope="sys")
    heard = here.to(tl.pointer_type(tl.int32)) + row * SIZE
    for other in tl.static_range(SIZE):
        if other != RANK:
            while tl.atomic_add(heard + other, 0, sem="acquire", scope="sys") - count < 0:  # the counts may wrap around
                pass
    tl.debug_barrier()
    tl.store(counts_ptr + row, count)

    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(SIZE):
        if other == RANK:
            part = mine
        else:
            theirs = _rows(tl.load(buffers_ptr + other), max_rows, SIZE, x_ptr)
            part = tl.load(theirs + place, mask=mask, other=0.0)
        total += part.to(tl.float32)
    if NORM:
        if SCALE != 1.0:
            total *= SCALE
        kept = residual_ptr + row * residual_row + column
        summed = (total + tl.load(kept, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(kept, summed, mask=mask)
        total = summed.to(tl.float32)  # the norm sees what the next layer will see
        total = total * rms_scale(tl.sum(total * total, axis=0), DIM, eps) * gain
    tl.store(x_ptr + row * x_row + column, total.to(x_ptr.dtype.element_ty), mask=mask)
