"""The files of PEFT's LoRA: adapter_config.json, and adapter_model.safetensors, which may change while it is read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError, one_line, unreadable
from ..files.checkpoint import FLOAT_TYPES, read_header
from ..quant.format import TensorInfo
from .patterns import PatternError, check_pattern, endings, first_matches

CONFIG_FILE = "adapter_config.json"
LARGEST = 16 << 20  # bytes of it

# Fields whose values change what the adapter computes in ways that nothing here does, with what to tell.
_UNSERVED = {
    "alora_invocation_tokens": "an activated adapter, which begins in the middle of a prompt",
    "layer_replication": "layers that are repeated",
    "trainable_token_indices": "tokens that were trained one by one",
    "lora_bias": "a bias of its own in every module",
    "use_qalora": "QALoRA's pooled inputs",
    "use_bdlora": "block-diagonal matrices",
    "arrow_config": "a router over several adapters",
    "kasa_config": "KaSA's singular values",
}
# Of target_parameters, those that are read: what the experts' modules of transformers hold, in the order of their
# registration, by which PEFT nests the wrappers of a module.
EXPERTS_PARAMETERS = ("gate_up_proj", "down_proj")
# Of fields that switch something on, those that change nothing, or that are looked at above and below.
_KNOWN = {
    "use_rslora", "use_dora", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
    "megatron_config", "runtime_config", "quantization_config",
}  # fmt: skip
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that take the base model apart


class AdapterError(ModelError):
    """This adapter cannot be served. The message is one line: what is wrong, and what to do."""


@dataclass(frozen=True)
class PeftConfig:
    rank: int
    alpha: float
    rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)  # regular expression → rank of modules of that name
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    targets: tuple[str, ...] | str = ()  # names, or their ends; or a regular expression, or all-linear
    excluded: tuple[str, ...] | str = ()
    layers: tuple[int, ...] | None = None  # None: all
    saved: tuple[str, ...] = ()  # modules that were trained and saved whole
    dora: bool = False
    parameters: tuple[str, ...] = ()  # target_parameters: of modules that hold all experts' matrices
    stamp: Stamp = ()  # of its file
    digest: str = ""  # of its content
    swapped: bool = False  # written before PEFT 0.19, which took the sides of such parameters for each other
    base: str | None = None  # base_model_name_or_path

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Raises AdapterError."""
        file = folder / CONFIG_FILE
        remedy = "pass a folder that PEFT's save_pretrained has written"
        try:
            if file.exists() and not file.is_file():  # a pipe or a device may have no end
                raise AdapterError(f"{file} is no file: {remedy}")
            with file.open("rb") as stream:
                stamp, content = stamp_of(stream.fileno()), stream.read(LARGEST + 1)
            if len(content) > LARGEST:
                raise AdapterError(f"{file} has more than {LARGEST >> 20} MB: {remedy}")
            raw = json.loads(content.decode("utf-8"))
        except FileNotFoundError:
            what = f"{folder} has no {CONFIG_FILE}" if folder.is_dir() else f"{folder} is no folder"
            raise AdapterError(f"{what}: {remedy}") from None
        except AdapterError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise AdapterError(f"cannot read {file} ({one_line(error)}): {remedy}") from None
        if not isinstance(raw, dict):
            raise AdapterError(f"{file} holds a {type(raw).__name__} where an object belongs: {remedy}")
        try:
            return replace(cls._of(raw), stamp=stamp, digest=hashlib.blake2b(content, digest_size=16).hexdigest())
        except AdapterError as error:
            raise AdapterError(f"{file}: {error}") from None

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> PeftConfig:
        if (kind := str(raw.get("peft_type", "LORA")).upper()) != "LORA":
            raise AdapterError(f"peft_type is {kind[:40]}: only LORA is served; merge it into its base model")
        for name, what in _UNSERVED.items():
            if raw.get(name):
                raise AdapterError(
                    f"{name} is set, and {what} cannot be served: merge it into its base model with PEFT"
                )
        switches = (name for name in raw if name.startswith("use_") or name.endswith("_config"))
        if unknown := [name for name in switches if raw[name] and name not in _KNOWN and name not in _UNSERVED]:
            raise AdapterError(
                f"{unknown[0][:60]} is set, which nobody here knows: merge it into its base model with the PEFT that "
                "wrote it"
            )
        if str(start := raw.get("init_lora_weights", True)).lower().startswith(_OTHER_BASE):
            raise AdapterError(
                f"init_lora_weights is {str(start)[:40]!r}, which alters the base model too: convert it to a plain "
                "adapter (PEFT's path_initial_model_for_weight_conversion), or merge it with PEFT"
            )
        if (bias := raw.get("bias") or "none") != "none":
            raise AdapterError(f"bias is {str(bias)[:40]!r}, and trained biases cannot be served: merge it with PEFT")
        parameters = _texts(raw, "target_parameters", str)
        if other := [name for name in parameters if name.rpartition(".")[2] not in (*EXPERTS_PARAMETERS, "weight")]:
            raise AdapterError(
                f"target_parameters has {other[0][:60]!r}, and only {' and '.join(EXPERTS_PARAMETERS)} of experts and "
                "weights of modules are served: merge it into its base model with PEFT"
            )
        layers = raw.get("layers_to_transform")
        if layers is not None:
            layers = (layers,) if isinstance(layers, int) else _texts(raw, "layers_to_transform", int) or None
        return cls(
            rank=_number(raw, "r", 8, whole=True),
            alpha=_number(raw, "lora_alpha", 8),
            rslora=bool(raw.get("use_rslora")),
            rank_pattern=_patterns(raw, "rank_pattern", whole=True),
            alpha_pattern=_patterns(raw, "alpha_pattern"),
            targets=_names(raw, "target_modules"),
            excluded=_names(raw, "exclude_modules"),
            layers=layers,
            saved=_texts(raw, "modules_to_save", str),
            dora=bool(raw.get("use_dora")),
            parameters=parameters,
            swapped=_version(raw) < (0, 19),
            base=raw.get("base_model_name_or_path") if isinstance(raw.get("base_model_name_or_path"), str) else None,
        )

    def ranks_of(self, paths: Sequence[str]) -> dict[str, int]:
        """Of each of what pairs change. Raises AdapterError, as the next two."""
        return self._values("rank_pattern", self.rank_pattern, paths, self.rank)

    def alphas_of(self, paths: Sequence[str]) -> dict[str, float]:
        return self._values("alpha_pattern", self.alpha_pattern, paths, self.alpha)

    def scale(self, alpha: float, rank: int) -> float:
        """What B A is multiplied by: alpha / r, with rslora alpha / √r (Kalajdzievski, arXiv 2312.03732)."""
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def targeted(self, modules: Sequence[str]) -> list[str]:
        """Of modules that are products, named as in the base model, those that should have a pair."""
        wanted = set(modules) if self.all_linear else _chosen("target_modules", self.targets, modules)
        wanted -= _chosen("exclude_modules", self.excluded, modules)
        wanted = {module for module in wanted if self._in_layers(module) and not self._is_saved(module)}
        return [module for module in modules if module in wanted or self.key_of(module) != module]

    def key_of(self, path: str) -> str:
        """What patterns look at: of target_parameters such as a router's gate.weight, the parameter."""
        return f"{path}.weight" if _ends(self._parameters, f"{path}.weight") else path

    def _values(self, field: str, patterns: dict[str, Any], paths: Sequence[str], otherwise: Any) -> dict[str, Any]:
        """Of each path the value of the first expression that the end of its name matches."""
        keys = {path: self.key_of(path) for path in paths}
        try:
            first = first_matches(list(patterns), list(keys.values()), ends=True)
        except PatternError as error:
            raise AdapterError(f"{field} has {error}") from None
        values = list(patterns.values())
        return {path: values[first[key]] if key in first else otherwise for path, key in keys.items()}

    def saved_of(self, modules: Iterable[str]) -> set[str]:
        """Of the names of what was saved whole those that one of these modules or tensors, by their paths, goes by."""
        paths = "\n".join(f".{module}." for module in modules) if self.saved else ""
        return {name for name in self.saved if f".{name}." in paths}

    def _is_saved(self, module: str) -> bool:
        return bool(self.saved_of([module]))

    def _in_layers(self, module: str) -> bool:
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return True
        layer = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return layer is not None and int(layer[1]) in self.layers

    def parameters_of(self, module: str) -> list[str]:
        """Of the experts' parameters in this module those that have a pair, the innermost wrapper's first."""
        full = (f"{module}.{name}" for name in EXPERTS_PARAMETERS if module.rpartition(".")[2] == "experts")
        return [path.rpartition(".")[2] for path in full if _ends(self._parameters, path)]

    def parameters_without(self, paths: Sequence[str]) -> list[str]:
        """Those of target_parameters that none of these paths is meant by."""
        meant = {end for path in paths for end in endings(path) if end in self._parameters}
        return [name for name in self.parameters if name not in meant]

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(self.parameters)

    @property
    def all_linear(self) -> bool:
        return isinstance(self.targets, str) and self.targets.lower() == "all-linear"


