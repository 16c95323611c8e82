"""adapter_config.json of PEFT's LoRA: what scales each pair of matrices, and what cannot be served."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..model_file import ModelError, one_line

CONFIG_FILE = "adapter_config.json"
LONGEST_PATTERN = 1000  # characters of a regular expression

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
    swapped: bool = False  # written before PEFT 0.19, which took the sides of such parameters for each other
    base: str | None = None  # base_model_name_or_path

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Raises AdapterError."""
        file = folder / CONFIG_FILE
        remedy = "pass a folder that PEFT's save_pretrained has written"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            what = f"{folder} has no {CONFIG_FILE}" if folder.is_dir() else f"{folder} is no folder"
            raise AdapterError(f"{what}: {remedy}") from None
        except (OSError, ValueError) as error:
            raise AdapterError(f"cannot read {file} ({one_line(error)}): {remedy}") from None
        if not isinstance(raw, dict):
            raise AdapterError(f"{file} holds a {type(raw).__name__} where an object belongs: {remedy}")
        try:
            return cls._of(raw)
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
        if str(start := raw.get("init_lora_weights", True)).lower().startswith(_OTHER_BASE):
            raise AdapterError(
                f"init_lora_weights is {str(start)[:40]!r}, which alters the base model too: convert it to a plain "
                "adapter (PEFT's path_initial_model_for_weight_conversion), or merge it with PEFT"
            )
        if (bias := raw.get("bias") or "none") != "none":
            raise AdapterError(f"bias is {str(bias)[:40]!r}, and trained biases cannot be served: merge it with PEFT")
        parameters = _texts(raw, "target_parameters", str)
        if other := [name for name in parameters if name.rpartition(".")[2] not in EXPERTS_PARAMETERS]:
            raise AdapterError(
                f"target_parameters has {other[0][:60]!r}, and only {' and '.join(EXPERTS_PARAMETERS)} of experts are "
                "served: merge it into its base model with PEFT"
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

    def rank_of(self, module: str) -> int:
        return _first(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """What B A is multiplied by: alpha / r, with rslora alpha / √r (Kalajdzievski, arXiv 2312.03732)."""
        return _first(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def targets_module(self, module: str) -> bool:
        """Whether the module, named as in the base model, should have a pair. Not of all-linear, which needs more than
        a name."""
        if self.excluded and _matches(self.excluded, module):
            return False
        if any(re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", module) for name in self.saved):
            return False
        if not _matches(self.targets, module):
            return False
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return True
        layer = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return layer is not None and int(layer[1]) in self.layers

    def parameters_of(self, module: str) -> list[str]:
        """Of the experts' parameters in this module those that have a pair, the innermost wrapper's first."""
        full = (f"{module}.{name}" for name in EXPERTS_PARAMETERS if module.rpartition(".")[2] == "experts")
        return [path.rpartition(".")[2] for path in full if _matches(self.parameters, path)]

    @property
    def all_linear(self) -> bool:
        return isinstance(self.targets, str) and self.targets.lower() == "all-linear"


def _matches(rule: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(rule, str):
        return re.fullmatch(rule, module) is not None
    return module in rule or module.endswith(tuple(f".{name}" for name in rule))


def _first(patterns: dict[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first expression that the end of the module's name matches."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _number(raw: dict[str, Any], name: str, default: float, *, whole: bool = False) -> Any:
    value = raw.get(name, default)
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 1e6:
        raise AdapterError(f"{name} is {value!r:.60}: it must be {'an integer' if whole else 'a number'} above 0")
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
        if len(pattern) > LONGEST_PATTERN:
            raise AdapterError(f"{name} has a regular expression of {len(pattern)} characters: {LONGEST_PATTERN} fit")
        re.compile(pattern)
    except re.error as error:
        raise AdapterError(f"{name} has {pattern[:60]!r}, which is no regular expression ({error})") from None
