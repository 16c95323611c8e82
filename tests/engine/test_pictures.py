"""Pictures in the real engine: transformers' tokens and log-probabilities whatever happens on the way (fp32, CPU)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vserve.engine.describe.reading import read_folder
from vserve.engine.link.media import MediaItem
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.vision.processors import read_processor

from ..tiny_models import reference
from .conftest import Engine

MARGIN = 1e-3  # of log-probabilities: nearer than that, either token is right
FAMILIES = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen2_5_vl"]
START, END = 297, 296  # tokens around a picture
Prompt = tuple[list[int], tuple[MediaItem, ...]]


@pytest.fixture(params=FAMILIES)
def engine_of_family(request, tiny_model) -> Engine:
    return engine_of(tiny_model, request.param)


def engine_of(tiny_model, family: str) -> Engine:
    return Engine(str(tiny_model(family, max_position_embeddings=256)))


def greedy(**options) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | options))


@lru_cache
def picture(folder: str, width: int, height: int, seed: int) -> MediaItem:
    vision = read_folder(Path(folder)).vision
    assert vision is not None
    processor = read_processor(Path(folder), vision, {"min_pixels": 1})
    rgb = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return processor.item(*processor.pixels(rgb), (height, width), 0)


def prompt_of(engine: Engine, *parts: int | tuple[int, int] | MediaItem) -> Prompt:
    """Parts: so many tokens of text; a picture of that width and height, or one that there is."""
    rng, ids, media = random.Random(repr(parts)), [], []
    for part in parts:
        if isinstance(part, int):
            ids += [rng.randrange(5, 290) for _ in range(part)]
            continue
        item = part if isinstance(part, MediaItem) else picture(engine.folder, *part, len(media))
        media.append(msgspec.structs.replace(item, start=len(ids) + 1))
        ids += [START, *[299] * item.length, END]
    return ids, tuple(media)


@lru_cache
def oracle(folder: str) -> Any:
    return reference(Path(folder), dtype=torch.float32).eval()


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


def expected(folder: str, ids: Sequence[int], media: Sequence[MediaItem]) -> torch.Tensor:
    """transformers' log-probabilities behind each token."""
    more: dict[str, Any] = {}
    if media:
        types = torch.zeros(1, len(ids), dtype=torch.int32)
        for item in media:
            types[0, item.start : item.start + item.length] = 1
        more = {
            "pixel_values": torch.cat([patches(folder, item) for item in media]),
            "image_grid_thw": torch.tensor([item.grid for item in media]),
            "mm_token_type_ids": types,
        }
    with torch.inference_mode():
        return oracle(folder)(torch.tensor([list(ids)]), **more).logits[0].log_softmax(-1)


def request(prompt: Prompt, **options) -> tuple[list[int], SamplingParams, dict[str, Any]]:
    salt = options.pop("salt", None)
    return prompt[0], greedy(**options), {"media": prompt[1], "cache_salt": salt}


def check(engine: Engine, prompt: Prompt, answer: Any) -> None:
    assert answer.error is None, answer.error
    ids, media = prompt
    whole = [*ids, *answer.tokens]
    wanted = expected(engine.folder, whole, media)
    for row, token in zip(wanted[len(ids) - 1 : -1], answer.tokens, strict=True):
        assert row[token] > row.max() - MARGIN
    found = [*(answer.prompt_logprobs or []), *answer.logprobs]
    first = len(whole) - 1 - len(found)
    for row, token, scored in zip(wanted[first:-1], whole[first + 1 :], found, strict=True):
        assert scored.logprob == pytest.approx(row[token].item(), abs=MARGIN)


def parts(engine: Engine) -> list[Prompt]:
    """No picture, one, two beside each other, one at the beginning and one at the end."""
    shapes = [(9,), (3, (64, 96), 4), (2, (96, 64), (128, 32), 5), ((64, 64), 70, (32, 160)), (5, (160, 96), 3)]
    return [prompt_of(engine, *shape) for shape in shapes]


def test_prompts_with_pictures_are_transformers(engine_of_family) -> None:
    """All at once, in chunks that end within pictures, overlapped with answers, and preempted."""
    engine = engine_of_family
    prompts = parts(engine)
    wave = [request(prompt, logprobs=0, prompt_logprobs=0) for prompt in prompts]
    options = {"max_model_len": 128, "block_size": 8, "enable_prefix_caching": False}
    (answers,), stats = engine.run(
        wave, **options, max_num_batched_tokens=66, max_num_seqs=3, num_gpu_blocks_override=22
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        check(engine, prompt, answer)
    assert stats.num_encoded_patches > 0