def _ends(names: Container[str], path: str) -> bool:
    """Whether it is one of these, or ends with one."""
    return any(end in names for end in endings(path))


def _chosen(field: str, rule: tuple[str, ...] | str, modules: Sequence[str]) -> set[str]:
    if not isinstance(rule, str):
        names = frozenset(rule)
        return {module for module in modules if _ends(names, module)}
    try:
        return set(first_matches([rule], modules)) if rule else set()
    except PatternError as error:
        raise AdapterError(f"{field} has {error}") from None


def _number(raw: dict[str, Any], name: str, default: float, *, whole: bool = False) -> Any:
    value = raw.get(name, default)
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 1e6:
        wanted = "an integer" if whole else "a number"
        raise AdapterError(f"{name} is {value!r:.60}: it must be {wanted} above 0 and below a million")
    return value


def _patterns(raw: dict[str, Any], name: str, *, whole: bool = False) -> dict[str, Any]:
    found = raw.get(name) or {}
    if not isinstance(found, dict):
        raise AdapterError(f"{name} is {found!r:.60}: it must be an object")
    for pattern in found:
        _check_pattern(name, pattern)
    return {pattern: _number(found, pattern, 0, whole=whole) for pattern in found}


def _names(raw: dict[str, Any], name: str) -> tuple[str, ...] | str:
    """A list of names, or a regular expression."""
    value = raw.get(name)
    if not isinstance(value, str):
        return _texts(raw, name, str)
    _check_pattern(name, value)
    return value


