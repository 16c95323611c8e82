"""What takes the place of modules in a model of transformers: the same call, with vserve's weights and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..describe.foreign_layout import Cut
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..quant.format import DUMMY_STD, FLOATS, Format, Stored
from ..quant.unquantized import Unquantized
from ..quant.weights import Placement, frozen
from .shards import share


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
    """One product for several nn.Linear that multiply the same input: whoever is called first with it computes."""

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
        raise AttributeError("weight")  # nobody may multiply by codes as if they were numbers
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
