"""What takes the place of modules in a model of transformers, and how its own plan divides them over ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..describe.model_config import Cut, Layout
from ..families.layer_spec import AttentionSpec
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..quant.format import DUMMY_STD, FLOATS, Format, Stored
from ..quant.unquantized import Unquantized
from ..quant.weights import Placement, frozen

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Product(nn.Module):
    """In the place of one nn.Linear."""

    def __init__(self, linear: Linear, whole: bool = False) -> None:
        """`whole`: as Cut has it, where it is divided over ranks."""
        super().__init__()
        self.linear, self.whole = linear, whole

    @property
    def weight(self) -> Tensor:
        """For code that looks at its dtype or device."""
        return _weight(self.linear)

    def forward(self, input: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        y = self.linear(_mine(self.linear, input.reshape(-1, input.shape[-1]), self.whole))
        y = _joined(self.linear, y, self.whole)
        return y.view(*input.shape[:-1], y.shape[-1])


def _mine(linear: Linear, x: Tensor, whole: bool) -> Tensor:
    """Of an input that every rank has, the columns for this one."""
    return x.narrow(-1, *linear.shape.input_span) if whole and linear.shape.rule == "row" else x


def _joined(linear: Linear, y: Tensor, whole: bool) -> Tensor:
    """Of this rank's result, what the others have of it."""
    group = linear.shape.place.group
    if linear.shape.rule == "row":
        return group.all_reduce(y)
    return group.all_gather(y) if whole else y


class SharedInput:
    """One product for several nn.Linear that multiply the same input: the one that is called first with it computes."""

    def __init__(self, linear: Linear, whole: bool = False) -> None:
        """`whole`: as Cut has it."""
        self.linear, self.whole = linear, whole
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._waiting = 0  # parts that have not taken theirs

    def part(self, name: str, x: Tensor) -> Tensor:
        if self._input is not x or self._output is None:
            rows = _mine(self.linear, x.reshape(-1, x.shape[-1]), self.whole)
            self._input, self._output = x, self.linear(rows)
            self._waiting = len(self.linear.shape.parts)
        output = self._output.view(*x.shape[:-1], -1)
        self._waiting -= 1
        if not self._waiting:
            self._input = self._output = None  # its memory is needed
        mine = output.narrow(-1, self.linear.shape.offsets[name], self.linear.shape.spans[name][1])
        return _joined(self.linear, mine, self.whole)


class Part(nn.Module):
    """In the place of one nn.Linear of several that share their input."""

    def __init__(self, shared: SharedInput, name: str) -> None:
        super().__init__()
        self.linear = shared.linear
        self.shared, self.name = shared, name

    @property
    def weight(self) -> Tensor:
        start, size = self.linear.shape.offsets[self.name], self.linear.shape.spans[self.name][1]
        return _weight(self.linear).narrow(0, start, size)

    def forward(self, input: Tensor) -> Tensor:
        """[…, in] → […, out], a view of all parts' result."""
        return self.shared.part(self.name, input)


def _weight(linear: Linear) -> Tensor:
    if not isinstance(linear.method, Unquantized):
        raise AttributeError("weight")  # codes must not be multiplied as if they were numbers
    return linear.method.weight


class Norm(nn.Module):
    """In the place of an RMS norm."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    @property
    def weight(self) -> Tensor:
        return self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        """[…, size] → the same shape."""
        return self.norm(None, x.reshape(-1, self.norm.shape[0]))[0].view(x.shape)


class Plain:
    """Holds the parameters and persistent buffers that a module of transformers has itself, as they are in the file."""

    def __init__(
        self, module: nn.Module, dtypes: Mapping[str, torch.dtype], place: Placement, cuts: Mapping[str, Cut] = {}
    ) -> None:
        """dtypes: of each of its tensors; cuts: of those that are divided over ranks."""
        self._module, self._dtypes, self._place, self._cuts = module, dict(dtypes), place, dict(cuts)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors().items()}  # of whole ones

    def choose(self, formats: Mapping[str, Format]) -> None:
        assert not formats, "what is no product is not quantised"

    def _tensors(self) -> dict[str, Tensor]:
        found = {**self._module._parameters, **self._module._buffers}
        return {name: tensor for name, tensor in found.items() if name in self._dtypes and tensor is not None}

    def expected(self, part: str) -> dict[str, Stored]:
        buffers = self._module._buffers
        return {name: Stored(shape, FLOATS, optional=name in buffers) for name, shape in self._shapes.items()}

    def create(self) -> None:
        for name, tensor in self._tensors().items():
            if name in self._module._parameters:
                cut, device = self._cuts.get(name), self._place.device
                mine = tensor if cut is None else share(tensor, cut, self._place)
                self._module._parameters[name] = frozen(
                    torch.empty(mine.shape, dtype=self._dtypes[name], device=device)
                )
            elif tensor.is_floating_point():  # a correction of the routing, say, in more digits than the model
                self._module._buffers[name] = tensor.to(self._dtypes[name])

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        for name, target in self._tensors().items():
            if name in tensors:
                cut = self._cuts.get(name)
                target.copy_(tensors[name] if cut is None else share(tensors[name], cut, self._place))

    def finish(self) -> None:
        pass

    def randomize(self, generator: torch.Generator) -> None:
        for name, tensor in self._tensors().items():
            if name in self._module._buffers:
                continue
            if tensor.dim() > 1:
                tensor.normal_(0.0, DUMMY_STD, generator=generator)
            else:
                tensor.fill_(1.0 if name == "weight" else 0.0)


def own_tensors(module: nn.Module) -> list[str]:
    """Names of the parameters and persistent buffers that a module has itself."""
    buffers = (name for name in module._buffers if name not in module._non_persistent_buffers_set)
    found = [*(name for name, value in module._parameters.items() if value is not None), *buffers]
    return [name for name in found if getattr(module, name) is not None]


def put(model: nn.Module, path: str, module: Any) -> None:
    """Where `path` is."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


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
            if style in _ALIKE or isinstance(place, nn.Embedding):  # every rank has whole tables
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