def _texts(raw: dict[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    value = raw.get(name) or []
    if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
        raise AdapterError(f"{name} is {value!r:.60}: it must be a list of {'names' if kind is str else 'integers'}")
    return tuple(value)


def _version(raw: dict[str, Any]) -> tuple[int, int]:
    """PEFT's that wrote it; before 0.18 it did not say."""
    found = re.match(r"(\d+)\.(\d+)", str(raw.get("peft_version") or ""))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _check_pattern(name: str, pattern: str) -> None:
    try:
        check_pattern(pattern)
    except PatternError as error:
        raise AdapterError(f"{name} has {error}") from None


# Parsing JSON holds the interpreter's lock: this much takes about a second, in which no step runs. Three pairs of
# each of 256 experts in 60 layers take 14 million bytes.
LONGEST_HEADER = 16 << 20
Stamp = tuple[int, ...]  # tells a file from what takes its place, on one host
SAMPLE = 1024  # bytes of each tensor: training changes nearly all of its numbers


def stamp_of(file: Path | int) -> Stamp:
    """`file`: or its descriptor. Raises OSError."""
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns


class WeightsFile:
    """Its tensors are copied, never mapped: a process that touches a page of a mapped file behind its end,
    because it has been cut short, is killed (SIGBUS). All are of one version of the file. Raises ModelError."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            with file.open("rb") as stream:
                self.stamp = stamp_of(stream.fileno())
                self.headers: dict[str, TensorInfo]
                self.headers, self._starts = read_header(stream, file, LONGEST_HEADER)
                self.digest = self._digest(stream.fileno())
        except PermissionError:
            raise unreadable(file) from None
        except OSError as error:
            raise ModelError(f"cannot read {file} ({one_line(error)}): get the adapter again") from None

    def _digest(self, descriptor: int) -> str:
        """What tells its content from another's on any host, without reading all of it. Raises OSError."""
        digest = hashlib.blake2b(digest_size=16)
        for name, info in self.headers.items():
            length = min(SAMPLE, info.num_bytes)
            digest.update(repr((name, info.dtype, info.shape, self._starts[name])).encode())
            digest.update(os.pread(descriptor, length, self._starts[name] + (info.num_bytes - length) // 2))
        return digest.hexdigest()

    def read(self, name: str) -> Tensor:
        """As stored. From any thread."""
        info = self.headers[name]
        memory = bytearray(info.num_bytes)
        try:
            with self.file.open("rb", buffering=0) as stream:
                stream.seek(self._starts[name])
                view, done = memoryview(memory), 0
                while done < len(memory) and (count := stream.readinto(view[done:])):
                    done += count
                whole = done == len(memory) and stamp_of(stream.fileno()) == self.stamp
        except OSError as error:
            raise ModelError(f"cannot read {name} from {self.file} ({one_line(error)}): get it again") from None
        if not whole:
            raise ModelError(f"{self.file} has changed while it was read: load it again when it is whole")
        dtype = FLOAT_TYPES[info.dtype]
        if not memory:  # which frombuffer refuses
            return torch.empty(info.shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype).view(info.shape)
