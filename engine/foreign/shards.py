"""A model of transformers divided over ranks by its own plan (`base_model_tp_plan` of its config)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..describe.foreign_layout import Cut, Layout
from ..families.layer_spec import AttentionSpec
from ..quant.weights import Placement

if TYPE_CHECKING:  # every engine imports this file, and importing transformers takes two seconds
    from transformers import PreTrainedModel

# Words of a plan → how a matrix is divided; experts' stand in one tensor, [experts, rows, columns] or the other way.
_CUTS = {
    "colwise": Cut("column", 0),
    "colwise_gather_output": Cut("column", 0, whole=True),
    "colwise_rep": Cut("column", 0, whole=True),
    "rowwise": Cut("row", 0),
    "rowwise_split_input": Cut("row", 0, whole=True),
    "rowwise_rep": Cut("row", 0, whole=True),
    "packed_colwise": Cut("column", 0, packed=True),
    "packed_rowwise": Cut("row", 0, packed=True),
}
_SUMMED = "moe_tp_experts"
_ALIKE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")  # on every rank


def with_plan(
    layout: Layout, model: PreTrainedModel, prefix: str, specs: Mapping[str, AttentionSpec],
    in_fp32: Callable[[str], bool],
) -> Layout:  # fmt: skip
    """The layout with how its plan divides `model`, or why it does not. prefix: path of what the plan is of."""
    plan = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        return replace(layout, undivided="transformers has no plan to divide it")
    places: dict[str, nn.Module | Tensor] = {**dict(model.named_modules()), **dict(model.named_parameters())}
    cuts: dict[str, Cut] = {}
    summed: list[str] = []
    for pattern, style in plan.items():
        matches = re.compile(re.escape(f"{prefix}.{pattern}").replace(r"\*", r"\d+")).fullmatch
        for path in filter(matches, places):
            place = places[path]
            if style in _ALIKE:
                continue
            if style == _SUMMED:
                summed.append(path)
            elif style not in _CUTS:
                return replace(layout, undivided=f"transformers' plan has {style} for {path}")
            elif isinstance(place, nn.Linear) and path in layout.products and not in_fp32(path):
                cuts[path] = _cut_product(place, _CUTS[style], specs.get(path.rpartition(".")[0]))
            elif isinstance(place, Tensor) and place.dim() == 3:
                cut = _CUTS[style]
                cuts[path] = replace(cut, length=place.shape[-2 if cut.rule == "column" else -1])
            else:
                return replace(layout, undivided=f"transformers' plan divides {path}, which is no product")
    summed = [path for path in summed if any(name.rpartition(".")[0] == path for name in cuts)]
    for path in summed:  # each rank would add the others' share as well
        if alone := [name for name, _ in model.get_submodule(path).named_parameters() if f"{path}.{name}" not in cuts]:
            return replace(layout, undivided=f"transformers' plan says nothing of {path}.{alone[0]}")
    if not cuts:
        return replace(layout, undivided="transformers' plan divides none of it")
    return replace(layout, cuts=cuts, summed=tuple(summed), undivided="")


def _cut_product(linear: nn.Linear, cut: Cut, spec: AttentionSpec | None) -> Cut:
    """spec: of the attention whose module has it."""
    if cut.rule == "row":
        return replace(cut, length=linear.in_features)
    unit = 1
    if spec is not None and not cut.whole and spec.head_dim == (spec.value_dim or spec.head_dim):
        heads = linear.out_features / spec.head_dim
        unit = spec.head_dim if heads in (spec.num_heads, spec.num_kv_heads) else 1
    return replace(cut, length=linear.out_features, unit=unit)


def share(tensor: Tensor, cut: Cut, place: Placement) -> Tensor:
    """A view or copy of this rank's part of experts' matrices."""
    dim = -2 if cut.rule == "column" else -1
    if not cut.packed:
        return tensor.narrow(dim, *place.span(cut.length))
    half = cut.length // 2
    start, size = place.span(half)
    return torch.cat([tensor.narrow(dim, first + start, size) for first in (0, half)], dim)
