"""What of a model is quantised, what its experts run with: for the start's lines and /server_info."""

from __future__ import annotations

from collections import Counter

from ..layers.experts import Experts
from ..layers.linear import Linear
from ..models.latent_attention import LatentExpansion
from ..models.model import Model
from ..planning.memory import gib
from ..quant.method import Dequantized, Quantized
from ..quant.unquantized import Tied


def describe(model: Model) -> dict[str, str | int]:
    """method; formats and products, by how often; quantized and unquantized: matrices of the checkpoint; bytes of the
    first. Empty where nothing is quantised."""
    scheme = model.config.quantization
    if scheme is None:
        return {}
    formats, products = Counter[str](), Counter[str]()
    plain = size = 0
    for layer in model.modules():
        if isinstance(layer, Linear) and isinstance(layer.method, (Quantized, Dequantized)):
            method = layer.method
            formats.update(format.name for format in method.formats.values())
            if isinstance(method, Quantized):
                products.update(str(matrix.name) for matrix in method.matrices)
            else:
                products["16-bit products, dequantised"] += 1
            plain += len(layer.shape.parts) - len(method.formats)
            size += sum(tensor.numel() * tensor.element_size() for tensor in method.parameters())
        elif isinstance(layer, Experts):
            matrices = 3 * layer.num_experts
            found = layer.quantised
            formats.update(found)
            if found.total():
                products.update(layer.method.products())
                size += sum(tensor.numel() * tensor.element_size() for tensor in layer.method.parameters())
            plain += matrices - found.total()
        elif isinstance(layer, LatentExpansion):
            formats.update(format.name for format in layer.formats.values())
            if layer.formats:
                products["numbers, dequantised"] += 1
                size += sum(tensor.numel() * tensor.element_size() for tensor in layer.parameters())
            plain += not layer.formats
        elif isinstance(layer, Linear) and not isinstance(layer.method, Tied):
            plain += len(layer.shape.parts)
    return {
        "method": scheme.method,
        "formats": _counted(formats),
        "products": _counted(products),
        "quantized": formats.total(),
        "unquantized": plain,
        "bytes": size,
    }


def log_line(found: dict[str, str | int]) -> str:
    """In one line."""
    if not found["quantized"]:
        return f"quantization {found['method']}: of no matrix, {found['unquantized']} are as they are"
    return (
        f"quantization {found['method']}: {found['formats']}; {found['unquantized']} matrices as they are; "
        f"{gib(int(found['bytes']))}; multiplied by {found['products']}"
    )


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{name} × {count}" for name, count in names.most_common())


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


def experts_log_line(found: dict[str, str | int]) -> str:
    """In one line."""
    return (
        f"experts: {found['layers']} layers of {found['experts']}, of which a token has {found['experts_per_token']}; "
        f"on this rank {found['on_this_rank']}; {found['products']}"
    )
