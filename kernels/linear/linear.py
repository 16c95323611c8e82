"""Products of a few rows with a weight: y = x Wᵀ + b, at the speed at which the weight streams from memory.

With one row a program multiplies and adds without tensor cores; with up to 64 rows, a tile of the weight is the large
operand of the tensor cores and K is split over programs, so that every SM has something to read. Both are launched with
programmatic dependent launch: they begin while the kernel before them is still running.

What they read before `gdc_wait` is the weight alone (pdl.py has the rule): no kernel just before may write it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_available, pdl_options
from ..launch.tiles import Row, fits, tile_table

MAX_ROWS = 64  # of x
ADDED_ROWS = 1  # of x, where the product takes the residual stream, to add to
MAX_SPLITS = 4
MAX_SPLIT_N = 8192  # of a weight whose K is split
MIN_BLOCK_N = 16
PARTIALS = 1 << 22  # fp32 numbers of a workspace: also for what quant_linear, quant_many and fp8_linear split


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    late: bool = False,
) -> torch.Tensor:
    """x Wᵀ + b, added up in fp32 and rounded once to x's dtype. Where it pays: `small_linear_rows`.

    x [M, K], M <= 64; weight [N, K] and bias [N] of x's dtype; last dimensions contiguous. out [M, N] like x, made when
    absent. Calls on a device share a workspace (`prepare`): they belong on one stream, or one after the other. A row's
    result is the same, bit for bit, in every call with 2 to 16, 17 to 32, or 33 to 64 rows. residual [M, N] like out,
    of ADDED_ROWS rows: is added to, before the rounding, and returned. late, of one row: the next kernel starts once x
    is there, and may read it as well without waiting (pdl.py). Raises ValueError for other layouts and for a K that the
    tile does not divide.
    """
    if x.is_cuda:
        return small_linear_triton(x, weight, bias, out, residual, late=late)
    return small_linear_torch(x, weight, bias, out, residual)


def small_linear_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    y = torch.nn.functional.linear(x, weight, bias)
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)


@lru_cache
def small_linear_rows(n: int, k: int, dtype: torch.dtype) -> int:
    """Up to how many rows small_linear beats cuBLAS for a weight [n, k]; 0: never.

    Measured on an H200 with the weights of an 8B model, and applied to weights like them. Against cuBLAS 13, N x K, up
    to 16 rows: 4096 x 4096 takes 17 to 28 % less time, 4096 x 14336 6 to 8 %; 6144 x 4096 and 28672 x 4096 no less, but
    with one row kernels that overlap follow each other without cuBLAS's in between; 128256 x 4096 no less.
    """
    if dtype not in (torch.bfloat16, torch.float16) or n * k < 1 << 23 or k % 512:
        return 0
    if not torch.cuda.is_available() or not pdl_available(torch.device("cuda", torch.cuda.current_device())):
        return 0
    ranges = tile_table("small_linear_rows")
    return next((row["rows"] for row in ranges if row["min_n"] <= n <= row["max_n"]), 0)


class Tile(NamedTuple):
    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1
    prefetch: int = 0  # blocks of K that are fetched into the L2 cache before the wait


@lru_cache
def fma_tile(n: int, k: int) -> Tile:
    """The fastest of those measured: few rows of W a program until there are enough programs to fill the card."""
    rows = tile_table("small_linear_fma")
    return _tile(next(row for row in rows if fits(row["max_n"], n) and (k % row["block_k"] == 0 or row is rows[-1])))


@lru_cache
def dot_tile(m: int, n: int) -> Tile:
    """The fastest of those measured: deep tiles when there is one program an SM, else such that several share one."""
    rows = tile_table("small_linear_dot")
    return _tile(next(row for row in rows if fits(row["max_rows"], m) and fits(row["max_n"], n)))


def _tile(row: Row) -> Tile:
    return Tile(**{name: row[name] for name in Tile._fields if name in row})


class _Workspace(NamedTuple):
    partials: torch.Tensor  # fp32, [tiles, splits, BLOCK_N, BLOCK_M] of the call that uses it
    counters: torch.Tensor  # int32, one a tile: how many splits have arrived; 0 between calls


_workspaces: dict[torch.device, _Workspace] = {}


def prepare(device: torch.device) -> _Workspace:
    """Allocate the device's workspace (16 MiB) unless it is there; RuntimeError while a CUDA graph is captured."""
    workspace = _workspaces.get(device)
    if workspace is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"small_linear has no workspace on {device} and a graph is captured: call prepare first")
        workspace = _workspaces[device] = _Workspace(
            torch.empty(PARTIALS, dtype=torch.float32, device=device),
            torch.zeros(MAX_SPLIT_N // MIN_BLOCK_N, dtype=torch.int32, device=device),
        )
    return workspace


def small_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
    late: bool = False,
) -> torch.Tensor:
    """small_linear on Triton; `tile` overrides the choice; one row and a tile that splits goes to the dot kernel."""
    (m, k), n = x.shape, weight.shape[0]
    if m > MAX_ROWS or weight.shape[1] != k:
        raise ValueError(
            f"small_linear takes [M <= {MAX_ROWS}, K] by [N, K], got {tuple(x.shape)} by {tuple(weight.shape)}: "
            "use functional.linear"
        )
    if residual is not None:
        out = residual
    if out is None:
        out = x.new_empty(m, n)
    if m == 0:
        return out
    if x.stride(1) != 1 or out.stride(1) != 1 or weight.stride(1) != 1 or weight.stride(0) % 8:
        raise ValueError(
            f"small_linear needs contiguous rows, W's a multiple of 8 apart, got strides {x.stride()} of x, "
            f"{weight.stride()} of W, {out.stride()} of out: call contiguous()"
        )
    tile = tile or (fma_tile(n, k) if m == 1 else dot_tile(m, n))
    if k % (tile.splits * tile.block_k):
        raise ValueError(
            f"K = {k} is no multiple of {tile.splits} splits x {tile.block_k}: use functional.linear, or another tile"
        )
    programs = triton.cdiv(n, tile.block_n)
    if m == 1 and tile.splits == 1:
        launch = pdl_options(x, m)
        if residual is not None and launch["PDL"] and tile.warps == 8:
            # Of 40, which ptxas takes by itself, six programs fit a multiprocessor and not eight: N = 4096 would be two
            # waves. What it spills for that (8 bytes; late, 16) is used behind the loop.
            launch["maxnreg"] = 32
        _fma_kernel[(programs,)](
            x, weight, weight if bias is None else bias, out, n, k, weight.stride(0),
            HAS_BIAS=bias is not None, ADD=residual is not None, EVEN_N=n % tile.block_n == 0, BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k, STAGES=tile.stages, LATE=late,
            num_warps=tile.warps, **launch,
        )  # fmt: skip
        return out
    if residual is not None or late:
        raise ValueError(
            f"small_linear adds to a residual of {ADDED_ROWS} row with a tile of one split, got {m} rows and {tile}: "
            "add the result"
        )
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64
    workspace = _workspaces.get(x.device) or prepare(x.device)
    if tile.splits > 1 and (n > MAX_SPLIT_N or tile.splits > MAX_SPLITS or tile.block_n < MIN_BLOCK_N):
        raise ValueError(
            f"N = {n} in {tile.splits} splits and blocks of {tile.block_n} exceeds the workspace of {MAX_SPLIT_N} in "
            f"{MAX_SPLITS} splits and blocks of {MIN_BLOCK_N}: use one split"
        )
    _dot_kernel[(programs, tile.splits)](
        x, weight, weight if bias is None else bias, out, workspace.partials, workspace.counters,
        m, n, k, x.stride(0), weight.stride(0), out.stride(0),
        HAS_BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        SPLITS=tile.splits, STAGES=tile.stages, PREFETCH=tile.prefetch,
        num_warps=tile.warps, **pdl_options(x, m),
    )  # fmt: skip
    return out


