"""SwiGLU and GeGLU without their products (Shazeer 2020, arXiv 2002.05202); magnitudes, among which NaN is greatest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options

INFINITE = tl.constexpr(0x7F800000)  # magnitude of infinity, below which is every number


@triton.jit
def magnitude(x):
    """The bits of |x|, fp32 → int32: in the order of the numbers, and NaN is above them all, where a GPU's maxima of
    floats pass over it."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def of_magnitude(bits):
    """|x| again."""
    return bits.to(tl.float32, bitcast=True)


def silu_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up of x [T, 2I] = cat(gate, up) → [T, I] in x's dtype, computed in fp32 and rounded once.

    x's last dimension is contiguous; out [T, I] is allocated when absent.
    """
    if x.is_cuda:
        return silu_mul_triton(x, out)
    return silu_mul_torch(x, out)


def gelu_tanh_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(gate) · up as silu_mul does it, with the tanh approximation of Hendrycks and Gimpel (arXiv 1606.08415)."""
    if x.is_cuda:
        return gelu_tanh_mul_triton(x, out)
    return gelu_tanh_mul_torch(x, out)


def silu_mul_torch(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    product = F.silu(gate).mul_(up)
    return product.to(x.dtype) if out is None else out.copy_(product)


def gelu_tanh_mul_torch(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    product = F.gelu(gate, approximate="tanh").mul_(up)
    return product.to(x.dtype) if out is None else out.copy_(product)


def silu_mul_triton(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return _gated_triton(x, out, gelu=False)


def gelu_tanh_mul_triton(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return _gated_triton(x, out, gelu=True)


def _gated_triton(x: torch.Tensor, out: torch.Tensor | None, gelu: bool) -> torch.Tensor:
    num_tokens, size = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens:
        block = min(1024, triton.next_power_of_2(size))
        # Eight values a thread: one 16-byte load of gate and one of up in bf16.
        _gated_kernel[(num_tokens, triton.cdiv(size, block))](
            x, out, size, x.stride(0), out.stride(0), GELU=gelu, BLOCK=block, num_warps=max(1, block // 256),
            **pdl_options(x, x.shape[0]),
        )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(
    x_ptr, out_ptr, size, x_stride, out_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(x_ptr + token * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_stride + size + column, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # gelu(g) = g/2 · (1 + tanh z), z = √(2/π)(g + 0.044715 g³), and (1 + tanh z)/2 = sigmoid(2z).
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    tl.store(out_ptr + token * out_stride + column, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)
