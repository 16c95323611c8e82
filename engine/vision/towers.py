"""Which tower a model has."""

from __future__ import annotations

from ..families.vision_spec import TowerKind, VisionSpec
from ..quant.weights import Placement
from .qwen import QwenTower
from .tower import Tower

TOWERS: dict[TowerKind, type[Tower]] = {"qwen": QwenTower}


def make_tower(vision: VisionSpec, place: Placement) -> Tower:
    """Without weights."""
    return TOWERS[vision.kind](vision, place)
