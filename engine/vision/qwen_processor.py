"""The image processor of Qwen's models: a picture keeps its shape, and has as many tokens as its size needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..families.vision_spec import VisionSpec
from .processor import MOST_PIXELS, Fitted, Grid, Pixels, Processor, agree, only, resized, whole

MOST_STRETCHED = 200  # a side is at most so many times the other
_SIZE = "size"
_BOUNDS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # old names → those in `size`: both are areas


class QwenProcessor(Processor, frozen=True, tag="qwen"):
    """Sides become multiples of a token's, and the area one between two bounds."""

    patch: int  # pixels a side
    merge: int  # patches a side that are one token
    smallest: int  # pixels of a picture, at least
    largest: int
    resizes: bool = True

    @classmethod
    def read(cls, vision: VisionSpec, settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> QwenProcessor:
        only(overrides, (*_BOUNDS, _SIZE, "do_resize"))
        agree(settings, {"patch_size": vision.patch, "merge_size": vision.merge})
        unit = (vision.patch * vision.merge) ** 2
        defaults = {"min_pixels": 4 * unit, "max_pixels": 16_384 * unit}
        bounds = {
            key: whole(_flat(overrides, "--mm-processor-kwargs"), _flat(settings, "the image processor's settings"),
                       key, default, MOST_PIXELS)
            for key, default in defaults.items()
        }  # fmt: skip
        smallest, largest = bounds["min_pixels"], bounds["max_pixels"]
        if largest < max(smallest, unit):
            raise ConfigError(
                f"--mm-processor-kwargs: max_pixels is {largest}, at least min_pixels ({smallest}) and the "
                f"{unit} pixels of a token are needed"
            )
        resizes = overrides.get("do_resize", settings.get("do_resize", True))
        if not isinstance(resizes, bool):
            raise ConfigError(f"--mm-processor-kwargs: do_resize is {resizes!r:.60}, true or false belongs there")
        return cls(vision.image_token, vision.patch, vision.merge, smallest, largest, resizes)

    def fit(self, width: int, height: int) -> Fitted:
        unit = self.patch * self.merge
        if self.resizes:
            height, width = fitted_size(height, width, unit, self.smallest, self.largest)
        elif height % unit or width % unit:
            raise ValueError(
                f"a picture of {width} × {height} pixels, which is not resized here: its sides must be multiples of "
                f"{unit}"
            )
        elif width * height > self.largest:
            raise ValueError(f"a picture of {width} × {height} pixels: at most {self.largest} are taken, shrink it")
        grid = (1, height // self.patch, width // self.patch)
        return Fitted((1, height, width), grid, len(self.expansion(grid)))

    def pixels(self, rgb: Pixels) -> tuple[Pixels, Grid]:
        height, width, _ = rgb.shape
        (_, height, width), grid, _ = self.fit(width, height)
        return resized(rgb, height, width)[None], grid

    def expansion(self, grid: Grid) -> list[int]:
        frames, rows, columns = grid
        return [self.placeholder] * (frames * rows * columns // self.merge**2)

    @property
    def max_patches(self) -> int:
        return self.largest // self.patch**2

    @property
    def max_tokens(self) -> int:
        return self.max_patches // self.merge**2


def fitted_size(height: int, width: int, unit: int, smallest: int, largest: int) -> tuple[int, int]:
    """→ height and width, both multiples of `unit`, as much alike in shape as that allows, with an area between both
    bounds. transformers' smart_resize. Raises ValueError."""
    if max(height, width) > MOST_STRETCHED * min(height, width):
        raise ValueError(
            f"a picture of {width} × {height} pixels: one side may be at most {MOST_STRETCHED} times the other, crop it"
        )
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    if rows * columns > largest:
        shrink = math.sqrt(height * width / largest)
        rows = max(unit, math.floor(height / shrink / unit) * unit)
        columns = max(unit, math.floor(width / shrink / unit) * unit)
    elif rows * columns < smallest:
        grow = math.sqrt(smallest / (height * width))
        rows = math.ceil(height * grow / unit) * unit
        columns = math.ceil(width * grow / unit) * unit
    return rows, columns


def _flat(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """With the bounds under their old names. Raises ConfigError."""
    size = values.get(_SIZE)
    if size is None:
        size = {}
    if not isinstance(size, Mapping) or size.keys() - {*_BOUNDS, *_BOUNDS.values()}:
        raise ConfigError(
            f"{where}: size is {size!r:.80}, an object with shortest_edge and longest_edge (areas in pixels) belongs "
            "there"
        )
    return {key: values.get(key, size.get(key, size.get(new))) for key, new in _BOUNDS.items()}