@triton.jit
def _fma_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, N, K, stride_w,
    HAS_BIAS: tl.constexpr, ADD: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end re-read the last one: the loads need no masks.
    row = n if EVEN_N else tl.minimum(n, N - 1)
    w_ptrs = w_ptr + row.to(tl.int64)[:, None] * stride_w + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    w = tl.load(w_ptrs, eviction_policy="evict_first")
    if PDL:
        if LATE:
            gdc_wait()
            gdc_launch_dependents()
        else:
            gdc_launch_dependents()
            gdc_wait()
    # A block of W is on its way while the one before it is added.
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        next_w = tl.load(w_ptrs + start, eviction_policy="evict_first")
        x = tl.load(x_ptr + start - BLOCK_K + k)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
        w = next_w
    x = tl.load(x_ptr + K - BLOCK_K + k)
    acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(out_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M"])
def _dot_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr,
    M, N, K, stride_x, stride_w, stride_out,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    split_len = K // SPLITS
    first_k = split * split_len
    w_rows = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_w + first_k  # rows past the end: the last one
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            # Loads into shared memory belong to the loop behind the wait; the L2 cache can be filled before it.
            block = tl.minimum(tl.arange(0, PREFETCH), split_len // BLOCK_K - 1)[None, :]
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0", "=r,l,r",
                [(w_rows + block * BLOCK_K).to(tl.int64), BLOCK_K * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        gdc_wait()

    w_ptrs = w_rows + k[None, :]
    x_ptrs = x_ptr + m[None, :] * stride_x + (first_k + k)[:, None]
    row_exists = (m < M)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, split_len, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_ptrs + start, eviction_policy="evict_first")
        x = tl.load(x_ptrs + start, mask=row_exists, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")

    out_ptrs = out_ptr + m[None, :] * stride_out + n[:, None]
    out_mask = row_exists & (n < N)[:, None]
    store_sum(
        acc, out_ptrs, out_mask, bias_ptr, n, N, partials_ptr + tile * (SPLITS * BLOCK_N * BLOCK_M),
        counters_ptr + tile, split, HAS_BIAS, BLOCK_M, BLOCK_N, SPLITS,
    )  # fmt: skip


@triton.jit
def store_sum(
    acc, out_ptrs, out_mask, bias_ptr, n, N, partials_ptr, counter_ptr, split,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Writes the sum of all splits' acc [BLOCK_N, BLOCK_M], and the bias of rows n: whoever comes last adds them, in
    the order of the splits. partials_ptr and counter_ptr: of this tile alone."""
    if SPLITS == 1:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptrs, acc.to(out_ptrs.dtype.element_ty), mask=out_mask)
    else:
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(partials_ptr + split * (BLOCK_N * BLOCK_M) + place, acc)
        # All threads' stores come before the one thread's release; its acquire, before all threads' loads.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if arrived == SPLITS - 1:
            tl.store(counter_ptr, 0)  # for the next call, which waits for the end of this one
            # In the splits' order, whichever came last. Not from L1, which does not see other SMs' stores.
            total = tl.load(partials_ptr + place, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(partials_ptr + other * (BLOCK_N * BLOCK_M) + place, cache_modifier=".cg")
            if HAS_BIAS:
                total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
            tl.store(out_ptrs, total.to(out_ptrs.dtype.element_ty), mask=out_mask)
