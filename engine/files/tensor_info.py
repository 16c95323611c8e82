"""A tensor of a checkpoint, known by its file's header alone. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header describes it."""

    file: Path
    dtype: str  # safetensors' name: "BF16", "F32", …
    shape: tuple[int, ...]
    num_bytes: int
