"""Random weights, for a model whose files are not there (--load-format dummy)."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from ..layers.experts import Experts
from ..layers.sinks import Sinks
from ..models.model import Loadable
from ..quant.weights import LinearShape, WeightHolder


def fill_with_noise(model: Loadable, seed: int, progress: Callable[[int, int], None]) -> None:
    """Layer by layer on the device, always in the same order: a seed gives the same weights again."""
    device, group = model.place.device, model.place.group
    alike = torch.Generator(device).manual_seed(seed)  # what every rank has
    own = alike if group.size == 1 else torch.Generator(device).manual_seed(seed + 1 + group.rank)
    holders: dict[int, WeightHolder] = {}
    sizes: dict[int, int] = {}
    for holder, part in model.weight_map().values():
        num_elements = sum(prod(stored.shape) for stored in holder.expected(part).values())
        holders[id(holder)] = holder
        sizes[id(holder)] = sizes.get(id(holder), 0) + num_elements * model.place.dtype.itemsize
    done, total = 0, sum(sizes.values())
    progress(0, total)
    for key, holder in holders.items():
        holder.randomize(own if _is_divided(holder) else alike)
        done += sizes[key]
        progress(done, total)


def _is_divided(holder: WeightHolder) -> bool:
    """Whether ranks have parts of it."""
    shape = getattr(holder, "shape", None)
    return isinstance(holder, (Experts, Sinks)) or (isinstance(shape, LinearShape) and shape.rule != "replicated")
