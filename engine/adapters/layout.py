"""An adapter's memory: one flat piece for all layers, as a slot of the device and the host's store hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..describe.download import from_hub
from ..errors import ConfigError, and_more
from ..layers.embedding import Embedding, LMHead
from ..layers.experts import Experts
from ..layers.linear import Linear, TowerLinear
from ..link.turns import short_turns
from ..models.model import Model
from ..options.model_path import is_hub_name
from ..quant.weights import LinearShape, WeightHolder
from .adapter import WEIGHTS_FILE, Adapter, Pair, names_in_base
from .experts import EXPERTS, PRODUCTS, makes_transposed, modules, path_of_all, product_of, put, shapes
from .peft_files import CONFIG_FILE, AdapterError

RANK_UNIT = 16  # the least that tensor cores multiply by
HOLDERS = "products of attention, MLP and experts with gates, the embedding and the head"
Holder = Linear | Embedding | Experts


def _lacks_gates(holder: WeightHolder) -> bool:
    """Whether it has experts that kernels of adapters, which have gates, do not compute."""
    return isinstance(holder, Experts) and not holder.spec.gated


def padded_rank(max_rank: int) -> int:
    return -(-max_rank // RANK_UNIT) * RANK_UNIT


@dataclass(frozen=True)
class Place:
    """Of one module of the model, whose parts share their input: where A and B begin in a slot, and their shapes.

    A [parts · R, in], one part behind the other; B [out of all parts, R]. Of an embedding, A [vocabulary, R]. Experts
    have two places, for gate and up and for down, and in both a dimension more, in front.
    """

    holder: Holder
    index: int  # among all places
    a: int
    a_shape: tuple[int, ...]
    b: int
    b_shape: tuple[int, ...]


class SlotLayout:
    """Of this rank's share of the model. `rank`: of every matrix in a slot, zeros behind an adapter's own."""

    def __init__(self, model: Model, max_rank: int, targets: Sequence[str] = (), whole: Model | None = None) -> None:
        """`targets`: last names of the modules that may have adapters, EXPERTS for those of a mixture; empty: all that
        can but these, for they take much. `whole`: what `model` is a stage of; every stage judges an adapter by all of
        it. Raises ConfigError for a target that it does not have."""
        self.max_rank, self.rank, self.targets = max_rank, padded_rank(max_rank), frozenset(targets)
        self.places: list[Place] = []
        self.parts: dict[str, tuple[Place, str]] = {}  # module path of the checkpoint → its place, as which part
        self.experts: list[tuple[Experts, Place, Place]] = []  # and their two places
        self.holders: dict[str, tuple[Holder, str]] = {}  # modules of the whole model that may have a pair
        self.others: set[str] = set()  # modules that can have none here
        self.without_room: set[str] = set()  # experts, where targets do not name them
        self.size = 0  # elements of a slot
        names: set[str] = set()
        for path, holder, part in modules(whole or model):
            if not isinstance(holder, Holder) or isinstance(holder, TowerLinear) or _lacks_gates(holder):
                self.others.add(path)
                continue
            names.add(name := EXPERTS if isinstance(holder, Experts) else path.rpartition(".")[2])
            if name in self.targets or (not self.targets and name != EXPERTS):
                self.holders[path] = holder, part
            elif name == EXPERTS:
                self.without_room.add(path)
        if unknown := sorted(self.targets - names):
            raise ConfigError(f"--lora-target-modules has {unknown[0]!r}: this model has {', '.join(sorted(names))}")
        found: dict[int, dict[str, Place]] = {}  # of each holder, by product
        for path, holder, part in modules(model):
            if path not in self.holders or not isinstance(holder, Holder):
                continue
            if isinstance(holder, Embedding) and whole is not None and not model.place.stage.is_first:
                continue  # the last stage may have it for its head alone
            places = found.get(id(holder)) or self._places(holder)
            found[id(holder)] = places
            self.parts[path] = places[product_of(part) if isinstance(holder, Experts) else ""], part

    def _places(self, holder: Holder) -> dict[str, Place]:
        """By product: of experts two, of others one, whose name is empty."""
        if isinstance(holder, Experts):
            gate_up, down = (self._place(holder, *shapes(holder, product, self.rank)) for product in PRODUCTS)
            self.experts.append((holder, gate_up, down))
            return {"gate_up": gate_up, "down": down}
        if isinstance(holder, Embedding):
            vocab, hidden = holder.size
            return {"": self._place(holder, (vocab, self.rank), (hidden, self.rank))}
        shape = holder.shape
        a_shape = len(shape.parts) * self.rank, shape.input_span[1]
        return {"": self._place(holder, a_shape, (shape.rows, self.rank))}

    def _place(self, holder: Holder, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> Place:
        start, middle = self.size, self.size + prod(a_shape)
        self.size = middle + prod(b_shape)
        self.places.append(Place(holder, len(self.places), start, a_shape, middle, b_shape))
        return self.places[-1]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Of a slot."""
        return self.size * dtype.itemsize

    def find(self, pair: Pair) -> str | None:
        """The model's path of what a pair changes."""
        for name in names_in_base(path_of_all(pair) if pair.parameter else pair.module):
            if name in self.holders or name in self.others or name in self.without_room:
                return name
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
            path = self.find(pair)
            if path in self.others:
                raise AdapterError(
                    f"{folder} changes {module}, and only {HOLDERS} can have adapters beside others: serve it with "
                    "--merge-lora"
                )
            if path in self.without_room:
                raise AdapterError(
                    f"{folder} changes {module}, and slots have room for that only where --lora-target-modules has "
                    f"{EXPERTS}, beside all else that adapters may change: add it there, or serve it with --merge-lora"
                )
            if path is None and pair.parameter:
                raise AdapterError(
                    f"{folder} changes {module}, and the model has no such experts, or transformers computes it: merge "
                    "it with PEFT"
                )
            untargeted = self.targets and f".{EXPERTS}." not in module and module.rpartition(".")[2] not in self.targets
            if path is None and untargeted:
                raise AdapterError(
                    f"{folder} changes {module}, and --lora-target-modules has {', '.join(sorted(self.targets))} only: "
                    "add it there"
                )
            if path is None:
                raise AdapterError(f"{folder} changes {module}, which the model does not have: it is of another base")
            self._check_shapes(adapter, pair, *self.holders[path])
            paths[path] = pair
        products = (path for path, (holder, _) in self.holders.items() if type(holder) is Linear)
        adapter.check_complete(products, chain(self.holders, self.others, self.without_room))
        return paths

    def _check_shapes(self, adapter: Adapter, pair: Pair, holder: Holder, part: str) -> None:
        if pair.parameter:
            assert isinstance(holder, Experts)
            makes_transposed(adapter, pair, holder.spec, holder.hidden)
            return
        headers = adapter.files.headers
        columns, rows = headers[pair.a].shape[1], headers[pair.b].shape[0]
        if pair.is_embedding != isinstance(holder, Embedding):
            raise AdapterError(
                f"{adapter.folder}: {pair.module} is an embedding on one side only: it is of another base"
            )
        if isinstance(holder, Embedding):
            expected = holder.size
        elif isinstance(holder, Experts):
            expected = holder.shape_of(part.partition(".")[2])[::-1]
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
            a, b, holder = self.view_a(flat, place), self.view_b(flat, place), place.holder
            if isinstance(holder, Experts):
                put(holder, part, adapter, pair, a, b)
                continue
            low = adapter.read(pair.a)
            high = adapter.read(pair.b).float() * pair.scale
            # A product may multiply it by the zeros of others' tokens (kernels/lora/): infinities would reach them.
            least, most = high.aminmax()
            if (largest := float(max(-least, most))) > (limit := torch.finfo(dtype).max):
                remedy = "serve it with --lora-dtype bfloat16" if dtype == torch.float16 else "get another"
                raise AdapterError(
                    f"{adapter.folder}: B of {pair.module} times its scale reaches {largest:.3g}, and {dtype} ends at "
                    f"{limit:.3g}: {remedy}"
                )
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
        has_experts = any(used[place.index] for _, *both in self.experts for place in both)
        return Packed(flat, used, adapter.rank, has_head, has_experts)

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
    has_experts: bool


