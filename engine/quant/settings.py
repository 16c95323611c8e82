"""Values of a checkpoint's quantization_config that the integer formats are set by: read strictly, without torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import ModelError

Headers = Mapping[str, tuple[str, tuple[int, ...]]]  # suffix → (dtype, shape)
SCALES = ("F16", "BF16", "F32")
OTHER_LAYOUTS = {  # by their names in configurations
    "marlin": "Marlin", "gptq_marlin": "Marlin", "awq_marlin": "Marlin", "marlin_24": "Marlin 2:4",
    "gptq_marlin_24": "Marlin 2:4", "bitblas": "BitBLAS", "gptq_p": "GPTQ-P", "qqq": "QQQ", "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3", "paroquant": "ParoQuant", "vptq": "VPTQ", "gemv": "AWQ gemv", "gemv_fast": "AWQ gemv_fast",
    "llm-awq": "llm-awq",
}  # fmt: skip


def value(config: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """Of the first of these keys that is set: what they were named over the years."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def number(config: Mapping[str, Any], *keys: str, among: Collection[int], default: int | None = None) -> int:
    """Raises ModelError for anything but a whole number out of `among`."""
    found = value(config, *keys, default=default)
    if type(found) is not int or found not in among:
        what = "is missing" if found is None else f"is {found!r:.60}"
        raise ModelError(
            f"quantization_config: {keys[0]} {what}, read {listed(among)}: use another checkpoint, or the "
            "unquantized model"
        )
    return found


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Raises ModelError for anything but true and false."""
    found = value(config, key, default=default)
    if not isinstance(found, bool):
        raise ModelError(f"quantization_config: {key} is {found!r:.60}, read are true and false: correct config.json")
    return found


def group_size(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int | None:
    """Columns that share a scale; None for the whole row, which the configuration has as -1."""
    found = value(config, *keys, default=default)
    if type(found) is not int or (found != -1 and found < 1):
        what = "is missing" if found is None else f"is {found!r:.60}"
        raise ModelError(
            f"quantization_config: {keys[0]} {what}, read are -1 and whole numbers from 1 on: correct config.json"
        )
    return None if found == -1 else found


def whole_groups(columns: int, group: int | None) -> None:
    """Raises ModelError where the last group of a row has fewer columns than the others. No quantiser that leaves the
    columns in their order writes that: the size in the configuration is another one, which has as many scales."""
    if group is not None and group < columns and columns % group:
        raise ModelError(
            f"groups of {group} columns do not divide a matrix with {columns} of them: correct group_size in "
            "quantization_config, or download the checkpoint again"
        )


def names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The strings of a list, nested or not. Raises ModelError for anything else."""
    found = value(config, *keys, default=[])

    def flat(items: Any) -> Iterable[Any]:
        for item in items:
            yield from flat(item) if isinstance(item, list) else (item,)

    if isinstance(found, list) and all(isinstance(name, str) for name in flat(found)):
        return tuple(flat(found))
    raise ModelError(
        f"quantization_config: {keys[0]} is {found!r:.60}, a list of modules' names belongs there: correct config.json"
    )


def entries(config: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    """Patterns and what they override, in their order. Raises ModelError for anything else."""
    found = value(config, key, default={})
    if isinstance(found, dict) and all(isinstance(entry, dict) for entry in found.values()):
        return found
    raise ModelError(
        f"quantization_config: {key} is {found!r:.60}, an object of objects belongs there: correct config.json"
    )


def expression(pattern: str, key: str) -> re.Pattern[str]:
    """Raises ModelError where it is none."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ModelError(
            f"quantization_config: {key} has {pattern!r:.60}, which is no regular expression ({error}): correct "
            "config.json"
        ) from None


def layout(config: Mapping[str, Any], *keys: str, among: Collection[str], default: str) -> str:
    """The name of the packing, in small letters. Raises ModelError for the packings of single kernels, and others."""
    found = value(config, *keys, default=default)
    name = found.lower() if isinstance(found, str) else ""
    if name in OTHER_LAYOUTS or config.get("is_marlin_format"):
        raise other_layout(OTHER_LAYOUTS.get(name, "Marlin"))
    if name not in among:
        raise ModelError(
            f"quantization_config: {keys[0]} is {found!r:.60}, read {listed(among)}: export the checkpoint again "
            "as gptq, awq or compressed-tensors"
        )
    return name


def other_layout(name: str) -> ModelError:
    return ModelError(
        f"the checkpoint is stored in {name}'s own layout: export it again as gptq, awq or compressed-tensors"
    )


def listed(values: Collection[Any]) -> str:
    """As a sentence ends: "are 2, 3 and 4", "is 4"."""
    *first, final = map(str, values)
    return f"are {', '.join(first)} and {final}" if first else f"is {final}"


def last(path: str) -> str:
    return path.rpartition(".")[2]
