"""A picture's file as the pixels that a model's tower gets: the work of a decoding process, and of `LLM`."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from ...engine.link.media import MediaItem

if TYPE_CHECKING:
    from ...engine.vision.processor import Processor

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # no others are tried, whatever the library knows
MOST_PIXELS = 1 << 26  # of a picture as it comes: 192 MiB of colours
LOW = 512  # longest side of a picture with the detail "low"


def item_of(data: bytes, processor: Processor, detail: str = "auto") -> MediaItem:
    """The picture in a file, at the start of a prompt. Raises ValueError with what is wrong, in words that go on with
    "it"."""
    picture = colours(data, detail)
    pixels, grid = processor.pixels(picture)
    return processor.item(pixels, grid, picture.shape[:2], 0)


def unpacked(encoded: bytes) -> bytes:
    """The bytes of base64, whose padding may be missing. Raises ValueError."""
    encoded = encoded.translate(None, b" \t\r\n=")
    try:
        return base64.b64decode(encoded + b"=" * (-len(encoded) % 4))
    except binascii.Error:
        raise ValueError("it is no base64 after 'base64,'") from None


def colours(data: bytes, detail: str = "auto") -> NDArray[np.uint8]:
    """[height, width, 3] of a file, of an animated one the first frame, upright, on white where it is transparent.
    Raises ValueError as `item_of` does."""
    if not data:
        raise ValueError("it is empty: 0 bytes")
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            warnings.simplefilter("ignore")
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ValueError(
                    f"it has {width} x {height} pixels, and at most {MOST_PIXELS} are read: make it smaller"
                )
            if detail == "low":
                image.thumbnail((LOW, LOW))
            return as_colours(image)
    except UnidentifiedImageError:
        raise ValueError(f"its {len(data)} bytes are no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} picture") from None
    except (OSError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"its file is broken ({str(error)[:100]})") from None


def as_colours(image: Any) -> NDArray[np.uint8]:
    """[height, width, 3] of a picture of Pillow's."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(ground, image)
    if image.mode.startswith("I"):  # 16 bits of grey
        return np.repeat((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
    return np.array(image.convert("RGB"))
