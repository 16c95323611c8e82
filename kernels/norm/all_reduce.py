"""Sums over the ranks of one host through memory that all of them can reach, alone or with the norm behind them.

Each program has a row. It writes the row of this rank into every other rank's memory, waits until theirs have come into
its own, and sums the rows of all in their order, in fp32: so every rank has the same bits, in every run.

What has come is told from what has not by the numbers themselves: memory that waits for a row holds a number that no
rank ever sends (ABSENT), in every place, and whoever has read a row puts that number back. A row so takes one way over
the link and no fence. (TensorRT-LLM's one-shot sums do it with -0.0, after Lamport.)

A card starts programs in the order of their rows, so of all rows that somebody waits for, the first is on its way from
every rank: more rows than run at a time wait for nobody who waits for them.

Two buffers take turns, by how often a row has been summed. That is enough: a rank writes into a buffer again only after
it has heard of the others in the sum between, whose kernels write when those before them, which read that buffer and
emptied it, have ended. So nothing in a launch depends on how many came before it, and it can be captured in a CUDA
graph; all ranks replay equally often.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from .norm import rms_scale

# In 16 bits that is -0.0, in 32 a number of 1e-41 or so: 0 is sent in its place.
ABSENT_16 = tl.constexpr(-0x8000)
ABSENT_32 = tl.constexpr(-0x7FFF8000)


@dataclass(frozen=True)
class Exchange:
    """Memory through which ranks exchange rows of `row_bytes`, as many as `max_rows` at a time.

    Every rank's buffer: [2 turns, the other ranks, max_rows, row_bytes]. The others in their order, from the one behind
    this rank on and around.
    """

    rank: int
    buffers: torch.Tensor  # int64 [ranks]: where each rank's buffer begins, as this rank reaches it
    counts: torch.Tensor  # int32 [max_rows], this rank's own: how often each row has been summed
    max_rows: int
    row_bytes: int

    @staticmethod
    def buffer_bytes(size: int, max_rows: int, row_bytes: int) -> int:
        return 2 * (size - 1) * max_rows * row_bytes

    @staticmethod
    def empty(buffer: torch.Tensor) -> None:
        """uint8 [buffer_bytes]: nothing has come. Of every rank, before any sums."""
        buffer.view(torch.int16).fill_(ABSENT_16.value)

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
    block = max(128, triton.next_power_of_2(dim))  # one for each thread: warps that share some would empty them apart
    _all_reduce_kernel[(num_rows,)](
        x, residual, weight, exchange.buffers, exchange.counts, x.stride(0), residual.stride(0), exchange.max_rows, eps,
        RANK=exchange.rank, SIZE=len(exchange.buffers), DIM=dim, BLOCK=block, NORM=norm, SCALE=scale,
        num_warps=min(16, max(4, block // 256)), **pdl_options(x, num_rows),
    )  # fmt: skip


@triton.jit
def _rows(buffer, x_ptr):
    """A rank's buffer as rows of numbers like x's."""
    return tl.multiple_of(buffer.to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)


@triton.jit(do_not_specialize=["max_rows"])
def _all_reduce_kernel(
    x_ptr, residual_ptr, weight_ptr, buffers_ptr, counts_ptr, x_row, residual_row, max_rows, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    bits: tl.constexpr = tl.int16 if x_ptr.dtype.element_ty.primitive_bitwidth == 16 else tl.int32
    ABSENT: tl.constexpr = ABSENT_16 if x_ptr.dtype.element_ty.primitive_bitwidth == 16 else ABSENT_32
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < DIM
    absent = tl.full([BLOCK], ABSENT, bits)
    if NORM:  # a weight, which no kernel writes
        gain = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    here = tl.load(buffers_ptr + RANK)
    if PDL:
        gdc_wait()

    count = tl.load(counts_ptr + row)
    mine = tl.load(x_ptr + row * x_row + column, mask=mask, other=0.0)
    mine = tl.where(mine.to(bits, bitcast=True) == ABSENT, 0.0, mine)
    turn = (count & 1) * (SIZE - 1)
    for step in tl.static_range(1, SIZE):  # in the memory of the rank so many behind, this is the one before around
        theirs = _rows(tl.load(buffers_ptr + (RANK + step) % SIZE), x_ptr)
        place = ((turn + SIZE - 1 - step) * max_rows + row) * DIM
        tl.store(theirs + place + column, mine, mask=mask, cache_modifier=".wt")
    if NORM:
        kept = residual_ptr + row * residual_row + column
        residual = tl.load(kept, mask=mask, other=0.0).to(tl.float32)

    total = tl.zeros([BLOCK], tl.float32)
    for other in range(SIZE):
        if other == RANK:
            part = mine
        else:
            place = ((turn + (other - RANK - 1 + SIZE) % SIZE) * max_rows + row) * DIM
            come = _rows(here, x_ptr) + place + column
            part = tl.load(come, mask=mask, other=0.0, volatile=True)
            while tl.max((part.to(bits, bitcast=True) == ABSENT).to(tl.int32), axis=0) != 0:
                part = tl.load(come, mask=mask, other=0.0, volatile=True)
            tl.store(come.to(tl.pointer_type(bits)), absent, mask=mask)
        total += part.to(tl.float32)
    tl.debug_barrier()  # all have read the count
    tl.store(counts_ptr + row, count + 1)
    if NORM:
        if SCALE != 1.0:
            total *= SCALE
        summed = (total + residual).to(residual_ptr.dtype.element_ty)
        tl.store(kept, summed, mask=mask)
        total = summed.to(tl.float32)  # the norm sees what the next layer will see
        total = total * rms_scale(tl.sum(total * total, axis=0), DIM, eps) * gain
    tl.store(x_ptr + row * x_row + column, total.to(x_ptr.dtype.element_ty), mask=mask)
