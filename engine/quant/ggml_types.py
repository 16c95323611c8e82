"""The types that a GGUF file stores tensors in: how many elements a block has, and how many bytes it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .format import Format


@dataclass(frozen=True)
class GGMLType:
    name: str
    elements: int  # of a block, along a row
    bytes: int  # of a block

    def row_bytes(self, columns: int) -> int:
        return columns // self.elements * self.bytes


# By their number in the file (enum ggml_type of ggml.h).
TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}
BY_NAME = {ggml.name: ggml for ggml in TYPES.values()}
# Of older files; llama.cpp no longer reads them.
REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
FLOATS = ("F32", "F16", "BF16")  # served as they are
BLOCKS = (  # decoded to codes: engine/quant/gguf_blocks.py
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
CODE_BOOKS = (  # dequantised when they are loaded, by the package gguf
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4",
)  # fmt: skip


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
