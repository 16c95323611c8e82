"""Dense tables of tokens as the kernels' History, its pages in a random order, and back."""

from __future__ import annotations

import random

import torch

from vserve.kernels.attention.history import History

POISON = -99


def history_of(
    tokens: torch.Tensor, computed: list[int] | None = None, page: int = 16, given: list[int] | None = None,
    ring: int = 16,
) -> History:  # fmt: skip
    """tokens int32 [R, L]. Of row r the first computed[r] are in pages (by default all), the next ones in its ring;
    what is not there is POISON."""
    rng, (num_rows, limit) = random.Random(3), tokens.shape
    width = -(-limit // page)
    order = rng.sample(range(num_rows * width + 3), num_rows * width)
    # Wider than what is in use, as a view into something larger would be.
    table = torch.full((num_rows, width + 2), 10**9, dtype=torch.int32)
    table[:, :width] = torch.tensor(order).view(num_rows, width)
    pages = torch.full((num_rows * width + 3, page), POISON, dtype=torch.int32)
    recent = torch.full((num_rows, ring), POISON, dtype=torch.int32)
    for row, known in enumerate(tokens.tolist()):
        count = limit if computed is None else computed[row]
        for position, token in enumerate(known[: count + ring]):
            if position < count:
                pages[table[row, position // page], position % page] = token
            else:
                recent[row, position % ring] = token
    counts = torch.zeros(num_rows, 3, dtype=torch.int32)
    counts[:, 1] = torch.tensor(given or [0] * num_rows)
    device = tokens.device
    return History(pages.to(device), table.to(device)[:, :width], recent.to(device), counts.to(device)[:, 1], limit)


def paged(history: History, row: int, count: int) -> list[int]:
    """The first tokens of a row, of its pages alone."""
    position = torch.arange(count, device=history.pages.device)
    return history.computed(torch.full_like(position, row), position).tolist()


def ring(history: History, row: int, first: int, count: int) -> list[int]:
    """Of the row's ring, what it has for positions from `first` on."""
    return [int(history.recent[row, position % history.ring]) for position in range(first, first + count)]
