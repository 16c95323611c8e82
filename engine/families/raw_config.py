"""Values of a config.json, checked as they are read: a wrong one is a line that names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import ModelError

_LARGEST = 1 << 40  # of sizes and counts, far beyond any model: with more, products of some overflow


class RawConfig:
    """config.json, with a family's defaults for what it leaves out.

    A key that is not among the defaults raises KeyError: each that is read is declared there.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values, self.defaults = values, defaults
        self.default_theta: float = defaults.get("rope_theta", 10_000.0)

    def get(self, key: str) -> Any:
        """Where the default is true, false or a name, the value is of that kind too, or null. Raises ModelError: else
        any text would switch things on."""
        default = self.defaults[key]
        value = self.values.get(key, default)
        if isinstance(default, bool):
            return flag({key: value}, key)
        if isinstance(default, str) and not isinstance(value, str | None):
            raise ModelError(f"config.json: {key} is {value!r:.60}, a name belongs there: correct the file")
        return value

    def optional_count(self, key: str) -> int | None:
        """A whole number above 0, or null. Raises ModelError."""
        value = self.get(key)
        if value is not None and (not _is_whole(value) or value < 1):
            raise ModelError(f"config.json: {key} is {value!r}, a whole number above 0 belongs there: correct the file")
        if value is not None and value > _LARGEST:
            raise ModelError(
                f"config.json: {key} is {value!r}, more than {_LARGEST} is none of a model: correct the file"
            )
        return value

    def count(self, key: str) -> int:
        """A whole number above 0; null is the default. Raises ModelError."""
        return self.optional_count(key) or self.defaults[key]

    def size(self, key: str) -> int:
        """A whole number from 0 on; null is 0. Raises ModelError."""
        value = self.get(key)
        if value is not None and (not _is_whole(value) or not 0 <= value <= _LARGEST):
            raise ModelError(
                f"config.json: {key} is {value!r:.60}, a whole number from 0 on belongs there: correct the file"
            )
        return value or 0

    def optional_list(self, key: str) -> list[Any] | None:
        """A list, or null. Raises ModelError."""
        value = self.get(key)
        if value is not None and not isinstance(value, list | tuple):
            raise ModelError(f"config.json: {key} is {value!r:.60}, a list belongs there: correct the file")
        return None if value is None else list(value)

    def number(self, key: str) -> float:
        """A number above 0; null is the default. Raises ModelError."""
        return number(self.values, key, self.defaults[key])

    def optional_number(self, key: str) -> float | None:
        """A number above 0, or null. Raises ModelError."""
        value = self.get(key)
        return None if value is None else number({key: value}, key)


def architectures(raw: Mapping[str, Any]) -> list[str]:
    """The names of config.json's classes, none where it has none. Raises ModelError."""
    found = raw.get("architectures")
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        example = f'["{found}"]' if isinstance(found, str) else '["LlamaForCausalLM"]'
        raise ModelError(
            f"config.json: architectures is {found!r:.60}, a list of names such as {example:.60} belongs there: "
            "correct the file"
        )
    return found


def model_type(raw: Mapping[str, Any]) -> str:
    """ "" where there is none. Raises ModelError."""
    found = raw.get("model_type")
    if not isinstance(found, str | None):
        raise ModelError(f"config.json: model_type is {found!r:.60}, a name belongs there: correct the file")
    return found or ""


TEXT_KEYS = ("text_config", "llm_config")  # of the object that describes the decoder of a model of pictures


# Of what looks at pictures, and of the tokens that stand for them.
VISION_KEYS = ("vision_config", "image_token_id", "image_token_index", "video_token_id", "vision_feature_layer")


def text_values(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """That object; an empty one where there is none."""
    return next((raw[key] for key in TEXT_KEYS if isinstance(raw.get(key), Mapping)), {})


def dtype_name(raw: Mapping[str, Any]) -> str | None:
    """Of the weights, as config.json names it, at its top or beside what it says of the text; None: it does not, or
    leaves it to the weights ("auto"). transformers 5 writes "dtype", older ones "torch_dtype"."""
    for values in (raw, text_values(raw)):
        name = values.get("dtype") or values.get("torch_dtype")
        if name is not None and name != "auto":
            return str(name).removeprefix("torch.")
    return None


def flag(values: Mapping[str, Any], key: str) -> bool | None:
    """True, false or null of some object in config.json; 1 and 0 are those. Raises ModelError."""
    value = values.get(key)
    if value is not None and (not isinstance(value, int | float) or value not in (True, False)):
        raise ModelError(f"config.json: {key} is {value!r:.60}, true or false belongs there: correct the file")
    return None if value is None else bool(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0 of some object in config.json. Raises ModelError, without a default also where it is missing."""
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key} is {value!r}, a number above 0 belongs there: correct the file")
    return float(value)
