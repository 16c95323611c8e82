"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), alone and fused with the residual addition before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options


class Unnormed(NamedTuple):
    """rms_norm(rows, weight, eps), for whoever reads it to compute on the way (moe_router.py)."""

    rows: torch.Tensor  # [T, D]
    weight: torch.Tensor  # [D]
    eps: float

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    def normed(self) -> torch.Tensor:
        return rms_norm(self.rows, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in fp32, rounded once to x's dtype.

    NaN where the sum of squares leaves fp32's range (numbers beyond some 1e19): 0, what follows from the formula then,
    would look like a result.
    x [D], [T, D] or [T, heads, D]: any strides but 1 in the last dimension (a view into a fused projection is fine).
    weight [D], any float dtype. out like x, may be x itself; made contiguous when absent.
    """
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps, out)
    return rms_norm_torch(x, weight, eps, out)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += scale · x, rounded to residual's dtype; then rms_norm of that sum. → (normed, residual)

    x and residual [T, D], last dimension contiguous. residual is updated in place. normed has x's dtype and may occupy
    x's memory: x must not be used afterwards.
    """
    if x.is_cuda:
        return add_rms_norm_triton(x, residual, weight, eps, scale)
    return add_rms_norm_torch(x, residual, weight, eps, scale)


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    normed = normalize(x.float(), weight, eps)
    return normed.to(x.dtype) if out is None else out.copy_(normed)


def add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    add_scaled_torch(x, residual, scale)
    return normalize(residual.float(), weight, eps).to(x.dtype), residual


def add_scaled_torch(x: torch.Tensor, residual: torch.Tensor, scale: float) -> None:
    """residual += scale · x, rounded once."""
    if scale == 1.0:
        residual.add_(x)
    else:
        residual.copy_(residual.float().add(x, alpha=scale))


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm of x fp32 → fp32, in memory of its own. F.rms_norm is made of twice as many operators on the CPU."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean = torch.rsub(norm.mul_(norm), eps, alpha=-1.0 / x.shape[-1])  # of squares, + eps: in one operator
    return (x * mean.sqrt().div_(mean)).mul_(weight)  # as rsqrt, but NaN for infinity


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, x_token, x_head = row_layout(x)
    _, _, out_token, out_head = row_layout(out)
    dim, num_rows = x.shape[-1], tokens * heads
    if num_rows == 0:
        return out
    block, rows, warps = row_tile(dim)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, out, x, weight, num_rows, heads, x_token, x_head, out_token, out_head, 0, eps,
        DIM=dim, BLOCK=block, ROWS=rows, ADD=False, SCALE=1.0, num_warps=warps, **pdl_options(x, x.shape[0]),
    )  # fmt: skip
    return out


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, dim = x.shape
    if num_rows:
        block, rows, warps = row_tile(dim)
        _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x, x, residual, weight, num_rows, 1, x.stride(0), 0, x.stride(0), 0, residual.stride(0), eps,
            DIM=dim, BLOCK=block, ROWS=rows, ADD=True, SCALE=scale, num_warps=warps, **pdl_options(x, x.shape[0]),
        )  # fmt: skip
    return x, residual


def row_layout(x: torch.Tensor) -> tuple[int, int, int, int]:
    """→ (tokens, heads, token stride, head stride) of the rows of x."""
    if x.stride(-1) != 1:
        raise ValueError(f"rms_norm needs a last dimension of stride 1, got strides {x.stride()}: call contiguous()")
    if x.ndim == 3:
        return x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    if x.ndim == 2:
        return x.shape[0], 1, x.stride(0), 0
    if x.ndim == 1:
        return 1, 1, x.shape[0], 0
    raise ValueError(f"rms_norm takes 1 to 3 dimensions, got shape {tuple(x.shape)}: view it as [T, heads, D]")


def row_tile(dim: int) -> tuple[int, int, int]:
    """→ (block, rows a program, warps). A thread holds 16 values; short rows share a program to fill its warps.

    It depends on the row's length alone, so that a row is summed in the same order in every batch.
    """
    block = triton.next_power_of_2(dim)
    rows = max(1, 2048 // block)
    return block, rows, min(32, max(4, block // 512))


@triton.jit
def rms_scale(squares, size, eps):
    """1 / sqrt(squares / size + eps) of the sum of squares; NaN, not 0, of one that has left fp32's range."""
    return tl.where(squares < float("inf"), tl.rsqrt(squares / size + eps), float("nan"))


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr, out_ptr, residual_ptr, weight_ptr, num_rows, heads,
    x_token, x_head, out_token, out_head, residual_token, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (rows // heads).to(tl.int64)[:, None]
    head = (rows % heads).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (rows[:, None] < num_rows) & (column < DIM)
    # A weight, which no kernel writes: on its way while the kernel before this one ends.
    gain = tl.load(weight_ptr + column, mask=column < DIM, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()

    values = tl.load(x_ptr + token * x_token + head * x_head + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        if SCALE != 1.0:
            values *= SCALE
        place = residual_ptr + token * residual_token + column
        total = (values + tl.load(place, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(place, total, mask=mask)
        # The norm sees what the next layer will see: the rounded sum.
        values = total.to(tl.float32)
    scale = rms_scale(tl.sum(values * values, axis=1), DIM, eps)
    normed = values * scale[:, None] * gain
    tl.store(out_ptr + token * out_token + head * out_head + column, normed.to(out_ptr.dtype.element_ty), mask=mask)
