"""What attention has on each rank of a model of transformers that its own plan divides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..describe.foreign_layout import Cut, Layout
from ..errors import ModelError
from ..families.layer_spec import AttentionSpec
from ..quant.weights import Placement
from .modules import put
from .probe import Probe

if TYPE_CHECKING:  # every engine imports this file, and importing transformers takes two seconds
    from transformers import PreTrainedModel


class _Shapes(nn.Module):
    """In the place of a product that is divided, on meta: what would come of it."""

    def __init__(self, linear: nn.Linear, cut: Cut, place: Placement) -> None:
        super().__init__()
        mine = place.span(cut.length, cut.unit)[1]
        row = cut.rule == "row"
        self.inputs = mine if row and not cut.whole else linear.in_features
        self.outputs = linear.out_features if row or cut.whole else mine
        self.weight = linear.weight  # for code that looks at its dtype or device

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.inputs:
            raise ValueError(f"a product of {self.inputs} columns gets {x.shape[-1]}")
        return x.new_empty(*x.shape[:-1], self.outputs)


def specs_of_rank(
    model: PreTrainedModel, layout: Layout, whole: Sequence[AttentionSpec], place: Placement
) -> list[AttentionSpec]:
    """What each call of attention has on this rank: seen in a forward of `model`, which is on meta, and is taken apart
    here. `whole`: on one. Raises ModelError where its code does not go along."""
    for path, cut in layout.cuts.items():
        if isinstance(linear := dict(model.named_modules()).get(path), nn.Linear):
            put(model, path, _Shapes(linear, cut, place))
    size = place.tp_size
    try:
        found = list(Probe(model).specs.values())
    except ModelError as error:
        raise _refused(model, size, str(error)) from error
    for path, spec, before in zip(layout.attention, found, whole, strict=True):
        parts = size if layout.is_divided(path) else 1
        heads, keys = before.num_heads // parts, max(1, before.num_kv_heads // parts)
        if (spec.num_heads, spec.num_kv_heads) != (heads, keys) or (spec.sinks and parts > 1):
            raise _refused(model, size, f"{path} has {spec.num_heads} heads over {spec.num_kv_heads} on a rank")
    return found


def _refused(model: PreTrainedModel, size: int, why: str) -> ModelError:
    return ModelError(
        f"--tensor-parallel-size {size}: the code of {type(model).__name__}, which transformers has, does not go along "
        f"with its own plan ({why}): leave it out, or take --data-parallel-size {size} for as many that each hold all "
        "of the model"
    )
