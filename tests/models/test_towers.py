"""What looks at pictures: transformers' features, for pictures of every shape, alone and in company (fp32, CPU)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vserve.engine.describe.reading import read_folder
from vserve.engine.link.media import MediaItem
from vserve.engine.models.blocks import CausalLM
from vserve.engine.vision.processor import Pixels
from vserve.engine.vision.processors import read_processor
from vserve.tests.tiny_models import reference

from .test_model_parity import load

Item = tuple[Tensor, MediaItem]
SIZES: dict[str, Any] = {"max_position_embeddings": 64}
KINDS = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5"]
# Width and height: squares, strips of one patch's height, what is stretched and what is shrunk.
SHAPES = [
    (64, 64), (32, 32), (100, 64), (64, 200), (33, 320), (640, 32), (65, 95), (224, 96), (5, 7), (300, 20), (96, 160),
    (2, 390),
]  # fmt: skip


def picture(width: int, height: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@lru_cache
def loaded(folder: Path) -> CausalLM:
    return load(folder)


@lru_cache
def oracle_tower(folder: Path) -> Any:
    model = reference(folder, dtype=torch.float32).eval()
    return getattr(model.model, "visual", model.model)


def items_of(folder: Path, pictures: Sequence[Pixels], **overrides: Any) -> list[Item]:
    vision = read_folder(folder).vision
    assert vision is not None
    processor = read_processor(folder, vision, overrides)
    found = []
    for rgb in pictures:
        pixels, grid = processor.pixels(rgb)
        item = processor.item(pixels, grid, rgb.shape[:2], 0)  # type: ignore[arg-type]
        found.append((torch.frombuffer(bytearray(item.pixels), dtype=torch.uint8).view(*item.size, 3), item))
    return found


def patches_of_transformers(folder: Path, item: Item) -> Tensor:
    """As Qwen2VLImageProcessor makes them: pixels normalised, cut, in the order of tokens, each frame twice."""
    vision = read_folder(folder).vision
    assert vision is not None
    pixels, (_, grid, *_rest) = item[0], (None, item[1].grid)
    mean, std = (torch.tensor(values)[:, None, None] for values in (vision.mean, vision.std))
    image = (pixels[0].permute(2, 0, 1).float() / 255 - mean) / std
    _, rows, columns = grid
    m, p = vision.merge, vision.patch
    parts = image.reshape(1, 3, rows // m, m, p, columns // m, m, p).permute(0, 2, 5, 3, 6, 1, 4, 7)
    return parts.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1).reshape(rows * columns, 3 * 2 * p * p)


@torch.no_grad()
def features_of_transformers(folder: Path, item: Item) -> Tensor:
    found = oracle_tower(folder)(patches_of_transformers(folder, item), torch.tensor([item[1].grid]))
    return torch.cat([found.pooler_output, *getattr(found, "deepstack_features", [])], dim=1)


def encode(model: CausalLM, items: Sequence[Item]) -> list[Tensor]:
    assert model.tower is not None
    with torch.no_grad():
        return model.tower.encode(items)


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    assert expected.std() > 0.1, "features that say nothing would hide a mistake"
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_transformers(tiny_model: Callable[..., Path], kind: str) -> None:
    """Of each picture, alone, and all of them packed."""
    folder = tiny_model(kind, **SIZES)
    model = loaded(folder)
    items = items_of(folder, [picture(*shape, seed) for seed, shape in enumerate(SHAPES)], min_pixels=1024)
    assert len({item.grid for _, item in items}) >= 10
    together = encode(model, items)
    for item, beside in zip(items, together, strict=True):
        expected = features_of_transformers(folder, item)
        assert len(expected) == item[1].length
        assert difference(encode(model, [item])[0], expected) < 2e-5
        assert difference(beside, expected) < 2e-5


def test_features_tell_pictures_apart(tiny_model: Callable[..., Path]) -> None:
    """Another pixel, and the same picture on its side."""
    folder = tiny_model("qwen3_vl", **SIZES)
    one = picture(96, 64)
    other = one.copy()
    other[0, 0] ^= 255
    first, second, turned = encode(loaded(folder), items_of(folder, [one, other, one.transpose(1, 0, 2)], min_pixels=1))
    assert (first - second).abs().max() > 1e-3
    assert (first - turned).abs().max() > 1e-1
