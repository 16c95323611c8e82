"""The image processor of Mistral 3 and Pixtral: a picture keeps its shape, and its longest side has a bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..families.vision_spec import VisionSpec
from .processor import Fitted, Grid, Pixels, Processor, interpolation, only, resized, whole

_EDGE = "longest_edge"
MOST_EDGE = 1 << 14  # pixels


class PixtralProcessor(Processor, frozen=True, tag="pixtral"):
    """Rows of a picture end with a token of their own, the last one with another."""

    patch: int  # pixels a side
    merge: int  # patches a side that are one token
    longest: int  # pixels of the longest side, before it is rounded up to whole tokens
    row_end: int
    end: int
    mode: str = "bicubic"

    @classmethod
    def read(cls, vision: VisionSpec, settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> PixtralProcessor:
        only(overrides, ("size",))
        sizes = []
        for values, where in ((overrides, "--mm-processor-kwargs"), (settings, "the image processor's settings")):
            size = values.get("size") or {}
            if not isinstance(size, Mapping) or size.keys() - {_EDGE}:
                raise ConfigError(f"{where}: size is {size!r:.80}, an object with {_EDGE} (pixels) belongs there")
            sizes.append(size)
        longest = whole(sizes[0], sizes[1], _EDGE, vision.image_size, MOST_EDGE)
        row_end, end = vision.separators
        return cls(vision.image_token, vision.patch, vision.merge, longest, row_end, end, interpolation(settings))

    def fit(self, width: int, height: int) -> Fitted:
        unit = self.patch * self.merge
        ratio = max(height, width) / self.longest
        if ratio > 1:
            height, width = (max(1, int(side / ratio)) for side in (height, width))
        rows, columns = (-(-side // unit) for side in (height, width))
        grid = 1, rows * self.merge, columns * self.merge
        return Fitted((1, rows * unit, columns * unit), grid, rows * (columns + 1))

    def pixels(self, rgb: Pixels) -> tuple[Pixels, Grid]:
        height, width, _ = rgb.shape
        (_, height, width), grid, _ = self.fit(width, height)
        return resized(rgb, height, width, self.mode)[None], grid

    def expansion(self, grid: Grid) -> list[int]:
        _, rows, columns = grid
        row = [self.placeholder] * (columns // self.merge) + [self.row_end]
        found = row * (rows // self.merge)
        found[-1] = self.end
        return found

    @property
    def max_patches(self) -> int:
        return (self._most_tokens * self.merge) ** 2

    @property
    def max_tokens(self) -> int:
        return self._most_tokens * (self._most_tokens + 1)

    @property
    def _most_tokens(self) -> int:
        """A side."""
        return -(-self.longest // (self.patch * self.merge))
