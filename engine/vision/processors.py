"""Which processor a model's pictures pass, and its way to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..describe.picture_files import read_preprocessor
from ..families.vision_spec import TowerKind, VisionSpec
from .pixtral_processor import PixtralProcessor
from .processor import Processor
from .qwen_processor import QwenProcessor
from .tile_processor import CenterProcessor, TileProcessor

PROCESSORS: dict[TowerKind, type[Processor]] = {
    "qwen2": QwenProcessor, "qwen3": QwenProcessor, "pixtral": PixtralProcessor,
    "intern": TileProcessor, "clip": CenterProcessor,
}  # fmt: skip
_ANY = QwenProcessor | PixtralProcessor | TileProcessor | CenterProcessor


def read_processor(folder: Path, vision: VisionSpec, overrides: Mapping[str, Any] = {}) -> Processor:
    """Of the model in `folder`; overrides: --mm-processor-kwargs. Raises ConfigError, ModelError."""
    return PROCESSORS[vision.kind].read(vision, read_preprocessor(folder), overrides)


def encode(processor: Processor) -> bytes:
    """JSON, from which `decode` makes the same processor in another process."""
    return msgspec.json.encode(processor)


def decode(text: bytes) -> Processor:
    return msgspec.json.decode(text, type=_ANY)
