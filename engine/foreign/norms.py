"""Which norms of a model of transformers are RMS norms: tried on random numbers, for their names say little."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def may_be_norm(module: nn.Module) -> bool:
    """By its shape: one vector of weights and nothing else."""
    weight = module._parameters.get("weight")
    return (
        "norm" in type(module).__name__.lower()
        and weight is not None
        and weight.dim() == 1
        and len(module._parameters) == 1
        and not module._buffers
        and not module._modules
        and eps_of(module) is not None
    )


def eps_of(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon", "norm_eps"):
        if isinstance(value := getattr(module, name, None), float):
            return value
    return None


def as_rms_norm(module: nn.Module) -> tuple[float, bool] | None:
    """(eps, whether weights are less one) where it is an RMS norm: it is tried on random numbers."""
    given, eps = module._parameters["weight"], eps_of(module)
    assert given is not None and eps is not None
    size = given.shape[0]
    tried = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, size, generator=generator), torch.randn(size, generator=generator)
    tried._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    try:
        with torch.no_grad():
            found = tried(x)
            tiny = tried(x * 1e-4)
    except Exception:
        return None
    for offset in (0.0, 1.0):
        if all(
            isinstance(got, Tensor) and torch.allclose(got, _rms(x, weight + offset, eps), rtol=1e-4, atol=1e-5)
            for got, x in ((found, x), (tiny, x * 1e-4))
        ):
            return eps, bool(offset)
    return None


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
