"""Where an adapter's matrices lie in a slot: one flat piece of memory for all layers, so that one copy loads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ConfigError
from ..layers.embedding import Embedding, LMHead
from ..layers.linear import Linear
from ..layers.weights import LinearShape
from ..model_file import and_more
from ..models.model import Model
from .adapter import Adapter, Pair
from .peft_config import AdapterError

RANK_UNIT = 16  # the least that tensor cores multiply by
HOLDERS = "products of attention and MLP, the embedding and the head"


def padded_rank(max_rank: int) -> int:
    return -(-max_rank // RANK_UNIT) * RANK_UNIT


@dataclass(frozen=True)
class Place:
    """Of one module of the model, whose parts share their input: where A and B begin in a slot, and their shapes.

    A [parts · R, in], one part behind the other; B [out of all parts, R]. Of an embedding, A [vocabulary, R].
    """

    holder: Linear | Embedding
    index: int  # among all places
    a: int
    a_shape: tuple[int, int]
    b: int
    b_shape: tuple[int, int]


class SlotLayout:
    """Of this rank's share of the model. `rank`: of every matrix in a slot, zeros behind an adapter's own."""

    def __init__(self, model: Model, max_rank: int, targets: Sequence[str] = (), whole: Model | None = None) -> None:
        """`targets`: last names of the modules that may have adapters; empty: all that can. `whole`: what `model` is a
        stage of; every stage judges an adapter by all of it. Raises ConfigError for a target that it does not have."""
        self.max_rank, self.rank, self.targets = max_rank, padded_rank(max_rank), frozenset(targets)
        self.places: list[Place] = []
        self.parts: dict[str, tuple[Place, str]] = {}  # module path of the checkpoint → its place, as which part
        self.holders: dict[str, tuple[Linear | Embedding, str]] = {}  # of the whole model: who may have one
        self.others: set[str] = set()  # modules that can have none here
        self.size = 0  # elements of a slot
        names: set[str] = set()
        for path, (holder, part) in (whole or model).weight_map().items():
            if not isinstance(holder, Linear | Embedding):
                self.others.add(path)
                continue
            names.add(name := path.rpartition(".")[2])
            if not self.targets or name in self.targets:
                self.holders[path] = holder, part
        if unknown := sorted(self.targets - names):
            raise ConfigError(f"--lora-target-modules has {unknown[0]!r}: this model has {', '.join(sorted(names))}")
        found: dict[int, Place] = {}
        for path, (holder, part) in model.weight_map().items():
            if path not in self.holders or not isinstance(holder, Linear | Embedding):
                continue
            if isinstance(holder, Embedding) and whole is not None and not model.place.stage.is_first:
                continue  # the last stage may have it for its head alone
            place = found.get(id(holder)) or self._place(holder)
            found[id(holder)] = place
            self.parts[path] = place, part

    def _place(self, holder: Linear | Embedding) -> Place:
        if isinstance(holder, Embedding):
            vocab, hidden = holder.size
            a_shape, b_shape = (vocab, self.rank), (hidden, self.rank)
        else:
            shape = holder.shape
            a_shape, b_shape = (len(shape.parts) * self.rank, shape.input_span[1]), (shape.rows, self.rank)
        start, middle = self.size, self.size + a_shape[0] * a_shape[1]
        self.size = middle + b_shape[0] * b_shape[1]
        self.places.append(Place(holder, len(self.places), start, a_shape, middle, b_shape))
        return self.places[-1]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Of a slot."""
        return self.size * dtype.itemsize

    def find(self, module: str) -> str | None:
        """The model's path of a module that an adapter names; adapters are trained with or without a head around."""
        for path in (module, f"model.{module}", module.removeprefix("model.")):
            if path in self.holders or path in self.others:
                return path
        return None

    def check(self, adapter: Adapter) -> dict[str, Pair]:
        """Its pairs by the model's paths. Raises AdapterError for what this model, or a slot, has no place for."""
        folder, paths = adapter.folder, {}
        if adapter.rank > self.max_rank:
            raise AdapterError(
                f"{folder} has the rank {adapter.rank}, and at most {self.max_rank} fit: raise --max-lora-rank"
            )
        if adapter.config.dora:
            raise AdapterError(f"{folder} is DoRA, which cannot be served beside others: serve it with --merge-lora")
        if adapter.whole:
            names = sorted(adapter.whole)
            raise AdapterError(
                f"{folder} has {names[0]}{and_more(names)} whole (modules_to_save), which cannot be served beside "
                "others: serve it with --merge-lora"
            )
        for module, pair in adapter.pairs.items():
            path = self.find(module)
            if pair.parameter or path in self.others:
                raise AdapterError(
                    f"{folder} changes {module}, and only {HOLDERS} can have adapters beside others: serve it with "
                    "--merge-lora"
                )
            if path is None and self.targets and module.rpartition(".")[2] not in self.targets:
                raise AdapterError(
                    f"{folder} changes {module}, and --lora-target-modules has {', '.join(sorted(self.targets))} only: "
                    "add it there"
                )
            if path is None:
                raise AdapterError(f"{folder} changes {module}, which the model does not have: it is of another base")
            self._check_shapes(adapter, pair, *self.holders[path])
            paths[path] = pair
        prefix = next((p for p in ("", "model.") if any(f"{p}{module}" in paths for module in adapter.pairs)), "")
        names = [path.removeprefix(prefix) for path, (holder, _) in self.holders.items() if type(holder) is Linear]
        if lacking := adapter.lacking(names):
            raise AdapterError(
                f"{folder} lacks the matrices of {lacking[0]}{and_more(lacking)}, which its target_modules name: the "
                "file is incomplete, or of another base"
            )
        return paths

    def _check_shapes(self, adapter: Adapter, pair: Pair, holder: Linear | Embedding, part: str) -> None:
        headers = adapter.files.headers
        columns, rows = headers[pair.a].shape[1], headers[pair.b].shape[0]
        if pair.is_embedding != isinstance(holder, Embedding):
            raise AdapterError(
                f"{adapter.folder}: {pair.module} is an embedding on one side only: it is of another base"
            )
        if isinstance(holder, Embedding):
            expected = holder.size
        else:
            expected = holder.shape.in_features, holder.shape.parts[part]
        adapter.check_copy(pair.module, expected if pair.is_embedding else expected[::-1])
        if (columns, rows) != expected:
            raise AdapterError(
                f"{adapter.folder}: {pair.module} maps {columns} to {rows}, and the model's {expected[0]} to "
                f"{expected[1]}: it is of another base"
            )

    def pack(self, adapter: Adapter, dtype: torch.dtype, pin: bool) -> Packed:
        """A slot's content, scales multiplied into B; of a stage, its own part. Raises AdapterError."""
        flat = torch.zeros(self.size, dtype=dtype, pin_memory=pin)
        used = torch.zeros(len(self.places), dtype=torch.int32, pin_memory=pin)
        for path, pair in self.check(adapter).items():
            if path not in self.parts:  # another stage's
                continue
            place, part = self.parts[path]
            used[place.index] = 1
            a, b = self.view_a(flat, place), self.view_b(flat, place)
            holder, low = place.holder, adapter.read(pair.a)
            high = adapter.read(pair.b).float() * pair.scale
            if isinstance(holder, Embedding):
                a[:, : pair.rank] = low.T
                b[:, : pair.rank] = high * holder.scale
                continue
            shape = holder.shape
            first = list(shape.parts).index(part) * self.rank
            a[first : first + pair.rank] = low.narrow(1, *shape.input_span)
            rows = shape.ordered(part, high).narrow(0, *shape.spans[part])
            b[shape.offsets[part] : shape.offsets[part] + len(rows), : pair.rank] = rows
        has_head = any(isinstance(place.holder, LMHead) and used[place.index] for place in self.places)
        return Packed(flat, used, adapter.rank, has_head)

    def view_a(self, memory: Tensor, place: Place) -> Tensor:
        """[…, slot] → […, *a_shape]."""
        return _view(memory, place.a, place.a_shape)

    def view_b(self, memory: Tensor, place: Place) -> Tensor:
        return _view(memory, place.b, place.b_shape)


@dataclass(frozen=True)
class Packed:
    """An adapter as a slot holds it, on the host."""

    flat: Tensor  # [size of a slot]
    used: Tensor  # int32 [places]: 1 where it changes the product
    rank: int
    has_head: bool  # it changes logits too


def part_sizes(shape: LinearShape) -> list[int]:
    """Rows of each part here, in their order."""
    return [shape.spans[name][1] for name in shape.parts]


def _view(memory: Tensor, start: int, shape: tuple[int, int]) -> Tensor:
    return memory.narrow(-1, start, shape[0] * shape[1]).unflatten(-1, shape)
