"""How a producer and two consumers share stages: the kernel's own source, run in Python by schedules that hold somebody
back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vserve.kernels.linear import linear_gluon

SOURCE = Path(linear_gluon.__file__).read_text()
# The consumer's wait before it arrives where a summand lies, its own or the other's.
WAIT = """
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)"""
A, B, PRODUCER, COPY = "_consume0", "_consume1", "_produce", "copy"


@pytest.fixture(scope="module")
def model(load_module: Any) -> Any:
    return load_module(Path(__file__).with_name("gluon_model.py"))


class Ranked:
    """Who stands first goes on until it cannot."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, able: Sequence[str]) -> int:
        return min(range(len(able)), key=lambda i: self.names.index(able[i]))


class Shuffled:
    """Anybody, but those held back one time in thirty."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.slow = self.random.sample([A, B, PRODUCER, COPY], 2)

    def __call__(self, able: Sequence[str]) -> int:
        quick = [i for i, name in enumerate(able) if name not in self.slow]
        return self.random.choice(quick if quick and self.random.random() < 0.97 else range(len(able)))


ORDERS = [Ranked(*names) for names in itertools.permutations((A, B, PRODUCER, COPY))]


def check(
    model: Any, source: str, schedule: Any, m: int = 8, n: int = 8, k: int = 32, *, consumers: int = 2,
    stages: int = 3, gated: bool = False, add: bool = True, hold_b: int = 0, slots: Sequence[int] = (),
) -> None:  # fmt: skip
    """By default one tile of eight steps: of 128 x 256 by 512, were the tiles not so small here. slots: of the tokens,
    whose adapters have the rank 1 or, where there are many steps, 2."""
    kernel = model.interpret(source, schedule)
    kernel.update(ROWS=4, BLOCK_N=8, HALF_N=4, BLOCK_K=4, ROWS_PRESENT=8)
    random_numbers = np.random.default_rng(0)
    x, weight = random_numbers.standard_normal((m, k)), random_numbers.standard_normal((n, k))
    width = n // 2 if gated else n
    out = random_numbers.standard_normal((m, width)) if add else np.full((m, width), np.nan)
    product = x @ weight.T
    low: tuple[Any, ...] = (None,) * 6
    numbers, rank = (0,) * 6, 0
    if slots:
        *low, delta, numbers, rank = adapters(model, random_numbers, slots, n, 2 if k > 8 else 1)
        product = product + delta
    if gated:
        gate, up = product[:, :width], product[:, width:]
        product = gate / (1 + np.exp(-gate)) * up
    expected = product + out if add else product
    columns = kernel["HALF_N"] if gated else kernel["BLOCK_N"]
    tiles = -(-m // (consumers * kernel["ROWS"])), -(-width // columns), -(-k // kernel["BLOCK_K"])
    operands = model.Matrix(x), model.Matrix(weight), model.Matrix(out)
    kernel["linear_kernel"](
        *operands, *low, *tiles, 2, n // 2, *numbers, gated, add, rank, bool(slots), consumers, stages, hold_b
    )
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-9)


def adapters(
    model: Any, random_numbers: np.random.Generator, slots: Sequence[int], n: int, rank: int, splits: int = 3
) -> tuple[Any, ...]:
    """Of tokens of these slots, -1 for none: the kernel's operands, what they add, its numbers, the rank. Slot 1 is not
    used here, and between slots lies another matrix. Of an odd number of tokens, gate and up are one product, with one
    h."""
    m, count, apart = len(slots), 4, n + 3
    memory = np.concatenate([random_numbers.standard_normal((count * apart - 3, rank)), np.full((9, rank), np.nan)])
    b = np.stack([memory[slot * apart : slot * apart + n] for slot in range(count)])
    order = [token for slot in range(count) for token in range(m) if slots[token] == slot]
    places = np.zeros(m, dtype=int)
    places[order] = np.arange(len(order))
    columns = rank if m % 2 else 2 * rank
    h = random_numbers.standard_normal((splits, m, columns))
    h[:, len(order) :] = np.nan  # nobody has computed it
    delta = np.zeros((m, n))
    for token, slot in enumerate(slots):
        if slot == 1:
            h[:, places[token]] = np.nan
        if slot in (-1, 1):
            continue
        low = h[:, places[token]].sum(0)
        gate, up = low[:rank], low[-rank:]
        delta[token] = np.concatenate([b[slot, : n // 2] @ gate, b[slot, n // 2 :] @ up])
    present = []
    for at in range(0, m, 8):
        there = sorted({slot for slot in slots[at : at + 8] if slot >= 0})
        present.append([len(there), *there, *[-2] * (count - len(there) + 4)])
    tables = (np.array(line) for line in (slots, places, [1, 0, 1, 1], present))
    pointers = [model.Pointer(values) for values in (h, *tables)]
    boxes = model.Matrix(memory[: (count - 1) * apart + n])
    return boxes, *pointers, delta, (m, splits, apart, (count - 1) * apart + n, 1 + count + 4, columns), rank


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("slots", [[0], [2, -1, 0, 2, 1, 0, -1, 3, 3, 0], [-1] * 5, [1, 2, 2, 0, 2] * 3], ids=str)
def test_adapters(model: Any, slots: list[int], consumers: int) -> None:
    """Slots in stages of two, or of one; who has none, or whose slot is not used here, gets the product alone."""
    for schedule in (*ORDERS[::5], *map(Shuffled, range(4))):
        for k in (6, 16):
            check(model, SOURCE, schedule, len(slots), 16, k, consumers=consumers, gated=True, add=False, slots=slots)


@pytest.mark.parametrize("schedule", ORDERS, ids=lambda order: "-".join(order.names))
def test_whoever_is_held_back(model: Any, schedule: Any) -> None:
    """Each of two tiles adds to the residual after eight steps and three."""
    check(model, SOURCE, schedule, n=16)
    check(model, SOURCE, schedule, m=12, k=10)


@pytest.mark.parametrize(
    "options", [{"stages": 4}, {"consumers": 1}, {"add": False}, {"add": False, "gated": True}, {"hold_b": 1}], ids=str
)
def test_other_variants(model: Any, options: dict[str, Any]) -> None:
    for schedule in ORDERS[::5]:
        check(model, SOURCE, schedule, m=13, n=16, k=16, **options)


def test_at_random(model: Any) -> None:
    for seed in range(30):
        check(model, SOURCE, Shuffled(seed), m=12, n=16, k=10)


def test_without_the_wait_a_weight_is_overwritten(model: Any) -> None:
    """A, arriving twice where B has not arrived at all, would let the second summand overwrite what B multiplies."""
    assert SOURCE.count(WAIT) == 1
    early = SOURCE.replace(WAIT, "\n" + WAIT.splitlines()[-1])
    with pytest.raises(model.Overwritten, match=B):
        check(model, early, Ranked(COPY, PRODUCER, A, B))
    with pytest.raises(AssertionError, match="Not equal"):  # as the test on a GPU holds B back
        check(model, early, Ranked(COPY, PRODUCER, A, B), hold_b=1)
    found = 0
    for seed in range(30):
        try:
            check(model, early, Shuffled(seed), m=12, n=16, k=10)
        except model.Overwritten:
            found += 1
    assert found, "no random schedule meets it"


def test_the_model_sees_other_faults(model: Any) -> None:
    """A stage that is given back before its product has ended, and a wait that nobody ends."""
    for old, new, error in (
        ("acc = warpgroup_mma_wait(1, deps=[acc])", "acc = warpgroup_mma_wait(2, deps=[acc])", model.Overwritten),
        ("mbarrier.init(empty.index(i), count=CONSUMERS)", "mbarrier.init(empty.index(i), count=3)", model.Deadlock),
    ):
        assert SOURCE.count(old) == 1
        with pytest.raises(error):
            check(model, SOURCE.replace(old, new), Ranked(COPY, PRODUCER, A, B))
