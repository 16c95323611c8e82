"""RMSNorm over groups of channels with a gate before or behind it, or the gate alone: what comes behind a scan."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options

Order = Literal["gate_first", "norm_first"]


def gated_group_norm(
    y: Tensor, z: Tensor, weight: Tensor | None, num_groups: int, eps: float, order: Order = "gate_first"
) -> Tensor:
    """weight · norm(y · silu(z)), or weight · norm(y) · silu(z), each group of C / num_groups channels normed by
    itself; y · silu(z) without a weight.

    y [T, C], contiguous; z [T, C], rows of any stride; weight [C] of any float dtype. Returns [T, C] in y's dtype; in
    between, what is normed is rounded before it is multiplied by the weight.
    """
    function = gated_group_norm_triton if y.is_cuda else gated_group_norm_torch
    return function(y, z, weight, num_groups, eps, order)


def gated_group_norm_torch(
    y: Tensor, z: Tensor, weight: Tensor | None, num_groups: int, eps: float, order: Order = "gate_first"
) -> Tensor:
    values, gate = y.float(), z.float() * torch.sigmoid(z.float())
    if weight is None or order == "gate_first":
        values = values * gate
    if weight is None:
        return values.to(y.dtype)
    grouped = values.unflatten(1, (num_groups, -1))
    normed = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(1)
    result = normed.to(y.dtype).float() * weight.float()
    return (result if order == "gate_first" else result.to(y.dtype).float() * gate).to(y.dtype)


def gated_group_norm_triton(
    y: Tensor, z: Tensor, weight: Tensor | None, num_groups: int, eps: float, order: Order = "gate_first"
) -> Tensor:
    tokens, channels = y.shape
    out = torch.empty_like(y)
    if not tokens:
        return out
    size = channels // num_groups
    block = triton.next_power_of_2(size)
    _gated_group_norm_kernel[(tokens, num_groups)](
        y, z, y if weight is None else weight, out, z.stride(0), eps,
        SIZE=size, BLOCK=block, NORM=weight is not None, GATE_FIRST=order == "gate_first",
        num_warps=4 if block <= 2048 else 8, **pdl_options(y, tokens),
    )  # fmt: skip
    return out


@triton.jit
def _gated_group_norm_kernel(
    y_ptr, z_ptr, weight_ptr, out_ptr, z_token, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, GATE_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    channel = group * SIZE + column
    place = token * (SIZE * tl.num_programs(1)) + channel
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    values = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * z_token + channel, mask=inside, other=0.0).to(tl.float32)
    gate = z / (1.0 + tl.exp(-z))
    if NORM:
        if GATE_FIRST:
            values *= gate
        values *= tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
        gain = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        values = values.to(dtype).to(tl.float32) * gain
        if not GATE_FIRST:
            values = values.to(dtype).to(tl.float32) * gate
    else:
        values *= gate
    tl.store(out_ptr + place, values.to(dtype), mask=inside)
