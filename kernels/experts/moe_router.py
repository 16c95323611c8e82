"""A router's logits of a few rows in one kernel with the norm before it: each program norms its row again, which costs
less than a launch, and multiplies it by a few experts' rows of the weight.

Those are read before `gdc_wait`, and the gains of the norm (pdl.py has the rule): no kernel just before may write them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import MAX_ROWS, pdl_available, pdl_options
from ..norm.norm import Unnormed, rms_scale, row_tile

# Columns: of fewer, warps have several rows each in norm.py, which are summed in another order than one alone;
# more are too many registers.
MIN_HIDDEN, MAX_HIDDEN = 513, 8192
MOST_READ = 32 << 20  # bytes of the weight, which is read from the L2 cache for each row by itself
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def norm_router(
    x: Unnormed, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """→ rms_norm(x) [T, H], the same bits, and its fp32 logits [T, E], sums that are never rounded. Where it pays:
    `norm_router_rows`.

    x.rows [T, H] and weight [E, H] of any float dtypes, last dimensions contiguous; bias fp32 [E]. A row's logits are
    the same, bit for bit, in every call.
    """
    return norm_router_triton(x, weight, bias) if weight.is_cuda else norm_router_torch(x, weight, bias)


def norm_router_torch(
    x: Unnormed, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    normed = x.normed()
    return normed, functional.linear(normed.float(), weight.float(), bias)


def norm_router_rows(weight: torch.Tensor) -> int:
    """Up to how many rows norm_router takes the place of a norm and a product of cuBLAS, which is launched plainly; 0:
    never. Measured with one row of a weight [128, 2048]."""
    takes = weight.dtype in FLOATS and MIN_HIDDEN <= weight.shape[1] <= MAX_HIDDEN
    if not takes or not pdl_available(weight.device):
        return 0
    return min(MAX_ROWS, max(1, MOST_READ // (weight.numel() * weight.element_size())))


def experts_of_program(num_tokens: int) -> int:
    """With one row as many programs as there are; with more, each row of the weight is read by fewer of them."""
    return 1 if num_tokens == 1 else 2 if num_tokens <= 4 else 4


def norm_router_triton(
    x: Unnormed, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    (num_tokens, hidden), num_experts = x.shape, weight.shape[0]
    if x.rows.stride(1) != 1 or weight.stride(1) != 1 or weight.shape[1] != hidden:
        raise ValueError(
            f"norm_router takes contiguous rows of as many columns, got {tuple(x.shape)} with strides "
            f"{x.rows.stride()} by {tuple(weight.shape)} with {weight.stride()}: call contiguous()"
        )
    normed = torch.empty((num_tokens, hidden), dtype=x.rows.dtype, device=weight.device)
    logits = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=weight.device)
    if num_tokens:
        block, _, warps = row_tile(hidden)
        block_e = experts_of_program(num_tokens)
        _norm_router_kernel[(triton.cdiv(num_experts, block_e), num_tokens)](
            x.rows, x.weight, weight, weight if bias is None else bias, normed, logits, num_experts,
            x.rows.stride(0), weight.stride(0), x.eps,
            HAS_BIAS=bias is not None, DIM=hidden, BLOCK=block, BLOCK_E=block_e, num_warps=warps,
            **pdl_options(normed, num_tokens),
        )  # fmt: skip
    return normed, logits


@triton.jit
def _norm_router_kernel(
    x_ptr, gain_ptr, w_ptr, bias_ptr, normed_ptr, logits_ptr, num_experts, stride_x, stride_w, eps,
    HAS_BIAS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token, and BLOCK_E experts. The norm is _rms_norm_kernel's, over a tile of the same shape: so it is summed in
    the same order."""
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    exists = column < DIM
    near = tl.minimum(expert, num_experts - 1).to(tl.int64)  # experts past the end: the last one again
    w = tl.load(w_ptr + near[:, None] * stride_w + column, mask=exists, other=0.0)
    gain = tl.load(gain_ptr + column, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x_ptr + token * stride_x + column, mask=exists, other=0.0).to(tl.float32)
    scale = rms_scale(tl.sum(values * values, axis=1), DIM, eps)
    normed = (values * scale[:, None] * gain).to(normed_ptr.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + token * DIM + column, normed, mask=exists)
    logits = tl.sum(w.to(tl.float32) * normed.to(tl.float32), axis=1)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + near).to(tl.float32)
    tl.store(logits_ptr + token * num_experts + expert, logits, mask=expert < num_experts)
