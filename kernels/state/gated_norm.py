"""RMSNorm over each head, times a gate."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str = "silu") -> Tensor:
    """weight · o / sqrt(mean(o²) + eps) over each head, rounded to o's dtype, times silu(z) or sigmoid(z) in fp32.

    o [T, H, V], last dimension contiguous; z [T, H · V], a view with rows of any stride; weight [V] of any float dtype.
    Returns [T, H · V] in o's dtype, contiguous. Raises ValueError for another gate.
    """
    if gate not in ("silu", "sigmoid"):
        raise ValueError(f"unknown gate {gate!r}: silu and sigmoid are known")
    return gated_rms_norm_torch(o, z, weight, eps, gate)


def gated_rms_norm_torch(o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str = "silu") -> Tensor:
    values = o.float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()
    wide = z.float()
    factor = torch.sigmoid(wide) * wide if gate == "silu" else torch.sigmoid(wide)
    return (normed.to(o.dtype).float().flatten(1) * factor).to(o.dtype)
