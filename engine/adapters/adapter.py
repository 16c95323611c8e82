"""An adapter in a folder: its matrices by module of the base model, read from safetensors alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ..errors import ModelError, and_more
from ..files.checkpoint import FLOAT_TYPES
from .peft_files import AdapterError, PeftConfig, Stamp, WeightsFile

# How to have an adapter read as it is now, whatever was read before.
AGAIN = "load it again with load_inplace (from --lora-dir), or restart the server"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."
LONGEST_NAME = 1000  # characters of a tensor's; expressions are matched with them
# Of a tensor's name: the module, which of its matrices; some versions put the adapter's name, "default", in between.
_MATRIX = re.compile(
    r"(.*)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)


def names_in_base(name: str) -> Iterator[str]:
    """What a module or parameter may be called in the base's checkpoint: adapters are trained with or without a head
    around the model, and transformers 5 calls Mixtral's mixtures and Nemotron's body as all others, but in files."""
    for path in (name, f"model.{name}", name.removeprefix("model.")):
        yield path
        yield path.replace(".mlp.", ".block_sparse_moe.")
    yield f"backbone.{name.removeprefix('model.')}"


@dataclass
class Pair:
    """One module's matrices, by their names in the file: scale · B A is added to its weight.

    Of a parameter that holds all experts' matrices, A [E · r, in] has one expert's rows behind the other's, and
    columns of B [out, r · E] alternate between experts.
    """

    module: str  # as the file has it, without PEFT's prefix
    is_embedding: bool = False
    a: str = ""  # [r, in]; of an embedding [r, vocabulary]
    b: str = ""  # [out, r]; of an embedding [hidden, r]
    magnitude: str = ""  # [out], of DoRA
    rank: int = 0
    scale: float = 0.0
    parameter: str = ""  # of the module, which holds all experts' matrices in it; "": its weight
    experts: int = 1

    @property
    def path(self) -> str:
        """What it changes."""
        return f"{self.module}.{self.parameter}" if self.parameter else self.module


@dataclass
class Adapter:
    folder: Path
    config: PeftConfig
    files: WeightsFile
    pairs: dict[str, Pair] = field(default_factory=dict)  # by path
    whole: dict[str, str] = field(default_factory=dict)  # parameter of the base model → tensor that takes its place
    # Module → copy of the base's weight, which PEFT saves beside the pair of an embedding or a head.
    copies: dict[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest."""
        return max((pair.rank for pair in self.pairs.values()), default=0)

    @property
    def stamp(self) -> Stamp:
        """Where it is another, the folder may hold another adapter; of one host."""
        return self.config.stamp + self.files.stamp

    @property
    def version(self) -> str:
        """The same for the same files on any host, another for another adapter."""
        return self.config.digest + self.files.digest

    def check_unchanged(self, version: str, stamp: Stamp = ()) -> None:
        """Raises AdapterError where it was of another version or stamp when it was loaded; empty: that is not known."""
        if self.version != (version or self.version) or self.stamp != (stamp or self.stamp):
            raise AdapterError(f"{self.folder} has changed since it was loaded: {AGAIN}")

    @classmethod
    def open(cls, folder: Path) -> Adapter:
        """By its headers. Raises AdapterError."""
        config = PeftConfig.read(folder)
        if not (folder / WEIGHTS_FILE).is_file():
            if (folder / PICKLED_FILE).exists():
                raise AdapterError(
                    f"{folder} has {PICKLED_FILE}, a pickle, which could run code and is not read: save it as "
                    f"{WEIGHTS_FILE} (save_pretrained of PEFT does)"
                )
            raise AdapterError(f"{folder} has no {WEIGHTS_FILE}: download the adapter again")
        try:
            files = WeightsFile(folder / WEIGHTS_FILE)
        except ModelError as error:
            raise AdapterError(str(error)) from None
        adapter = cls(folder, config, files)
        adapter._read_names()
        if config.parameters:
            adapter._name_parameters()
        rank_of = config.ranks_of(list(adapter.pairs))
        alpha_of = config.alphas_of(list(adapter.pairs))
        for path, pair in adapter.pairs.items():
            adapter._complete(pair, rank_of[path])
            pair.scale = config.scale(alpha_of[path], pair.rank)
        if not adapter.pairs and not adapter.whole:
            raise AdapterError(f"{folder / WEIGHTS_FILE} has no tensors: download the adapter again")
        return adapter

    def read(self, name: str) -> Tensor:
        """As stored. Raises AdapterError, also for what would make every answer one of NaN."""
        try:
            tensor = self.files.read(name)
        except ModelError as error:
            raise AdapterError(str(error)) from None
        # A sum in its own type is one pass, and no copy; only one that is too large for it needs another look.
        if not (tensor.sum().isfinite() or tensor.isfinite().all()):
            raise AdapterError(f"{self.folder} has NaN or infinite values in {name}: its training failed, get another")
        return tensor

    def check_copy(self, module: str, shape: tuple[int, ...]) -> None:
        """Raises AdapterError where the weight that the pair was trained beside is not of the base's shape."""
        if (name := self.copies.get(module)) is not None and self.files.headers[name].shape != shape:
            raise AdapterError(
                f"{self.folder} was trained beside a {module} of shape {list(self.files.headers[name].shape)}, and the "
                f"model's is {list(shape)}: it has more tokens, merge it with PEFT"
            )

    def check_complete(self, products: Iterable[str], modules: Iterable[str]) -> None:
        """Raises AdapterError where the configuration names one of these products of the base, by their paths, and no
        tensors are there for it, or says that one of its modules, of which these are all, was saved whole."""
        if lacking := self.config.saved_of(modules) - self.config.saved_of(self.whole):
            raise AdapterError(
                f"{self.folder} lacks {min(lacking)}, which its modules_to_save name: the file is incomplete, or of "
                "another base"
            )
        paths = set(products)
        prefix = next((p for p in ("", "model.") if any(f"{p}{module}" in paths for module in self.pairs)), "")
        targeted = self.config.targeted([path.removeprefix(prefix) for path in paths])
        if missing := sorted(module for module in targeted if module not in self.pairs):
            raise AdapterError(
                f"{self.folder} lacks the matrices of {missing[0]}{and_more(missing)}, which its target_modules name: "
                "the file is incomplete, or of another base"
            )

    def _read_names(self) -> None:
        for name, info in self.files.headers.items():
            if len(name) > LONGEST_NAME:
                raise AdapterError(
                    f"{self.folder} has a tensor whose name has {len(name)} characters, {name[:40]!r}…, and at most "
                    f"{LONGEST_NAME} are read: get it again"
                )
            if info.dtype not in FLOAT_TYPES:
                raise AdapterError(f"{name} is stored as {info.dtype}: only floats are read")
            bare = name.removeprefix(_PREFIX)
            if found := _MATRIX.fullmatch(bare):
                module, kind = found.groups()
                pair = self.pairs.setdefault(module, Pair(module))
                pair.is_embedding = pair.is_embedding or "embedding" in kind
                setattr(pair, "magnitude" if "magnitude" in kind else kind[-1].lower(), name)
            elif bare.endswith(".base_layer.weight"):
                self.copies[bare.removesuffix(".base_layer.weight")] = name
            elif "lora_" in bare or "trainable_tokens" in bare:
                raise AdapterError(f"{self.folder} has {name}, which cannot be served: merge it with PEFT")
            else:
                self.whole[bare.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")] = name

    def _name_parameters(self) -> None:
        """PEFT wraps a module once for each of its parameters, and its names tell only how deep a wrapper lies."""
        wrapped: dict[str, dict[int, Pair]] = {}
        for module in list(self.pairs):
            inner = module
            while inner.endswith(".base_layer"):
                inner = inner.removesuffix(".base_layer")
            if self.config.parameters_of(inner):
                depth = (len(module) - len(inner)) // len(".base_layer")
                wrapped.setdefault(inner, {})[depth] = self.pairs.pop(module)
        there = [f"{module}.{name}" for module in wrapped for name in self.config.parameters_of(module)]
        if lacking := self.config.parameters_without([*there, *(f"{module}.weight" for module in self.pairs)]):
            raise AdapterError(f"{self.folder} lacks the matrices of {lacking[0]}: get it again")
        for module, pairs in wrapped.items():
            names = self.config.parameters_of(module)
            if sorted(pairs) != list(range(len(names))):
                raise AdapterError(
                    f"{self.folder} has {len(pairs)} pairs of {module}, and its target_parameters name "
                    f"{' and '.join(names)}: the file is incomplete, get it again"
                )
            for depth, name in enumerate(reversed(names)):
                pair = pairs[depth]
                pair.module, pair.parameter = module, name
                self.pairs[pair.path] = pair

    def _complete(self, pair: Pair, expected: int) -> None:
        """`expected`: its rank, by the configuration. Raises AdapterError where a matrix is missing or the two do not
        go together."""
        headers, folder = self.files.headers, self.folder
        names = ("lora_embedding_A", "lora_embedding_B") if pair.is_embedding else ("lora_A", "lora_B")
        missing = [f"{pair.path}.{name}" for name, there in zip(names, (pair.a, pair.b), strict=True) if not there]
        if missing:
            raise AdapterError(f"{folder} lacks {missing[0]}{and_more(missing)}: the file is incomplete, get it again")
        a, b = headers[pair.a].shape, headers[pair.b].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
            raise AdapterError(
                f"{folder}: A of {pair.path} is {list(a)} and B is {list(b)}: they must be [r, in] and [out, r]"
            )
        if pair.parameter:
            pair.experts = max(a[0] // expected, 1)
        pair.rank = a[0] // pair.experts
        if pair.rank != expected or a[0] % pair.experts:
            raise AdapterError(
                f"{folder}: {pair.path} has the rank {pair.rank}, and its configuration says {expected}: they are "
                "not of one adapter"
            )
        if bool(pair.magnitude) != self.config.dora:
            raise AdapterError(f"{folder}: use_dora is {self.config.dora}, and {pair.path} differs: get it again")
