"""How the gates of an expert are activated: silu, gpt-oss's clamped form, or gelu with tanh; and experts without gates.

One number says which, everywhere here: `limit` is 0 for silu(gate) · up; above it for gpt-oss's
g · σ(1.702 g) · (u + 1), where g = min(gate, limit) and u = clamp(up, ±limit); GELU for gelu(gate) · up; RELU2 for
max(up, 0)², without gate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

RELU2 = -2.0
GELU = -1.0  # Hendrycks and Gimpel's with tanh (arXiv 1606.08415)


def kind_of(limit: float) -> int:
    """As kernels are told of it: 0 silu, 1 clamped, 2 gelu, 3 relu2."""
    return {GELU: 2, RELU2: 3}.get(limit, int(limit > 0))


def gated(x: torch.Tensor, limit: float = 0.0) -> torch.Tensor:
    """x [T, 2I] = cat(gate, up), or up alone [T, I] → [T, I] in its dtype, computed in fp32."""
    if limit == RELU2:
        return x.float().clamp_(min=0).square_().to(x.dtype)
    gate, up = x.float().chunk(2, dim=-1)
    if limit == GELU:
        product = F.gelu(gate, approximate="tanh") * up
    elif limit:
        gate = gate.clamp(max=limit)
        product = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-limit, limit) + 1)
    else:
        product = F.silu(gate) * up
    return product.to(x.dtype)


@triton.jit
def activated(gate, up, limit, KIND: tl.constexpr):
    """`gated` of fp32 tiles."""
    if KIND == 1:
        gate = tl.minimum(gate, limit)
        return gate * tl.sigmoid(1.702 * gate) * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)
    elif KIND == 2:  # as in norm/activation.py
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        return gate * tl.sigmoid(gate) * up
