"""What one rank has of a model, in numbers of a token or of a step: from config.json alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from ..cache.kv_format import KVFormat
from ..describe.divide import kv_shares, whole_experts
from ..describe.model_config import ModelConfig
from ..families.layer_spec import AttentionSpec, LayerSpec, MoESpec
from ..layers.embedding import LMHead
from ..layers.experts import STACKED, Experts
from ..layers.linear import Linear
from ..parallel.pipeline import WHOLE, Stage
from ..quant.format import FLOATS, Format, Stored
from ..quant.online import OnlineScheme
from ..quant.weights import Placement, WeightHolder, vocab_share
from ..weights.loader import count_parameters, make_model
from .weight_size import orders_experts

_BYTES = {"64": 8, "32": 4, "16": 2}  # by the last digits of a type's name in safetensors; others have one


@dataclass(frozen=True)
class Kept:
    """How matrices are kept: `item` bytes a weight, its share of the scales with it. As codes they become numbers on
    the way to a product, `fp8` ones are multiplied as they are where there are many rows."""

    item: float
    codes: bool = False
    fp8: bool = False

    @property
    def is_converted(self) -> bool:
        """At a cost: FP8 has an instruction for it."""
        return self.codes and not self.fp8


@dataclass(frozen=True)
class Weights:
    """How a model's are kept, of which only matrices of layers are quantised."""

    item: int  # bytes of a number, and of an activation
    layers: Kept  # what every token meets
    experts: Kept


@dataclass(frozen=True)
class Shape:
    """Of one rank, of those that divide a stage's layers."""

    weights: Weights
    dense: float  # weights that every step reads, without experts, embedding and output matrix
    expert: float  # weights of one expert, all layers together
    num_experts: int  # that the rank has, or has a slice of
    chosen: float  # how many of them a token goes to, in the mean
    head: float  # weights of the output matrix
    beside: float  # weights that a step does not read: of the embedding
    moved: float  # numbers that layers make of a token on their way; each is written and read
    kv_bytes: float  # a token, all layers
    pair_flops: float  # of attention, a query and a key, all layers
    windows: tuple[int, ...]  # of each layer with attention; 0: none
    num_layers: int
    state_bytes: float = 0.0  # of a request's recurrent states
    hidden: int = 0  # numbers of a row that ranks sum, and stages send
    head_rows: int = 0  # of the output matrix
    ranks: int = 1
    num_sums: int = 0  # over ranks, of a row in a step

    @property
    def num_weights(self) -> int:
        return int(self.dense + self.num_experts * self.expert + self.head + self.beside)

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        experts = self.num_experts * self.expert * self.weights.experts.item
        return int(self.dense * self.weights.layers.item + experts + (self.head + self.beside) * self.weights.item)


def shape_of(
    model: ModelConfig, weights: Weights, format: KVFormat, *, size: int = 1, stage: Stage = WHOLE,
    expert_parallel: bool = False,
) -> Shape:  # fmt: skip
    """Of the first of `size` ranks, which has most. stage: whose layers it divides."""
    indices = stage.indices(len(model.layers))
    layers = [model.layers[index] for index in indices]
    hidden = model.hidden_size
    table, tied = model.vocab_size * hidden, model.tie_word_embeddings
    rows = vocab_share(model.vocab_size, size) if stage.is_last else 0
    head = min(rows * hidden, table)
    beside = table if stage.is_first or (stage.is_last and tied) else 0
    beside -= head if tied else 0  # which is some of it
    vectors = model.frame.token_vectors * sum(layer.token_vector for layer in layers)  # a table, too
    if stage.is_first and vectors:
        beside += layers[0].token_vector  # the norm of what is added to them
    expert, num_experts, chosen = 0.0, 0, 0.0
    for layer in layers:
        if isinstance(spec := layer.mlp, MoESpec):
            routing = spec.routing
            whole = whole_experts(routing.num_experts, spec.inner, size, weights.experts.codes, expert_parallel)
            num_experts = routing.num_experts // size if whole else routing.num_experts
            chosen = routing.top_k / (size if whole else 1)
            expert += 3 * spec.inner * hidden / (1 if whole else size)
    kept = sum(spec.token_elements for spec in kv_shares(model, size, indices))
    return Shape(
        weights=weights,
        dense=max(
            0.0, _parameters(model, layers, size, expert_parallel, head + beside) - expert * num_experts - vectors
        ),
        expert=expert,
        num_experts=num_experts,
        chosen=chosen,
        head=head,
        beside=beside + vectors,
        moved=sum(_moved(layer, hidden, size) for layer in layers),
        kv_bytes=kept * format.item_bytes(weights.item),
        pair_flops=sum(_pair_flops(layer) for layer in layers) / size,
        windows=tuple(layer.attention.window for layer in layers if layer.attention is not None),
        num_layers=len(layers),
        state_bytes=4.0 * sum(layer.state.elements for layer in layers if layer.state is not None) / size,
        hidden=hidden,
        head_rows=rows,
        ranks=size,
        num_sums=sum(1 if layer.norms == "parallel" else 2 for layer in layers) if size > 1 else 0,
    )


