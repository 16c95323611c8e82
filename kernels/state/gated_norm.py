"""RMSNorm over each head, times a gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options

_GATES = ("silu", "sigmoid")


def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str = "silu") -> Tensor:
    """weight · o / sqrt(mean(o²) + eps) over each head, rounded to o's dtype, times silu(z) or sigmoid(z) in fp32.

    o [T, H, V], contiguous; z [T, H · V], a view with rows of any stride; weight [V] of any float dtype. Returns
    [T, H · V] in o's dtype, contiguous. Raises ValueError for another gate.
    """
    if gate not in _GATES:
        raise ValueError(f"unknown gate {gate!r}: {' and '.join(_GATES)} are known")
    function = gated_rms_norm_triton if o.is_cuda else gated_rms_norm_torch
    return function(o, z, weight, eps, gate)


def gated_rms_norm_torch(o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str = "silu") -> Tensor:
    values = o.float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()
    wide = z.float()
    factor = torch.sigmoid(wide) * wide if gate == "silu" else torch.sigmoid(wide)
    return (normed.to(o.dtype).float().flatten(1) * factor).to(o.dtype)


def gated_rms_norm_triton(o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str = "silu") -> Tensor:
    tokens, heads, dim = o.shape
    out = torch.empty(tokens, heads * dim, dtype=o.dtype, device=o.device)
    if not tokens:
        return out
    block = triton.next_power_of_2(dim)
    rows = max(1, 2048 // block)
    _gated_rms_norm_kernel[(triton.cdiv(tokens * heads, rows),)](
        o, z, weight, out, tokens * heads, heads, z.stride(0), eps,
        DIM=dim, BLOCK=block, ROWS=rows, SILU=gate == "silu", num_warps=4, **pdl_options(o, tokens),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_kernel(
    o_ptr, z_ptr, weight_ptr, out_ptr, num_rows, heads, z_token, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < num_rows) & (column < DIM)
    place = row.to(tl.int64)[:, None] * DIM + column
    values = tl.load(o_ptr + place, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(weight_ptr + column, mask=column < DIM, other=0.0).to(tl.float32)
    at = (row // heads).to(tl.int64) * z_token + (row % heads) * DIM
    z = tl.load(z_ptr + at[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / DIM + eps)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    normed = (values * scale[:, None] * gain).to(dtype).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-z))
    if SILU:
        factor *= z
    tl.store(out_ptr + place, (normed * factor).to(dtype), mask=mask)
