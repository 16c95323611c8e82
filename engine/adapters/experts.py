"""An adapter's matrices of experts: where a checkpoint has them, and where a slot does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..describe.model_config import ModelConfig
from ..families.layer_spec import MoESpec
from ..layers.experts import PARTS, STACKED, Experts
from ..models.model import Model
from ..quant.format import TensorInfo
from ..quant.weights import WeightHolder
from .adapter import Adapter, Pair
from .peft_files import AdapterError

_EXPERTS = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:mlp\.|block_sparse_moe\.|feed_forward\.|)experts")
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
            return None  # rows of gate and up in turn: no adapter has pairs for each there
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
        if part != STACKED or not holder.spec.gated:
            yield path, holder, part
        else:
            for expert in range(holder.num_experts):
                for name in PARTS:
                    yield f"{path}.{expert}{model.config.named(f'.{name}_proj')}", holder, f"{expert}.{name}"
        if holder.spec.gated and id(holder) not in seen and (layer := _LAYER.search(path)):
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


def put(holder: Experts, part: str, adapter: Adapter, pair: Pair, a: Tensor, b: Tensor) -> None:
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
