"""Pictures as they stand in a prompt. Plain data: it travels in a request's message and in a step's plan."""

from __future__ import annotations

import msgspec


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """One picture, or one span of a video, in a prompt.

    Its features go, in order, to those tokens of its span whose id is the family's image token (video token where
    is_video): see VisionSpec.
    """

    key: bytes  # 32, a hash of the pixels, their sizes, the processor's name and its settings
    start: int  # index in the prompt of the first of the tokens that stand for it
    length: int  # how many: those of its features, and the separators between them
    grid: tuple[int, int, int]  # frames or tiles, rows and columns of patches, before merging
    size: tuple[int, int, int]  # frames or tiles, height and width, of `pixels`
    original: tuple[int, int]  # height and width as it came
    pixels: bytes  # uint8 [frames, height, width, 3], resized and not normalised
    is_video: bool = False
