"""From a decoded picture to the pixels, the tokens and the key of its item. Needs no device and no kernels."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, ModelError
from ..families.vision_spec import VisionSpec
from ..link.media import MediaItem

Pixels = NDArray[np.uint8]
Grid = tuple[int, int, int]
_RESAMPLE = {1: "bicubic", 2: "bilinear", 3: "bicubic"}  # by Pillow's numbers
MOST_PIXELS = 1 << 28  # that settings may ask for


class Fitted(NamedTuple):
    """What a picture will be once it is resized."""

    size: tuple[int, int, int]  # frames or tiles, height, width
    grid: Grid  # the same in patches
    tokens: int  # that stand for it in a prompt, separators included


class Processor(msgspec.Struct, frozen=True):
    """Numbers alone: it travels as JSON, and its numbers are part of every item's key."""

    placeholder: int  # the one token that a rendered prompt has for a picture

    @classmethod
    def read(cls, vision: VisionSpec, settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> Processor:
        """settings: of the model's folder. overrides: --mm-processor-kwargs, which count before them. Raises
        ConfigError for one that is not known, or not of its kind."""
        raise NotImplementedError

    def fit(self, width: int, height: int) -> Fitted:
        """Of a picture of so many pixels. Raises ValueError, in words for who sent it."""
        raise NotImplementedError

    def pixels(self, rgb: Pixels) -> tuple[Pixels, Grid]:
        """rgb uint8 [H, W, 3] → uint8 [frames, h, w, 3] as the tower gets them, and their grid. Raises ValueError."""
        raise NotImplementedError

    def expansion(self, grid: Grid) -> list[int]:
        """The tokens that take the place of one placeholder."""
        raise NotImplementedError

    @property
    def max_patches(self) -> int:
        """Of the largest picture."""
        raise NotImplementedError

    @property
    def max_tokens(self) -> int:
        """Of the largest picture."""
        raise NotImplementedError

    def item(
        self, pixels: Pixels, grid: Grid, original: tuple[int, int], start: int, is_video: bool = False
    ) -> MediaItem:
        """pixels, grid: as `pixels` returned them. original: height and width as it came. start: of its first token."""
        frames, height, width, _ = pixels.shape
        raw = np.ascontiguousarray(pixels).tobytes()
        key = blake2b(digest_size=32)
        for part in (msgspec.json.encode(self), f"{pixels.shape}{grid}{original}{is_video}".encode()):
            key.update(len(part).to_bytes(8, "little") + part)
        key.update(raw)
        return MediaItem(
            key.digest(), start, len(self.expansion(grid)), grid, (frames, height, width), original, raw, is_video
        )


def resized(rgb: Pixels, height: int, width: int, mode: str = "bicubic") -> Pixels:
    """uint8 [H, W, 3] → [height, width, 3], smoothed where it shrinks: what transformers' processors get of
    torchvision, which for a picture in memory row by row is torch's own resize of bytes."""
    if rgb.shape[:2] == (height, width):
        return rgb
    import torch  # the server's own process, which resizes nothing, does without

    image = torch.from_numpy(np.ascontiguousarray(rgb)).permute(2, 0, 1)[None]
    found = torch.nn.functional.interpolate(image, (height, width), mode=mode, align_corners=False, antialias=True)
    result: Pixels = found[0].permute(1, 2, 0).contiguous().numpy()
    return result


def whole(overrides: Mapping[str, Any], settings: Mapping[str, Any], key: str, default: int, most: int) -> int:
    """A number from 1 to `most`, of the first of both that has it. Raises ConfigError."""
    for values, where in ((overrides, "--mm-processor-kwargs"), (settings, "the image processor's settings")):
        value = values.get(key)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"{where}: {key} is {value!r:.60}, a whole number from 1 to {most} belongs there")
        return value
    return default


def only(overrides: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises ConfigError for settings of other processors."""
    if unknown := sorted(overrides.keys() - set(known)):
        raise ConfigError(
            f"--mm-processor-kwargs: {unknown[0]!r:.60} is no setting of this model's image processor, which has "
            f"{', '.join(known)}"
        )


def interpolation(settings: Mapping[str, Any]) -> str:
    """torch's name of what the folder's processor resizes by; Lanczos, which torch has not, is bicubic, as transformers
    has it there. Raises ModelError."""
    found = settings.get("resample", 3)
    if found not in _RESAMPLE:
        raise ModelError(
            f"the image processor's resample is {found!r:.60}, supported are 1, 2 and 3: use another model"
        )
    return _RESAMPLE[found]


def agree(settings: Mapping[str, Any], described: Mapping[str, int]) -> None:
    """Raises ModelError where the folder's processor makes other pictures than config.json's tower takes."""
    for key, value in described.items():
        if settings.get(key, value) != value:
            raise ModelError(
                f"the image processor's {key} is {settings[key]!r:.60}, config.json has {value}: the files are not of "
                "one model, download them again"
            )