def part_sizes(shape: LinearShape) -> list[int]:
    """Rows of each part here, in their order."""
    return [shape.spans[name][1] for name in shape.parts]


def _view(memory: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    return memory.narrow(-1, start, prod(shape)).unflatten(-1, shape)


class AdapterStore:
    """Which of them stay here is decided elsewhere: see AdapterBook."""

    def __init__(self, layout: SlotLayout, dtype: torch.dtype, pin: bool, download_dir: str | None = None) -> None:
        self.layout, self.dtype, self.pin = layout, dtype, pin
        self._download_dir = download_dir
        self.packed: dict[int, Packed] = {}  # by id

    def read(self, folder: str, check: Callable[[Adapter], None] | None = None) -> tuple[Packed, Adapter]:
        """From any thread; `folder`: or a name on the hub. `check` sees it before its tensors are read, and may raise
        ModelError, as this does."""
        found = find_adapter(folder, self._download_dir)
        with short_turns():
            adapter = Adapter.open(found)
            if check is not None:
                check(adapter)
            return self.layout.pack(adapter, self.dtype, self.pin), adapter

    def get(self, id: int, folder: str) -> Packed:
        """For a slot; read now where it is not here, as in the process of a rank that was not asked to read it."""
        return self.packed.get(id) or self.read(folder)[0]


def find_adapter(name: str, download_dir: str | None = None) -> Path:
    """A folder as it is; else an adapter of the Hugging Face hub. Raises ModelError."""
    try:
        folder = Path(name).expanduser()
        there = folder.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, nobody's home
        raise AdapterError(f"{name[:60]!r} is no path ({error}): give an adapter's folder") from None
    if there or not is_hub_name(name):
        return folder
    return from_hub(name, None, [CONFIG_FILE, WEIGHTS_FILE], download_dir)
