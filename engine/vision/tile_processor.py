"""Image processors that make squares of one size: LLaVA's one of a picture's middle, InternVL's several, and a small
picture of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from ..errors import ConfigError, ModelError
from ..families.vision_spec import VisionSpec
from .processor import Fitted, Grid, Pixels, Processor, interpolation, only, resized, whole

MOST_TILES = 128
MOST_STRETCHED = 200  # a side is at most so many times the other, where a picture's middle is taken


class CenterProcessor(Processor, frozen=True, tag="center"):
    """The shorter side is resized, the longer one cut."""

    side: int
    patch: int
    mode: str = "bicubic"

    @classmethod
    def read(cls, vision: VisionSpec, settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> CenterProcessor:
        only(overrides, ())
        for key in ("size", "crop_size"):
            _check_size(settings, key, vision.image_size)
        return cls(vision.image_token, vision.image_size, vision.patch, interpolation(settings))

    def fit(self, width: int, height: int) -> Fitted:
        if max(width, height) > MOST_STRETCHED * min(width, height):
            raise ValueError(
                f"a picture of {width} × {height} pixels: one side may be at most {MOST_STRETCHED} times the other, "
                "crop it"
            )
        patches = self.side // self.patch
        return Fitted((1, self.side, self.side), (1, patches, patches), patches**2)

    def pixels(self, rgb: Pixels) -> tuple[Pixels, Grid]:
        height, width, _ = rgb.shape
        grid, side, short = self.fit(width, height).grid, self.side, min(height, width)
        image = resized(rgb, side * height // short, side * width // short, self.mode)
        top, left = ((length - side) // 2 for length in image.shape[:2])
        return image[None, top : top + side, left : left + side], grid

    def expansion(self, grid: Grid) -> list[int]:
        return [self.placeholder] * self.max_tokens

    @property
    def max_patches(self) -> int:
        return self.max_tokens

    @property
    def max_tokens(self) -> int:
        return (self.side // self.patch) ** 2


class TileProcessor(Processor, frozen=True, tag="tiles"):
    """As many squares as the picture's shape asks for, between two tokens."""

    side: int
    patch: int
    merge: int
    fewest: int
    most: int  # squares, without that of the whole
    begin: int
    end: int
    mode: str = "bicubic"

    @classmethod
    def read(cls, vision: VisionSpec, settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> TileProcessor:
        only(overrides, ("min_patches", "max_patches", "crop_to_patches"))
        _check_size(settings, "size", vision.image_size)
        fewest, most = (
            whole(overrides, settings, key, default, MOST_TILES)
            for key, default in (("min_patches", 1), ("max_patches", 12))
        )
        cuts = overrides.get("crop_to_patches", True)  # whatever the folder says, as transformers' processor has it
        if not isinstance(cuts, bool):
            raise ConfigError(f"--mm-processor-kwargs: crop_to_patches is {cuts!r:.60}, true or false belongs there")
        if fewest > most:
            raise ConfigError(f"--mm-processor-kwargs: min_patches is {fewest}, more than max_patches ({most})")
        fewest, most = (fewest, most) if cuts else (1, 1)
        begin, end = vision.separators
        return cls(
            vision.image_token, vision.image_size, vision.patch, vision.merge, fewest, most, begin, end,
            interpolation(settings),
        )  # fmt: skip

    def fit(self, width: int, height: int) -> Fitted:
        across, down = canvas(width, height, self.side, self.fewest, self.most)
        tiles = across * down + (across * down > 1)
        patches = self.side // self.patch
        grid = tiles, patches, patches
        return Fitted((tiles, self.side, self.side), grid, len(self.expansion(grid)))

    def pixels(self, rgb: Pixels) -> tuple[Pixels, Grid]:
        height, width, _ = rgb.shape
        grid, side = self.fit(width, height).grid, self.side
        across, down = canvas(width, height, side, self.fewest, self.most)
        image = resized(rgb, down * side, across * side, self.mode)
        tiles = image.reshape(down, side, across, side, 3).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, resized(rgb, side, side, self.mode)[None]))
        return tiles, grid

    def expansion(self, grid: Grid) -> list[int]:
        tiles, rows, columns = grid
        return [self.begin, *[self.placeholder] * (tiles * rows * columns // self.merge**2), self.end]

    @property
    def max_patches(self) -> int:
        return (self.most + (self.most > 1)) * (self.side // self.patch) ** 2

    @property
    def max_tokens(self) -> int:
        return self.max_patches // self.merge**2 + 2


@cache
def _canvases(fewest: int, most: int) -> list[tuple[int, int]]:
    """(squares across, squares down), the smallest first."""
    sides = range(1, most + 1)
    found = [(across, down) for across in sides for down in sides if fewest <= across * down <= most]
    return sorted(found, key=lambda one: one[0] * one[1])


def canvas(width: int, height: int, side: int, fewest: int, most: int) -> tuple[int, int]:
    """→ squares across and down, of the shape that is most like the picture's; of several, the largest of which it
    fills more than half."""
    shape, best, least = width / height, (1, 1), float("inf")
    for across, down in _canvases(fewest, most):
        apart = abs(shape - across / down)
        if apart < least or (apart == least and 2 * width * height > side * side * across * down):
            best, least = (across, down), apart
    return best


def _check_size(settings: Mapping[str, Any], key: str, side: int) -> None:
    """Raises ModelError where the folder's processor makes squares of another size."""
    size = settings.get(key)
    sides = set(size.values()) if isinstance(size, Mapping) else {side if size is None else size}
    if sides != {side}:
        raise ModelError(
            f"the image processor's {key} is {size!r:.80}, config.json has pictures of {side} pixels: use another model"
        )
