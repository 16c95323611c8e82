"""What a mixture's experts run with: for the start's lines and /server_info."""

from __future__ import annotations

from collections import Counter

from ..layers.experts import Experts
from ..models.model import Model


def describe_experts(model: Model) -> dict[str, str | int]:
    """layers with experts; how many each has, and a token chooses; of them those on this rank, whole or sliced; the
    ranks that share them out whole, as many each, in order, or 0; what multiplies by them. Empty without experts."""
    mixtures = [layer for layer in model.modules() if isinstance(layer, Experts)]
    if not mixtures:
        return {}
    products = Counter[str]()
    for layer in mixtures:
        if layer.quantised:
            products.update(name for name in layer.method.products())
        else:
            products[f"products of {str(layer.place.dtype).removeprefix('torch.')}"] += 1
    first = mixtures[0]
    sliced = first.span[1] < first.spec.inner
    return {
        "layers": len(mixtures),
        "experts": first.num_experts,
        "experts_per_token": first.spec.routing.top_k,
        "on_this_rank": f"{len(first.mine)}{f', {first.span[1]} of {first.spec.inner} gates each' if sliced else ''}",
        "ranks": 0 if len(first.mine) == first.num_experts else first.place.tp_size,
        "products": ", ".join(f"{name} × {count} layers" for name, count in products.most_common()),
    }


def told_of_experts(found: dict[str, str | int]) -> str:
    """In one line."""
    return (
        f"experts: {found['layers']} layers of {found['experts']}, of which a token has {found['experts_per_token']}; "
        f"on this rank {found['on_this_rank']}; {found['products']}"
    )
