"""What the files' headers say of one module's tensors, and what a configuration's lists of names mean; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..errors import ModelError
from .format import FLOATS, Stored
from .settings import Headers, expression

EXPONENTS = ("U8", "F8_E8M0")  # a byte e stands for 2^(e - 127)
# What calibration left beside a matrix. A product that quantises its input by its own scales needs none of it.
BESIDE = ("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale")


def quantised(stored: Headers) -> bool:
    """Whether there is a matrix below the path, and not as plain floats."""
    if "weight" in stored:
        return stored["weight"][0] not in FLOATS
    return any(suffix in stored for suffix in ("weight_packed", "qweight"))


def beside(stored: Headers | None) -> tuple[tuple[str, Stored], ...]:
    """What lies beside the matrix and may be passed over: the loader shall not take it for left over."""
    return tuple(
        (suffix, Stored(stored[suffix][1], (stored[suffix][0],), optional=True))
        for suffix in BESIDE
        if stored is not None and suffix in stored
    )


def refuse_scaled_inputs(path: str, stored: Headers | None) -> None:
    """Raises ModelError where the matrix expects its input multiplied, column by column, by AWQ's factors."""
    if stored is not None and "pre_quant_scale" in stored:
        raise ModelError(
            f"{path}.pre_quant_scale multiplies the input of this matrix, which is not done: use a checkpoint in which "
            "AWQ's factors are folded into the weights (awq, compressed-tensors)"
        )


def named(path: str, names: Iterable[str]) -> bool:
    """Whether `path` or one of its parts is among these names: "lm_head", "model.layers.0", "mlp.gate"."""
    return any(f".{name}." in f".{path}." for name in names if name)


def matched(path: str, patterns: Iterable[str]) -> bool:
    """As `named`; a pattern may also have wildcards of file names, or begin with "re:"."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if expression(pattern.removeprefix("re:"), "a list of modules").match(path):
                return True
        elif fnmatchcase(path, pattern) or named(path, [pattern]):
            return True
    return False


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under this key, empty where there is none. Raises ModelError for anything else there."""
    found = config.get(key)
    if isinstance(found, Mapping):
        return found
    if found is None:
        return {}
    raise ModelError(f"quantization_config: {key} is {found!r:.60}, an object belongs there: correct config.json")


def pair(value: Any, key: str) -> tuple[int, int]:
    """Rows and columns of a block, from [128, 128] or the older "128x128". Raises ModelError for anything else."""
    found = value
    if isinstance(value, str):
        found = [int(part) if part.isdecimal() else part for part in value.split("x")]
    if isinstance(found, (list, tuple)) and len(found) == 2:
        rows, columns = found
        if type(rows) is int and type(columns) is int and rows > 0 and columns > 0:
            return rows, columns
    raise ModelError(
        f"quantization_config: {key} is {value!r:.60}, two whole numbers above 0 belong there ([128, 128]): correct "
        "config.json"
    )
