"""Pictures on their way to a tower: sizes, pixels and keys, by transformers' rules, and what is no picture for it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from vserve.engine.describe.picture_files import read_preprocessor
from vserve.engine.describe.reading import read_folder, read_model_config
from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.options.config import EngineConfig
from vserve.engine.vision.processors import decode, encode, read_processor

from .test_towers import SIZES, picture


def processor_of(folder: Path, **overrides: Any) -> Any:
    vision = read_folder(folder).vision
    assert vision is not None
    return read_processor(folder, vision, overrides)


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """transformers' own, of a module that cannot be imported without its picture libraries."""
    h_bar, w_bar = round(height / factor) * factor, round(width / factor) * factor
    if h_bar * w_bar > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        return tuple(max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))  # type: ignore
    if h_bar * w_bar < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        return tuple(math.ceil(side * beta / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return h_bar, w_bar


def test_sizes_are_those_of_transformers(tiny_model: Callable[..., Path]) -> None:
    processor = processor_of(tiny_model("qwen3_vl", **SIZES), min_pixels=4096, max_pixels=1 << 20)
    random = np.random.default_rng(0)
    for width, height in random.integers(1, 4000, (300, 2)).tolist():
        if max(width, height) > 200 * min(width, height):
            continue
        size, grid, tokens = processor.fit(width, height)
        expected = smart_resize(height, width, 32, 4096, 1 << 20)
        assert size == (1, *expected) and grid == (1, expected[0] // 16, expected[1] // 16)
        assert tokens == expected[0] * expected[1] // 1024 == len(processor.expansion(grid)) <= processor.max_tokens
        assert grid[1] * grid[2] <= processor.max_patches


@pytest.mark.parametrize(("width", "height"), [(100, 64), (640, 480), (33, 900), (2000, 30), (64, 64)])
def test_pixels_are_those_of_torchvision(tiny_model: Callable[..., Path], width: int, height: int) -> None:
    """Whose resize of bytes is torch's, of a picture plane by plane or pixel by pixel alike."""
    processor = processor_of(tiny_model("qwen3_vl", **SIZES), max_pixels=1 << 17)
    rgb = picture(width, height)
    pixels, grid = processor.pixels(rgb)
    planes = torch.from_numpy(rgb).permute(2, 0, 1).contiguous()[None]
    expected = functional.interpolate(planes, pixels.shape[1:3], mode="bicubic", align_corners=False, antialias=True)
    assert np.array_equal(pixels[0], expected[0].permute(1, 2, 0).numpy())
    assert processor.fit(width, height)[:2] == (pixels.shape[:3], grid)


def test_keys_tell_items_apart(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen3_vl", **SIZES)
    processor, rgb = processor_of(folder), picture(64, 96)
    pixels, grid = processor.pixels(rgb)
    item = processor.item(pixels, grid, (96, 64), 5)
    assert (item.start, item.length, item.grid, item.size) == (5, grid[1] * grid[2] // 4, grid, pixels.shape[:3])
    assert item.pixels == pixels.tobytes() and len(item.key) == 32
    assert processor.item(pixels, grid, (96, 64), 9).key == item.key  # wherever it stands
    assert decode(encode(processor)).item(pixels, grid, (96, 64), 5) == item  # and whoever made it
    other = pixels.copy()
    other[0, 0, 0, 0] ^= 1
    turned = pixels.transpose(0, 2, 1, 3)
    others = [
        processor.item(other, grid, (96, 64), 5),
        processor.item(turned, (1, grid[2], grid[1]), (64, 96), 5),
        processor.item(pixels.reshape(turned.shape), (1, grid[2], grid[1]), (64, 96), 5),  # the same bytes
        processor_of(folder, max_pixels=1 << 20).item(pixels, grid, (96, 64), 5),
    ]
    assert len({one.key for one in [item, *others]}) == 5


@pytest.mark.parametrize(("width", "height"), [(201, 1), (1, 5000)])
def test_pictures_that_are_too_long(tiny_model: Callable[..., Path], width: int, height: int) -> None:
    processor = processor_of(tiny_model("qwen3_vl", **SIZES))
    with pytest.raises(ValueError, match=f"a picture of {width} × {height} pixels: one side may be at most 200 times"):
        processor.fit(width, height)
    with pytest.raises(ValueError, match="crop it"):
        processor.pixels(picture(width, height))


def test_pictures_that_are_not_resized(tiny_model: Callable[..., Path]) -> None:
    processor = processor_of(tiny_model("qwen3_vl", **SIZES), do_resize=False, max_pixels=64 * 64)
    assert processor.fit(64, 32) == ((1, 32, 64), (1, 2, 4), 2)
    with pytest.raises(ValueError, match="its sides must be multiples of 32"):
        processor.fit(64, 33)
    with pytest.raises(ValueError, match="at most 4096 are taken"):
        processor.fit(96, 64)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_pixel": 5}, "'max_pixel' is no setting of this model's image processor, which has min_pixels, max_pix"),
        ({"max_pixels": "large"}, "max_pixels is 'large', a whole number from 1 to"),
        ({"max_pixels": 0}, "max_pixels is 0, a whole number"),
        ({"min_pixels": True}, "min_pixels is True"),
        ({"max_pixels": 1023}, "max_pixels is 1023, at least min_pixels"),
        ({"size": 5}, "size is 5, an object with shortest_edge and longest_edge"),
        ({"size": {"height": 5}}, "an object with shortest_edge and longest_edge"),
        ({"do_resize": "no"}, "do_resize is 'no', true or false belongs there"),
    ],
)
def test_settings_that_are_refused(tiny_model: Callable[..., Path], overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processor_of(tiny_model("qwen3_vl", **SIZES), **overrides)


def test_settings_of_a_folder(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """As transformers 5 writes them, and as older ones do; options come before both."""
    model = tiny_model("qwen3_vl", **SIZES)
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert read_preprocessor(tmp_path) == {} and processor_of(tmp_path).largest == 16_384 * 1024
    old = {"min_pixels": 2048, "max_pixels": 8192, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    vision = read_folder(tmp_path).vision
    assert vision is not None and (vision.mean, vision.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (processor_of(tmp_path).smallest, processor_of(tmp_path).largest) == (2048, 8192)
    new = {"image_processor": {"size": {"shortest_edge": 1024, "longest_edge": 4096}}, "processor_class": "P"}
    (tmp_path / "processor_config.json").write_text(json.dumps(new))
    assert (processor_of(tmp_path).smallest, processor_of(tmp_path).largest) == (1024, 4096)
    assert processor_of(tmp_path, size={"longest_edge": 2048}).largest == 2048
    assert processor_of(tmp_path, max_pixels=3072).largest == 3072
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"image_mean": [1, 2]}}))
    with pytest.raises(ModelError, match=r"image_mean is \[1, 2\], three numbers belong there"):
        read_folder(tmp_path)


def test_pixels_of_another_patch_size(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for file in tiny_model("qwen3_vl", **SIZES).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14, "merge_size": 2}))
    with pytest.raises(ModelError, match=r"patch_size is 14, config\.json has 16"):
        processor_of(tmp_path)


def test_tokens_outside_the_vocabulary(tiny_model: Callable[..., Path]) -> None:
    """Are an error where pictures are wanted, and none of the text alone."""
    folder = tiny_model("qwen3_vl", **SIZES)
    changes = '{"image_token_id": 300}'
    with pytest.raises(ModelError, match="a token that stands for pictures is 300, the vocabulary has 300"):
        read_model_config(folder, EngineConfig(str(folder), hf_overrides=changes))
    alone = EngineConfig(str(folder), hf_overrides=changes, language_model_only=True)
    assert read_model_config(folder, alone).vision is None
