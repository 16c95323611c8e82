"""LayerNorm (Ba, Kiros and Hinton 2016, arXiv 1607.06450), alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from .norm import add_scaled_torch, rms_scale, row_layout, row_tile


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias over the last dimension, in fp32, rounded once to x's dtype.

    NaN where the sum of squares leaves fp32's range, as in rms_norm.
    x [D], [T, D] or [T, heads, D]: any strides but 1 in the last dimension (a view into a fused projection is fine).
    weight and bias [D], or [heads, D] for heads with weights of their own; any float dtype. out like x, may be x
    itself; made contiguous when absent.
    """
    if x.is_cuda:
        return layer_norm_triton(x, weight, bias, eps, out)
    return layer_norm_torch(x, weight, bias, eps, out)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """residual += scale · x, rounded to residual's dtype; then layer_norm of that sum. → (normed, residual)

    x and residual [T, D], last dimension contiguous. residual is updated in place. normed has x's dtype and may occupy
    x's memory: x must not be used afterwards.
    """
    if x.is_cuda:
        return add_layer_norm_triton(x, residual, weight, bias, eps, scale)
    return add_layer_norm_torch(x, residual, weight, bias, eps, scale)


def layer_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    values = x.float()
    values = values - values.mean(-1, keepdim=True)
    variance = values.square().mean(-1, keepdim=True) + eps
    normed = values * (variance.sqrt() / variance) * weight  # as rsqrt, but NaN for infinity
    if bias is not None:
        normed += bias
    return normed.to(x.dtype) if out is None else out.copy_(normed)


def add_layer_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    add_scaled_torch(x, residual, scale)
    return layer_norm_torch(residual, weight, bias, eps), residual


def layer_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, x_token, x_head = row_layout(x)
    _, _, out_token, out_head = row_layout(out)
    if tokens * heads:
        _launch(x, out, x, weight, bias, eps, heads, (x_token, x_head, out_token, out_head), 0, add=False, scale=1.0)
    return out


def add_layer_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if x.shape[0]:
        strides = (x.stride(0), 0, x.stride(0), 0)
        _launch(x, x, residual, weight, bias, eps, 1, strides, residual.stride(0), add=True, scale=scale)
    return x, residual


def _launch(
    x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    eps: float, heads: int, strides: tuple[int, int, int, int], residual_token: int, *, add: bool, scale: float,
) -> None:  # fmt: skip
    dim = x.shape[-1]
    num_rows = x.numel() // dim
    block, rows, warps = row_tile(dim)
    _layer_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, out, residual, weight, weight if bias is None else bias, num_rows, heads, *strides, residual_token,
        weight.stride(0) if weight.ndim == 2 else 0, eps,
        DIM=dim, BLOCK=block, ROWS=rows, ADD=add, SCALE=scale, BIAS=bias is not None, num_warps=warps,
        **pdl_options(x, x.shape[0]),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x_ptr, out_ptr, residual_ptr, weight_ptr, bias_ptr, num_rows, heads,
    x_token, x_head, out_token, out_head, residual_token, weight_head, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (rows // heads).to(tl.int64)[:, None]
    head = (rows % heads).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (rows[:, None] < num_rows) & (column < DIM)
    # Weights, which no kernel writes: on their way while the kernel before this one ends.
    gain = tl.load(weight_ptr + head * weight_head + column, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias_ptr + head * weight_head + column, mask=mask, other=0.0).to(tl.float32)
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
    values -= (tl.sum(values, axis=1) / DIM)[:, None]
    values = tl.where(column < DIM, values, 0.0)
    normed = values * rms_scale(tl.sum(values * values, axis=1), DIM, eps)[:, None] * gain
    if BIAS:
        normed += shift
    tl.store(out_ptr + token * out_token + head * out_head + column, normed.to(out_ptr.dtype.element_ty), mask=mask)
