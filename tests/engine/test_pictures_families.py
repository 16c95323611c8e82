"""Families whose pictures are not Qwen's, in the real engine: transformers' tokens (fp32, CPU)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vserve.engine.describe.reading import read_folder
from vserve.engine.families.vision_spec import VisionSpec
from vserve.engine.link.media import MediaItem
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.vision.processor import Processor
from vserve.engine.vision.processors import read_processor

from ..tiny_models import reference
from .conftest import Engine

MARGIN = 1e-3  # of log-probabilities: nearer than that, either token is right
KINDS = ["mistral3", "internvl", "llava", "qwen2_vl"]
# Widths and heights of a prompt's pictures.
PROMPTS = [[(64, 64)], [(180, 60), (50, 130)], []]


def folder_of(tiny_model: Callable[..., Path], tmp_path: Path, kind: str) -> Path:
    """With a tokenizer that has the tokens around pictures within the tiny vocabulary."""
    for file in tiny_model(kind, max_position_embeddings=256).iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).symlink_to(file)
    tokens = {str(290 + index): {"content": text} for index, text in enumerate(("<img>", "</img>"))}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    return tmp_path


def parts_of(folder: Path) -> tuple[VisionSpec, Processor]:
    vision = read_folder(folder).vision
    assert vision is not None
    return vision, read_processor(folder, vision, {"min_pixels": 1} if vision.kind == "qwen2" else {})


def prompt_of(processor: Processor, sizes: Sequence[tuple[int, int]]) -> tuple[list[int], tuple[MediaItem, ...]]:
    random = np.random.default_rng(len(sizes))
    ids, media = random.integers(5, 280, 7).tolist(), []
    for width, height in sizes:
        rgb = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        item = processor.item(*processor.pixels(rgb), (height, width), len(ids))
        media.append(msgspec.structs.replace(item, start=len(ids)))
        ids += processor.expansion(item.grid) + random.integers(5, 280, 5).tolist()
    return ids, tuple(media)


def inputs(vision: VisionSpec, media: Sequence[MediaItem]) -> dict[str, Any]:
    """What transformers' model is given beside tokens."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (vision.mean, vision.std))
    pixels = [torch.frombuffer(bytearray(item.pixels), dtype=torch.uint8).view(*item.size, 3) for item in media]
    tiles = [(one.permute(0, 3, 1, 2) / 255 - mean) / std for one in pixels]
    if not media:
        return {}
    if vision.kind == "pixtral":
        sizes = [item.size[1:] for item in media]
        high, wide = (max(lengths) for lengths in zip(*sizes, strict=True))
        padded = [torch.nn.functional.pad(one, (0, wide - one.shape[3], 0, high - one.shape[2])) for one in tiles]
        return {"pixel_values": torch.cat(padded), "image_sizes": torch.tensor(sizes)}
    if vision.kind == "qwen2":
        m, p = vision.merge, vision.patch
        patches = [
            one.reshape(3, rows // m, m, p, columns // m, m, p).permute(1, 4, 2, 5, 0, 3, 6)
            .unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(rows * columns, -1)
            for one, (_, rows, columns) in ((tile[0], item.grid) for tile, item in zip(tiles, media, strict=True))
        ]  # fmt: skip
        return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor([item.grid for item in media])}
    return {"pixel_values": torch.cat(tiles)}


def types(vision: VisionSpec, ids: Sequence[int]) -> dict[str, Any]:
    if vision.mrope is None:
        return {}
    return {"mm_token_type_ids": torch.tensor([[int(token == vision.image_token) for token in ids]])}


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_with_pictures(tiny_model: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """All at once, in chunks that end within pictures."""
    folder = folder_of(tiny_model, tmp_path, kind)
    vision, processor = parts_of(folder)
    prompts = [prompt_of(processor, sizes) for sizes in PROMPTS]
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    wave = [(ids, sampling, {"media": media}) for ids, media in prompts]
    engine = Engine(str(folder))
    (answers,), stats = engine.run(
        wave, max_model_len=256, block_size=8, max_num_batched_tokens=40, max_num_seqs=3, enable_prefix_caching=False
    )
    assert stats.num_encoded_patches > 0
    model = reference(folder, dtype=torch.float32).eval()
    for (ids, media), answer in zip(prompts, answers, strict=True):
        assert answer.error is None, answer.error
        whole = [*ids, *answer.tokens]
        with torch.inference_mode():
            more = inputs(vision, media) | (types(vision, whole) if media else {})
            wanted = model(torch.tensor([whole]), **more).logits[0].log_softmax(-1)
        for row, token in zip(wanted[len(ids) - 1 : -1], answer.tokens, strict=True):
            assert row[token] > row.max() - MARGIN
        found = [*(answer.prompt_logprobs or []), *answer.logprobs]
        assert len(found) == len(whole) - 1
        for row, token, scored in zip(wanted[:-1], whole[1:], found, strict=True):
            assert scored.logprob == pytest.approx(row[token].item(), abs=MARGIN)
