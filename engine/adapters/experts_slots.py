"""Experts' matrices in a slot: what a module of an adapter is of them, and how its pair is cut for this rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from ..layers.experts import PARTS, STACKED, Experts
from ..models.model import Model
from ..quant.weights import WeightHolder
from .adapter import Adapter, Pair
from .experts_places import layer_of_experts, makes_transposed

EXPERTS = "experts"  # what --lora-target-modules calls them
PRODUCTS = ("gate_up", "down")  # each has a place in a slot
_LAYER = re.compile(r"layers\.(\d+)\.")


def modules(model: Model) -> Iterator[tuple[str, WeightHolder, str]]:
    """(path, holder, part) of all that an adapter may name. Experts have one for each expert's product, with the part
    "3.gate", and, by `path_of_all`, one for all experts', with one of PRODUCTS; whatever the checkpoint has."""
    seen = set()
    for path, (holder, part) in model.weight_map().items():
        if not isinstance(holder, Experts):
            yield path, holder, part
            continue
        if part != STACKED:
            yield path, holder, part
        else:
            for expert in range(holder.num_experts):
                for name in PARTS:
                    yield f"{path}.{expert}{model.config.named(f'.{name}_proj')}", holder, f"{expert}.{name}"
        if id(holder) not in seen and (layer := _LAYER.search(path)):
            seen.add(id(holder))
            for product in PRODUCTS:
                yield _path_of_all(layer[1], product), holder, product


def path_of_all(pair: Pair) -> str:
    """Of a pair of all experts."""
    layer = layer_of_experts(pair.module)
    return pair.path if layer is None else _path_of_all(layer, pair.parameter.removesuffix("_proj"))


def _path_of_all(layer: int | str, product: str) -> str:
    return f"layers.{layer}.{EXPERTS}.{product}_proj"


def product_of(part: str) -> str:
    """In whose place a part of `modules` is."""
    return "down" if part.endswith("down") else "gate_up"


def shapes(holder: Experts, product: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of this rank's A and B in a slot, as kernels.moe_lora.ExpertPairs has them."""
    num_experts, inner, hidden = len(holder.mine), holder.span[1], holder.hidden
    if product == "down":
        return (num_experts, rank, inner), (num_experts, hidden, rank)
    return (num_experts, 2 * rank, hidden), (num_experts, 2 * inner, rank)


def put(
    holder: Experts, part: str, adapter: Adapter, pair: Pair, a: Tensor, b: Tensor
) -> None:  # fmt: skip
    """Into a and b, zeros of `shapes`, what the pair has of this rank's experts, its scale multiplied into B."""
    low, high = adapter.read(pair.a), adapter.read(pair.b).float() * pair.scale
    if not pair.parameter:
        expert, _, name = part.partition(".")
        if int(expert) in holder.mine:
            mine = slice(int(expert) - holder.mine.start, int(expert) - holder.mine.start + 1)
            _put(holder, name, pair.rank, a[mine], b[mine], low[None], high[None])
        return
    low = low.unflatten(0, (pair.experts, pair.rank))
    high = high.unflatten(1, (pair.rank, pair.experts)).permute(2, 0, 1)
    if makes_transposed(adapter, pair, holder.spec, holder.hidden):
        low, high = high.transpose(1, 2), low.transpose(1, 2)
    first, last = holder.mine.start, holder.mine.stop
    low, high = low[first:last], high[first:last]
    parts: Mapping[str, Tensor] = {"down": high}
    if part == "gate_up" and holder.spec.interleaved:
        parts = {"gate": high[:, ::2], "up": high[:, 1::2]}
    elif part == "gate_up":
        parts = dict(zip(("gate", "up"), high.chunk(2, dim=1), strict=True))
    for name, rows in parts.items():
        _put(holder, name, pair.rank, a, b, low, rows)


def _put(holder: Experts, name: str, rank: int, a: Tensor, b: Tensor, low: Tensor, high: Tensor) -> None:
    """low [experts, r, in], high [experts, out, r]."""
    start, size = holder.span
    if name == "down":
        a[:, :rank] = low.narrow(2, start, size)
        b[:, :, :rank] = high
        return
    half = name == "up"
    first = a.shape[1] // 2 * half
    a[:, first : first + rank] = low
    b[:, size * half : size * (half + 1), :rank] = high.narrow(1, start, size)