def _parameters(model: ModelConfig, layers: list[LayerSpec], size: int, expert_parallel: bool, around: float) -> float:
    """Of a rank's layers. Layers alike have as many: one of each kind is looked at, in two models that differ by it.
    around: of the matrices that a model has beside them."""
    if model.foreign is not None:
        return count_parameters(model, size, expert_parallel) - around
    found = 0
    for kind, count in Counter(layers).items():
        one, two = (replace(model, layers=(kind,) * number) for number in (1, 2))
        found += count * (count_parameters(two, size, expert_parallel) - count_parameters(one, size, expert_parallel))
    return found


def _pair_flops(layer: LayerSpec) -> float:
    if (spec := layer.attention) is None:
        return 0.0
    if isinstance(spec, AttentionSpec):
        return 2 * spec.num_heads * (spec.head_dim + (spec.value_dim or spec.head_dim))
    return 2 * spec.num_heads * (spec.kv.head_dim + spec.kv.value_dim)


def _moved(layer: LayerSpec, hidden: int, size: int) -> float:
    """Rows of the residual stream pass two norms, whatever the ranks; of a mixture each chosen expert's result does."""
    results = layer.mlp.routing.top_k * hidden if isinstance(layer.mlp, MoESpec) else 0
    return 6 * hidden + 2 * results + (layer.mixer.width + layer.mlp.width) / size


def kept_weights(model: ModelConfig, dtype: torch.dtype, codes: bool = True) -> Weights:
    """`codes`: whether the card multiplies by quantised weights; else they become numbers as they are loaded."""
    numbers = Kept(dtype.itemsize)
    scheme = model.quantization
    if scheme is None or not codes or dtype.itemsize > 2:
        return Weights(dtype.itemsize, numbers, numbers)
    counted = {False: [0, 0.0, 0], True: [0, 0.0, 0]}  # of layers, of experts: weights, bytes, weights in FP8
    mixed = orders_experts(model, True)
    text = make_model(replace(model, vision=None), Placement(dtype, torch.device("meta")), 1)
    for path, (holder, part) in text.weight_map().items():
        for rows, columns in _matrices(holder, part):
            of_experts, format = isinstance(holder, Experts), scheme.format(path, None)
            size = rows * columns
            entry = counted[of_experts]
            entry[0] += size
            entry[1] += size * dtype.itemsize if format is None else _stored_bytes(scheme, format, rows, columns)
            entry[2] += size if format is not None and format.name.startswith("FP8") else 0

    def kept(of_experts: bool) -> Kept:
        size, stored, fp8 = counted[of_experts]
        if not size or stored >= size * dtype.itemsize or (of_experts and mixed):
            return numbers
        return Kept(stored / size, True, fp8 > size / 2)

    return Weights(dtype.itemsize, kept(False), kept(True))


def _matrices(holder: WeightHolder, part: str) -> Iterator[tuple[int, int]]:
    """(rows, columns) of those that may be quantised."""
    if isinstance(holder, Experts):
        names = ("gate", "up", "down") * holder.num_experts if part == STACKED else (part.partition(".")[2],)
        yield from map(holder.shape_of, names)
    elif isinstance(holder, Linear) and not isinstance(holder, LMHead):
        yield holder.shape.parts[part], holder.shape.in_features


def _stored_bytes(scheme: object, format: Format, rows: int, columns: int) -> float:
    if isinstance(scheme, OnlineScheme):
        return rows * columns * scheme.bytes_each
    return sum(prod(tensor.shape) * _item(tensor) for tensor in format.expected(rows, columns).values())


def _item(tensor: Stored) -> int:
    kinds = tensor.dtypes
    return 2 if set(kinds) <= set(FLOATS) else _BYTES.get(kinds[0][-2:], 1)
