"""The tables by which kernels find a step's tokens of each adapter, against a look at every token."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from vserve.engine.adapters.tables import NO_SLOT, Grouping
from vserve.kernels.lora.lora import BEHIND_PRESENT, ROWS_PRESENT

SLOTS = 5


@pytest.mark.parametrize("seed", range(6))
def test_tables_of_a_step(seed: int) -> None:
    """Decodes, prompts and padding; each size of tiles; a smaller step in the memory that a larger one has filled."""
    rng = random.Random(seed)
    grouping = Grouping(1024, SLOTS, torch.device("cpu"))
    for most in (1000, 600, 300, 40, 10, 1):
        lengths = [1] * rng.randint(0, most // 2)
        while sum(lengths) < most:
            lengths.append(min(rng.choice((1, 7, 128, 200)), most - sum(lengths)))
        slots = [rng.randint(NO_SLOT, SLOTS - 1) if seed else NO_SLOT for _ in lengths]
        padded = min(most + rng.choice((0, 3)), 1024)
        of_tokens = np.repeat(slots, lengths).tolist() + [NO_SLOT] * (padded - most)
        grouping.fill(np.array(slots), np.array(lengths), padded)
        tiles, found = grouping.tiles(padded), grouping.by_token(padded)

        assert found.slots.tolist() == of_tokens == grouping.token_slots(padded).tolist()
        adapted = [token for token, slot in enumerate(of_tokens) if slot != NO_SLOT]
        count, num_tiles = found.counts.tolist()
        order = tiles.order.tolist()
        assert count == len(adapted) and sorted(order[:count]) == adapted, "those of an adapter come first"
        assert sorted(order) == list(range(padded)), "those of none behind them, each once"
        assert all(order[found.places[token]] == token for token in adapted)

        full = tiles.starts < tiles.ends
        assert full[:num_tiles].all() and not full[num_tiles:].any(), "empty tiles come last"
        covered: list[int] = []
        for slot, start, end in zip(*(line[:num_tiles].tolist() for line in tiles[:3]), strict=True):
            assert end - start <= tiles.tiling.rows and {of_tokens[token] for token in order[start:end]} == {slot}
            covered += range(start, end)
        assert covered == list(range(count))

        for line, (number, *present) in enumerate(found.present.tolist()):
            here = {slot for slot in of_tokens[line * ROWS_PRESENT :][:ROWS_PRESENT] if slot != NO_SLOT}
            assert present[:number] == sorted(here)
            assert len(present[number:]) >= BEHIND_PRESENT and not set(present[number:]) & {NO_SLOT, *range(SLOTS)}


def test_nothing_is_left_of_a_step_that_was_cleared() -> None:
    """Graphs of another size find tokens of no adapter, whatever they read: within their own rows."""
    grouping = Grouping(600, SLOTS, torch.device("cpu"))
    grouping.fill(np.full(600, 3), np.ones(600, dtype=np.int64), 600)
    grouping.clear()
    for num_tokens in (1, 32, 256, 600):
        tiles, found = grouping.tiles(num_tokens), grouping.by_token(num_tokens)
        assert not any(line.any() for line in (*tiles[:4], *found))


def test_presence_is_told_where_it_is_asked_for() -> None:
    grouping = Grouping(300, SLOTS, torch.device("cpu"), presence=False)
    grouping.fill(np.arange(300) % SLOTS, np.ones(300, dtype=np.int64), 300)
    assert grouping.by_token(300).present.shape == (3, 0) and grouping.by_token(300).counts.tolist()[0] == 300
