"""Where a checkpoint has the matrices of a mixture's experts: a tensor each, or all of a layer in one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..describe.model_config import ModelConfig
from ..families.layer_spec import MoESpec
from ..files.tensor_info import TensorInfo
from .adapter import Adapter, Pair
from .peft_config import AdapterError

_EXPERTS = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts")
_EXPERT = re.compile(rf"({_EXPERTS.pattern})\.(\d+)\.(\w+)\.weight")
_PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


@dataclass(frozen=True)
class Place:
    """Of a matrix [out, in] in a tensor of the checkpoint."""

    tensor: str
    expert: int | None = None  # of all experts in the tensor; None: the tensor is the matrix
    rows: slice = field(default_factory=lambda: slice(None))
    flipped: bool = False  # the tensor has [in, out]

    def of(self, tensor: Tensor) -> Tensor:
        """The matrix, a view."""
        matrix = tensor if self.expert is None else tensor[self.expert]
        return (matrix.t() if self.flipped else matrix)[self.rows]


@dataclass(frozen=True)
class Term:
    """What a pair adds to one matrix."""

    pair: Pair
    place: Place
    expert: int = 0  # whose share of the pair
    rows: slice = field(default_factory=lambda: slice(None))  # of that share
    flipped: bool = False  # the pair makes [in, out]

    def delta(self, a: Tensor, b: Tensor) -> Tensor:
        """fp32 [out, in], of the pair's A and B as they are in the file."""
        rank, experts = self.pair.rank, self.pair.experts
        low = a[self.expert * rank : (self.expert + 1) * rank].float()
        product = self.pair.scale * (b[:, self.expert :: experts].float() @ low)
        return (product.t() if self.flipped else product)[self.rows]


class ExpertsPlaces:
    def __init__(self, config: ModelConfig, headers: Mapping[str, TensorInfo]) -> None:
        """`headers`: of the base's tensors."""
        self._config, self._headers = config, headers

    def find(self, name: str) -> Place | None:
        """Of one expert's weight, by the name that it has as a tensor of its own, where it is in one with others."""
        if (found := _EXPERT.fullmatch(name)) is None or (spec := self._spec(int(found[2]))) is None:
            return None
        if spec.interleaved:
            return None  # rows of gate and up in turn: nobody has pairs for each there
        number, expert = int(found[2]), int(found[3])
        for part in ("gate", "up", "down"):
            if self._config.named(f".{part}_proj") == f".{found[4]}" and expert < spec.routing.num_experts:
                return self._in_one(number, expert, part, spec)
        return None

    def terms(self, adapter: Adapter, pair: Pair) -> list[Term]:
        """Of a pair of all experts. Raises AdapterError where it does not fit."""
        layer = layer_of_experts(pair.module)
        spec = None if layer is None else self._spec(layer)
        if layer is None or spec is None:
            raise AdapterError(
                f"{adapter.folder} changes {pair.path}, and the base model has no such experts, or transformers "
                "computes it: merge it with PEFT"
            )
        flipped = makes_transposed(adapter, pair, spec, self._config.hidden_size)
        terms = []
        for expert in range(pair.experts):
            for part in _PARTS[pair.parameter]:
                place = self._place(layer, expert, part, spec)
                if place is None:
                    raise AdapterError(
                        f"{adapter.folder} changes {pair.path}, which the base model does not have as numbers: it is "
                        "quantized, merge into the model that it was made of, with --quantization if need be"
                    )
                terms.append(Term(pair, place, expert, _rows(part, spec), flipped))
        return terms

    def _spec(self, layer: int) -> MoESpec | None:
        layers = self._config.layers
        spec = layers[layer].mlp if layer < len(layers) else None
        return spec if isinstance(spec, MoESpec) else None

    def _place(self, layer: int, expert: int, part: str, spec: MoESpec) -> Place | None:
        name = f"{self._config.named(f'model.layers.{layer}.mlp.experts.{expert}.{part}_proj')}.weight"
        return Place(name) if name in self._headers else self._in_one(layer, expert, part, spec)

    def _in_one(self, layer: int, expert: int, part: str, spec: MoESpec) -> Place | None:
        prefix = self._config.named(f"model.layers.{layer}.mlp.experts")
        name = f"{prefix}.{spec.stacked_names[part == 'down']}"
        if name not in self._headers:
            return None
        hidden, inner = self._config.hidden_size, spec.inner
        shape = (hidden, inner) if part == "down" else (2 * inner, hidden)
        stored = self._headers[name].shape[1:]
        flipped = stored != shape or (stored == shape[::-1] and spec.stored == "transposed")
        return Place(name, expert, _rows(part, spec), flipped)


def layer_of_experts(module: str) -> int | None:
    """The layer whose experts a module of transformers' holds."""
    found = _EXPERTS.fullmatch(module)
    return None if found is None else int(found[1])


def makes_transposed(adapter: Adapter, pair: Pair, spec: MoESpec, hidden: int) -> bool:
    """Whether a pair of all experts makes [in, out]. Raises AdapterError where it does not fit."""
    headers, size = adapter.files.headers, (2 * spec.inner, hidden)
    shape = size if pair.parameter == "gate_up_proj" else (size[1], spec.inner)
    made = headers[pair.b].shape[0], headers[pair.a].shape[1]
    if pair.experts != spec.routing.num_experts or made not in (shape, shape[::-1]):
        raise AdapterError(
            f"{adapter.folder} has {pair.experts} experts of {list(made)} for {pair.path}, and the base "
            f"{spec.routing.num_experts} of {list(shape)}: it is of another base"
        )
    # Where the sides are alike, the version tells; a parameter that is transposed itself PEFT always read rightly.
    return made != shape or (made == shape[::-1] and adapter.config.swapped and spec.stored != "transposed")


def _rows(part: str, spec: MoESpec) -> slice:
    """Of gate or up in both, of all in down. Where they are in turn, the halves of a pair of all experts still belong
    to those of the tensor."""
    if part == "down":
        return slice(None)
    return slice(spec.inner, None) if part == "up" else slice(spec.inner)
