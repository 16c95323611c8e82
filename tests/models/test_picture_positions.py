"""Positions of prompts with pictures: transformers' for random ones, and any piece of them is what the whole has."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLTextRotaryEmbedding

from vserve.engine.link.media import MediaItem
from vserve.engine.vision.positions import axis_positions, pair_axes, rope_delta

MERGE = 2


def drawn(rng: random.Random) -> tuple[list[int], list[MediaItem], list[list[int]]]:
    """Kinds of its tokens (0 text, 1 picture, 2 frame of a video), its items, and grids of its videos."""
    kinds: list[int] = []
    media: list[MediaItem] = []
    videos = []

    def add(kind: int, grid: tuple[int, int, int]) -> None:
        length = grid[1] * grid[2] // MERGE**2
        media.append(MediaItem(b"", len(kinds), length, grid, (1, 1, 1), (1, 1), b"", kind == 2))
        kinds.extend([kind] * length)

    for _ in range(rng.randint(1, 6)):
        kinds.extend([0] * rng.randint(1, 12))
        grid = 1, MERGE * rng.randint(1, 7), MERGE * rng.randint(1, 7)
        if (kind := rng.randrange(3)) == 1:
            add(1, grid)
        elif kind == 2:
            frames = rng.randint(1, 4)
            videos.append([frames, *grid[1:]])
            for _ in range(frames):
                kinds.extend([0] * rng.randint(1, 4))
                add(2, grid)
    return [*kinds, *[0] * rng.randint(1, 5)], media, videos


@pytest.mark.parametrize("seed", range(3))
def test_positions_are_those_of_transformers(seed: int) -> None:
    """Of 300 prompts in all, and of a piece of each."""
    rng = random.Random(seed)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)))
    model.get_vision_position_ids = lambda *args, **more: Qwen3VLModel.get_vision_position_ids(model, *args, **more)
    num_pictures = 0
    for _ in range(100):
        kinds, media, videos = drawn(rng)
        pictures = [list(item.grid) for item in media if not item.is_video]
        num_pictures += len(media)
        expected, delta = Qwen3VLModel.get_rope_index(
            model, torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds]),
            torch.tensor(pictures) if pictures else None, torch.tensor(videos) if videos else None,
        )  # fmt: skip
        found = axis_positions(media, MERGE, 0, len(kinds))
        assert np.array_equal(found, expected[:, 0].numpy())
        assert rope_delta(media, MERGE) == int(delta)
        assert found.max() < len(kinds), "tables are as long as contexts"
        start, end = sorted(rng.sample(range(len(kinds) + 1), 2))
        assert np.array_equal(axis_positions(media, MERGE, start, end), found[:, start:end])
    assert num_pictures > 100


@pytest.mark.parametrize(("sections", "pairs"), [((24, 20, 20), 64), ((11, 11, 10), 32), ((4, 2, 2), 8)])
def test_pairs_that_take_turns_are_those_of_transformers(sections: tuple[int, int, int], pairs: int) -> None:
    of_axes = torch.arange(3.0).view(3, 1, 1, 1).repeat(1, 1, 1, 2 * pairs)
    rotary = SimpleNamespace(mrope_section=list(sections))
    expected = Qwen3VLTextRotaryEmbedding.recomposition_frequencies(rotary, of_axes)
    assert pair_axes(sections, True, pairs) == expected.flatten().tolist()[:pairs]
    assert pair_axes(sections, False, pairs) == [0] * sections[0] + [1] * sections[1] + [2] * sections[2]


def test_a_prompt_without_pictures_has_plain_positions() -> None:
    assert np.array_equal(axis_positions([], MERGE, 3, 7), np.tile(np.arange(3, 7), (3, 1)))
    assert rope_delta([], MERGE) == 0
