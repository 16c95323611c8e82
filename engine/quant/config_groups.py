"""config_groups of compressed-tensors: which modules are stored how, with its schemes by name ("W4A16")."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ModelError
from .format import CHANNEL, TENSOR, pair, section
from .settings import expression, flag, names

_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True)
class Weights:
    """How the matrices of a group are quantised."""

    bits: int
    type: str  # int, float
    strategy: str  # of _STRATEGIES
    group: int = 0  # columns that share a scale, of the strategies group and tensor_group
    blocks: tuple[int, int] | None = None  # of the strategy block
    symmetric: bool = True
    ordered: bool = False  # columns are, in an order of their own

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Weights:
        """As compressed-tensors' QuantizationArgs. Raises ModelError for what it does not know either."""
        bits, kind = values.get("num_bits", 8), values.get("type", "int")
        if type(bits) is not int or not 1 <= bits <= 8 or kind not in ("int", "float"):
            raise ModelError(
                f"quantization_config: weights are {kind!r} of {bits!r} bits, read are int and float of 1 to 8: "
                "correct config.json"
            )
        size = values.get("group_size")
        if size is not None and (type(size) is not int or size < -1 or size == 0):
            raise ModelError(
                f"quantization_config: group_size is {size!r}, a whole number above 0 (or -1) belongs there: correct "
                "config.json"
            )
        default = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = values.get("strategy") or default
        if strategy not in _STRATEGIES or (strategy in ("group", "tensor_group") and not (size and size > 0)):
            raise ModelError(
                f"quantization_config: strategy of weights is {strategy!r} with group_size {size}, read are "
                f"{', '.join(_STRATEGIES)}: correct config.json"
            )
        blocks = pair(values.get("block_structure"), "block_structure") if strategy == "block" else None
        ordered = values.get("actorder") in (True, "group", "dynamic")  # "weight" and "static" leave them as they lie
        return cls(bits, kind, strategy, max(size or 0, 0), blocks, flag(values, "symmetric", True), ordered)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale, as `Scales` has them."""
        if self.strategy == "tensor":
            return TENSOR
        return self.blocks or (CHANNEL if self.strategy == "channel" else (1, self.group))

    @property
    def described(self) -> str:
        return f"{self.type}{self.bits} per {self.strategy}" + (f" of {self.group}" if self.group else "")


@dataclass(frozen=True)
class Group:
    """Modules that are stored alike. Without `weights` their matrices are not quantised."""

    targets: tuple[str, ...]
    weights: Weights | None
    inputs: bool = False  # are quantised too
    static: bool = False  # by one scale that the checkpoint has
    format: str | None = None  # "pack-quantized"; None: the whole checkpoint's counts

    @classmethod
    def parse(cls, name: str, values: Any) -> Group:
        if isinstance(values, Sequence) and not isinstance(values, str):
            return replace(preset(name), targets=names({"targets": values}, "targets"))
        if not isinstance(values, Mapping):
            raise ModelError(
                f"quantization_config: config_groups has {values!r:.60} for {name!r}, an object or a list of targets "
                "belongs there: correct config.json"
            )
        weights, inputs = section(values, "weights"), section(values, "input_activations")
        fixed = not inputs.get("dynamic") and inputs.get("strategy", "tensor") == "tensor"
        static = bool(inputs) and fixed and inputs.get("num_bits", 8) == 8
        return cls(
            names(values, "targets"),
            Weights.parse(weights) if weights else None,
            inputs=bool(inputs),
            static=static,
            format=values.get("format"),
        )


_FLOAT4 = Weights(4, "float", "group", 32)
_FLOAT8 = Weights(8, "float", "group", 32)
_PRESETS = {
    "UNQUANTIZED": Group((), None),
    "W8A8": Group((), Weights(8, "int", "channel"), inputs=True),
    "INT8": Group((), Weights(8, "int", "channel"), inputs=True),
    "W4A16_ASYM": Group((), Weights(4, "int", "group", 128, symmetric=False)),
    "W4AFP8": Group((), Weights(4, "int", "group", 128), inputs=True),
    "FP8": Group((), Weights(8, "float", "tensor"), inputs=True, static=True),
    "FP8_DYNAMIC": Group((), Weights(8, "float", "channel"), inputs=True),
    "FP8_BLOCK": Group((), Weights(8, "float", "block", blocks=(128, 128)), inputs=True),
    "NVFP4A16": Group((), Weights(4, "float", "tensor_group", 16)),
    "NVFP4": Group((), Weights(4, "float", "tensor_group", 16), inputs=True),
    "MXFP4A16": Group((), _FLOAT4),
    "MXFP4": Group((), _FLOAT4, inputs=True),
    "MXFP4XFP8": Group((), _FLOAT4, inputs=True),
    "MXFP8A16": Group((), _FLOAT8),
    "MXFP8": Group((), _FLOAT8, inputs=True),
    "MXFP6A16": Group((), Weights(6, "float", "group", 32)),
    "MXFP6A8": Group((), Weights(6, "float", "group", 32), inputs=True),
}


def preset(name: str) -> Group:
    """The group that compressed-tensors means by this name, without targets. Raises ModelError for others."""
    upper = name.upper()
    if upper in _PRESETS:
        return _PRESETS[upper]
    if found := re.fullmatch(r"W([2-8])A(4|8|16)", upper):
        bits, inputs = int(found[1]), int(found[2])
        if bits <= inputs:
            return Group((), Weights(bits, "int", "group", 128), inputs=inputs < 16)
    raise ModelError(
        f"quantization_config: config_groups has {name!r}, known are {', '.join(_PRESETS)} and W2A16 to W8A16: correct "
        "config.json"
    )


def find_group(path: str, groups: Sequence[Group], ignore: Sequence[str]) -> Group | None:
    """The group of the module at `path`; None: in none, or ignored. An exact name counts before an expression ("re:…",
    from the start of the path), and that before the name of a class ("Linear")."""
    kind = "Embedding" if path.endswith("embed_tokens") else "Linear"
    if any(_matches(path, target) or target == kind for target in ignore):
        return None
    targets = sorted(
        ((target, group) for group in groups for target in group.targets),
        key=lambda found: ("re:" in found[0], found[0]),
    )
    for target, group in targets:
        if _matches(path, target):
            return group
    return next((group for target, group in targets if target == kind), None)


def _matches(path: str, target: str) -> bool:
    if target.startswith("re:"):
        return expression(target.removeprefix("re:"), "config_groups").match(path) is not None
    return target == path
