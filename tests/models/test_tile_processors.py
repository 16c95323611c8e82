"""Pictures of models that do not take them as they are: rows with ends, squares and several of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.vision.processors import decode, encode
from vserve.engine.vision.tile_processor import canvas

from .test_processors import processor_of
from .test_towers import KINDS, SIZES, loaded, picture


def resize(rgb: NDArray[np.uint8], height: int, width: int, mode: str = "bicubic") -> NDArray[np.uint8]:
    """torchvision's, of bytes."""
    planes = torch.from_numpy(np.ascontiguousarray(rgb)).permute(2, 0, 1).contiguous()[None]
    found = functional.interpolate(planes, (height, width), mode=mode, align_corners=False, antialias=True)
    return found[0].permute(1, 2, 0).numpy()


def test_sizes_of_pixtral(tiny_model: Callable[..., Path]) -> None:
    """transformers' get_resize_output_image_size and the tokens of PixtralProcessor, and a picture of one row."""
    processor = processor_of(tiny_model("mistral3", **SIZES))  # patches of 14, 2 × 2 a token, at most 196 pixels long
    for width, height in np.random.default_rng(0).integers(1, 900, (200, 2)).tolist():
        ratio = max(height, width) / 196
        if ratio > 1:
            high, wide = (math.floor(side / ratio) for side in (height, width))
        else:
            high, wide = height, width
        rows, columns = ((max(side, 1) - 1) // 28 + 1 for side in (high, wide))
        size, grid, tokens = processor.fit(width, height)
        assert (size, grid) == ((1, rows * 28, columns * 28), (1, rows * 2, columns * 2))
        expected = ([10] * columns + [12]) * rows
        expected[-1] = 13
        assert processor.expansion(grid) == expected and tokens == len(expected) <= processor.max_tokens
        assert grid[1] * grid[2] <= processor.max_patches
    pixels, _ = processor.pixels(rgb := picture(300, 100))
    assert np.array_equal(pixels[0], resize(rgb, 84, 196))
    assert processor_of(tiny_model("mistral3", **SIZES), size={"longest_edge": 56}).fit(300, 100).size == (1, 28, 56)
    with pytest.raises(ConfigError, match="size is 5, an object with longest_edge"):
        processor_of(tiny_model("mistral3", **SIZES), size=5)


def test_separators_are_the_tokenizers(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for file in tiny_model("mistral3", **SIZES).iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).symlink_to(file)
    tokens = {"added_tokens_decoder": {"20": {"content": "[IMG_BREAK]"}, "21": {"content": "[IMG_END]"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    vision = read_folder(tmp_path).vision
    assert vision is not None and vision.separators == (20, 21)
    assert processor_of(tmp_path).expansion((1, 4, 2)) == [10, 20, 10, 21]


def test_squares_of_internvl(tiny_model: Callable[..., Path]) -> None:
    processor = processor_of(tiny_model("internvl", **SIZES))  # squares of 56
    pixels, grid = processor.pixels(rgb := picture(130, 60))
    assert grid == (3, 4, 4) and pixels.shape == (3, 56, 56, 3)
    whole = resize(rgb, 56, 112)
    assert np.array_equal(pixels[0], whole[:, :56]) and np.array_equal(pixels[1], whole[:, 56:])
    assert np.array_equal(pixels[2], resize(rgb, 56, 56))
    begin, *features, end = processor.expansion(grid)
    assert (begin, set(features), end, len(features)) == (151665, {299}, 151666, 12)
    assert len(processor.pixels(picture(56, 57))[0]) == 1  # which needs no small one of the whole
    alone = processor_of(tiny_model("internvl", **SIZES), crop_to_patches=False)
    assert alone.fit(900, 60).size == (1, 56, 56) and alone.max_patches == 16
    for values, message in (
        ({"max_patches": 0}, "max_patches is 0, a whole number from 1 to 128"),
        ({"min_patches": 13}, r"min_patches is 13, more than max_patches \(12\)"),
        ({"crop_to_patches": 1}, "crop_to_patches is 1, true or false"),
        ({"max_pixels": 5}, "'max_pixels' is no setting of this model's image processor"),
    ):
        with pytest.raises(ConfigError, match=message):
            processor_of(tiny_model("internvl", **SIZES), **values)


def test_the_canvas_is_most_like_the_picture() -> None:
    for width, height in np.random.default_rng(1).integers(1, 3000, (200, 2)).tolist():
        across, down = canvas(width, height, 448, 1, 12)
        assert across * down <= 12
        apart = [abs(width / height - a / d) for a in range(1, 13) for d in range(1, 13) if a * d <= 12]
        assert abs(width / height - across / down) == min(apart)
    # Of one shape, the larger one that the picture fills by more than half.
    assert canvas(100, 100, 448, 1, 12) == (1, 1) and canvas(700, 700, 448, 1, 12) == (2, 2)
    assert canvas(1000, 1000, 448, 1, 12) == (3, 3) and canvas(1, 5000, 448, 1, 12) == (1, 12)


@pytest.mark.parametrize(("width", "height"), [(100, 60), (60, 100), (57, 56), (20, 30)])
def test_the_middle_for_llava(tiny_model: Callable[..., Path], width: int, height: int) -> None:
    processor = processor_of(tiny_model("llava", **SIZES))  # a square of 56
    pixels, grid = processor.pixels(rgb := picture(width, height))
    short = min(width, height)
    high, wide = int(56 * height / short), int(56 * width / short)
    top, left = int((high - 56) / 2.0), int((wide - 56) / 2.0)
    assert grid == (1, 4, 4) and processor.expansion(grid) == [299] * 16
    assert np.array_equal(pixels[0], resize(rgb, high, wide)[top : top + 56, left : left + 56])


def test_the_square_for_gemma(tiny_model: Callable[..., Path]) -> None:
    """Stretched, by two lines; and ends of lines before and behind it are one token, as the tokenizer makes them of
    text."""
    folder = tiny_model("gemma3", **SIZES)
    processor = processor_of(folder)
    pixels, grid = processor.pixels(rgb := picture(200, 60))
    assert grid == (1, 8, 8) and np.array_equal(pixels[0], resize(rgb, 112, 112, "bilinear"))
    assert (processor.placeholder, processor.expansion(grid)) == (298, [298, *[299] * 16, 297])
    for before, behind, expected in (
        ([5], [6], ([5, 108], [108, 6])),
        ([5, 107], [107, 107, 6], ([5, 109], [109, 107, 6])),
        ([], [], ([108], [108])),
        ([136], [135], ([136, 108], [137])),  # the longest token has 31
    ):
        processor.space(before, behind)
        assert (before, behind) == expected


def test_settings_that_make_other_squares(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for file in tiny_model("gemma3", **SIZES).iterdir():
        (tmp_path / file.name).symlink_to(file)
    file = tmp_path / "preprocessor_config.json"
    for settings, message in (
        (
            {"size": {"height": 112, "width": 56}},
            r"size is \{'height': 112, 'width': 56\}, config\.json has pictures of 112",
        ),
        ({"do_pan_and_scan": True}, "pictures are not cut into several here"),
        ({"resample": 0}, "resample is 0, supported are 1, 2 and 3"),
    ):
        file.write_text(json.dumps(settings))
        with pytest.raises(ModelError, match=message):
            processor_of(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tower_has_samples(tiny_model: Callable[..., Path], kind: str) -> None:
    """Gray pictures by which memory is measured: of about as many patches as asked for, and of one token at least."""
    folder = tiny_model(kind, **SIZES)
    tower = loaded(folder).tower
    assert tower is not None
    for patches in (tower.spec.merge**2, 64, 500):
        item = tower.sample(patches)
        assert math.prod(item.grid) <= max(patches, tower.sample(1).grid[1] ** 2)
        pixels = torch.frombuffer(bytearray(item.pixels), dtype=torch.uint8).view(*item.size, 3)
        with torch.no_grad():
            (features,) = tower.encode([(pixels, item)])
        assert features.shape == (item.length, tower.feature_size)
    processor = processor_of(folder)
    assert decode(encode(processor)) == processor
