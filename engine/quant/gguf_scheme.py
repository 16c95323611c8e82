"""Which modules of a GGUF file are quantised, and how: the types of its tensors say it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from .format import Format
from .ggml_types import FLOATS


class GGUFScheme:
    """A `Scheme`; `config`: with the type that modules have where there are no tensors ("type")."""

    method = "gguf"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.default = str(config["type"])

    def format(self, path: str, stored: Mapping[str, tuple[str, tuple[int, ...]]] | None) -> Format | None:
        kind = self.default if stored is None else stored["weight"][0] if "weight" in stored else FLOATS[0]
        if kind in FLOATS:
            return None
        format: Format = import_module(".gguf_blocks", __package__).format_of(kind, path)
        return format
