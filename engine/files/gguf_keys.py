"""The keys that a GGUF file has for the model's architecture, checked as they are read. Torch is not needed."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ModelError
from .gguf_file import GGUFFile


class Keys:
    """Those that begin with the name of the architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = file.metadata.get("general.architecture")
        self.remedy = "download it again, or convert the model with a current llama.cpp"

    def __contains__(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.file.metadata

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, tuple) and value and len(set(value)) == 1:  # one a layer
            value = value[0]
        if value is None:
            raise ModelError(f"{self.file.path} lacks the key {self.prefix}.{key}: {self.remedy}")
        if not is_number(value) or not math.isfinite(value) or value < 0:
            raise ModelError(
                f"{self.file.path}: {self.prefix}.{key} is {value!r:.60}, a number from 0 on belongs there, one for "
                f"all layers: {self.remedy}"
            )
        return float(f"{value:.7g}") if isinstance(value, float) else value  # fp32 0.15 is 0.1500000059…

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not value or value != int(value):
            raise ModelError(
                f"{self.file.path}: {self.prefix}.{key} is {value!r}, a whole number above 0 belongs there: "
                f"{self.remedy}"
            )
        return int(value)

    def positive(self, key: str, default: float | None = None) -> float:
        if not (value := self.number(key, default)):
            raise ModelError(
                f"{self.file.path}: {self.prefix}.{key} is 0, a number above 0 belongs there: {self.remedy}"
            )
        return value


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
