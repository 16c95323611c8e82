"""Prompts with pictures for tiny models of Qwen's, and what transformers makes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from vserve.engine.describe.reading import read_folder
from vserve.engine.link.media import MediaItem
from vserve.engine.vision.processors import read_processor

from .tiny_models import QWEN_TOKENS, reference

Prompt = tuple[list[int], tuple[MediaItem, ...]]
PICTURE, START, END = (QWEN_TOKENS[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end"))


@lru_cache
def picture(folder: str, width: int, height: int, seed: int) -> MediaItem:
    """Noise, resized as little as the model allows."""
    vision = read_folder(Path(folder)).vision
    assert vision is not None
    processor = read_processor(Path(folder), vision, {"min_pixels": 1})
    rgb = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return processor.item(*processor.pixels(rgb), (height, width), 0)


def prompt_of(folder: str, *parts: int | tuple[int, int] | MediaItem, vocab: int = 290) -> Prompt:
    """Parts: so many tokens of text, below `vocab`; a picture of that width and height, or one that there is."""
    rng, ids = random.Random(repr([part if isinstance(part, int) else 0 for part in parts])), []
    media: list[MediaItem] = []
    for part in parts:
        if isinstance(part, int):
            ids += [rng.randrange(5, vocab) for _ in range(part)]
            continue
        item = part if isinstance(part, MediaItem) else picture(folder, *part, len(media))
        media.append(msgspec.structs.replace(item, start=len(ids) + 1))
        ids += [START, *[PICTURE] * item.length, END]
    return ids, tuple(media)


@lru_cache(maxsize=2)
def oracle(folder: str, device: str) -> Any:
    return reference(Path(folder), dtype=torch.float32).to(device).eval()


def patches(folder: str, item: MediaItem) -> torch.Tensor:
    """As Qwen2VLImageProcessor makes them: normalised, in the order of tokens, each frame twice."""
    vision = read_folder(Path(folder)).vision
    assert vision is not None
    pixels = torch.frombuffer(bytearray(item.pixels), dtype=torch.uint8).view(*item.size, 3)
    mean, std = (torch.tensor(values)[:, None, None] for values in (vision.mean, vision.std))
    image = (pixels[0].permute(2, 0, 1).float() / 255 - mean) / std
    (_, rows, columns), m, p = item.grid, vision.merge, vision.patch
    parts = image.reshape(1, 3, rows // m, m, p, columns // m, m, p).permute(0, 2, 5, 3, 6, 1, 4, 7)
    return parts.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1).reshape(rows * columns, 3 * 2 * p * p)


def log_probabilities(folder: str, ids: Sequence[int], media: Sequence[MediaItem], device: str = "cpu") -> torch.Tensor:
    """fp32 [tokens, vocab], transformers', behind each token; on the CPU."""
    more: dict[str, Any] = {}
    if media:
        types = torch.zeros(1, len(ids), dtype=torch.int32, device=device)
        for item in media:
            types[0, item.start : item.start + item.length] = 1
        more = {
            "pixel_values": torch.cat([patches(folder, item) for item in media]).to(device),
            "image_grid_thw": torch.tensor([item.grid for item in media], device=device),
            "mm_token_type_ids": types,
        }
    with torch.inference_mode():
        found: torch.Tensor = oracle(folder, device)(torch.tensor([list(ids)], device=device), **more).logits[0]
    return found.float().log_softmax(-1).cpu()
