"""Which tower a model has."""

from __future__ import annotations

from ..families.vision_spec import TowerKind, VisionSpec
from ..quant.weights import Placement
from .pixtral import PixtralTower
from .qwen import Qwen2Tower, Qwen3Tower
from .tiles import ClipTower, InternTower
from .tower import Tower

TOWERS: dict[TowerKind, type[Tower]] = {"qwen2": Qwen2Tower, "qwen3": Qwen3Tower, "pixtral": PixtralTower,
    "intern": InternTower, "clip": ClipTower,
}  # fmt: skip


def make_tower(vision: VisionSpec, place: Placement) -> Tower:
    """Without weights."""
    return TOWERS[vision.kind](vision, place)
