"""The sampler against filters written with sorted lists, and Gumbel-max over the whole vocabulary in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from vserve.kernels.sampling import noise, sampling

INF = float("inf")


@dataclass
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        return f"T{self.temperature}-k{self.top_k}-p{self.top_p}-m{self.min_p}"


@dataclass
class Sampler:
    """sampler(logits [S, V], settings of all rows or of each, seeds, positions) → tokens, by one of the paths."""

    path: str
    device: str
    max_block: int | None = None

    def __call__(
        self,
        logits: torch.Tensor,
        settings: Settings | list[Settings],
        seeds: list[int],
        positions: list[int],
        **options,
    ) -> list[int]:
        rows = settings if isinstance(settings, list) else [settings] * len(logits)
        if self.max_block:
            options["max_block"] = self.max_block
        result = getattr(sampling, self.path)(
            logits.to(self.device),
            torch.tensor([row.temperature for row in rows], device=self.device),
            torch.tensor([row.top_k for row in rows], dtype=torch.int32, device=self.device),
            torch.tensor([row.top_p for row in rows], device=self.device),
            torch.tensor([row.min_p for row in rows], device=self.device),
            torch.tensor(seeds, dtype=torch.int64, device=self.device),
            torch.tensor(positions, dtype=torch.int64, device=self.device),
            **options,
        )
        assert result.dtype == torch.int32 and result.shape == (len(logits),)
        return result.tolist()

    @property
    def max_draws(self) -> int:
        """How many rows are cheap: in the interpreter one takes tens of milliseconds."""
        return 4 if self.path == "sample_triton" and self.device == "cpu" else 40


@pytest.fixture(params=["torch", "triton", "public"])
def sampler(request: pytest.FixtureRequest, device: str) -> Sampler:
    if request.param == "torch":
        return Sampler("sample_torch", "cpu")
    if request.param == "triton":
        return Sampler("sample_triton", device, max_block=32)  # tiles so small that many are needed
    return Sampler("sample", device)


# ---- the oracle -----------------------------------------------------------------------------------------------------


def survivors(logits: list[float], s: Settings) -> tuple[list[int], list[float]]:
    """Tokens that the filters keep, in vocabulary order, and their probabilities."""
    top = max(logits)
    weights = [math.exp((x - top) / s.temperature) for x in logits]
    kept = [i for i, weight in enumerate(weights) if logits[i] > -INF and weight >= s.min_p]
    if 0 < s.top_k < len(logits) and s.top_k < len(kept):
        limit = sorted((logits[i] for i in kept), reverse=True)[s.top_k - 1]
        kept = [i for i in kept if logits[i] >= limit]
    if s.top_p < 1:
        need, mass = s.top_p * math.fsum(weights[i] for i in kept), 0.0
        for i in sorted(kept, key=lambda i: -logits[i]):
            mass += weights[i]
            limit = logits[i]
            if mass >= need:
                break
        kept = [i for i in kept if logits[i] >= limit]
    total = math.fsum(weights[i] for i in kept)
    return kept, [weights[i] / total for i in kept]


def noise_of(seeds: list[int], positions: list[int], size: int) -> np.ndarray:
    """E of the tokens 0 … size - 1 of each row, fp64 [S, size]: what test_noise.py tests."""
    seed, position = np.array(seeds), np.array(positions)
    least, leader = noise.block_noise(seed, position, -(-size // 32))
    least, leader = (x.repeat(32, axis=1)[:, :size].ravel() for x in (least, leader))
    tokens = np.tile(np.arange(size), len(seed))
    variates = noise.token_noise(seed.repeat(size), position.repeat(size), tokens, least, leader)
    return variates.reshape(-1, size).astype(np.float64)


@functools.cache
def many_rows(size: int) -> np.ndarray:
    """The noise of seed 12 at the first positions: enough for every token that may win to win somewhere."""
    return noise_of([12] * 4000, list(range(4000)), size)


def race(kept: list[int], weights: np.ndarray, variates: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row the token of kept that wins, its score, and by what part it beats the second.

    weights [V] of the tokens; variates [S, V]: their E.
    """
    scores = weights[kept] / variates[:, kept]
    order = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    best = np.take_along_axis(scores, order, axis=1)
    return np.array(kept)[order[:, 0]], best[:, 0], 1 - best[:, -1] / best[:, 0] * (best.shape[1] > 1)


def check(sampler: Sampler, logits: list[float], s: Settings) -> None:
    """Draws where a survivor too many or too few would win: the lightest survivors and the heaviest dropped tokens."""
    kept, _ = survivors(logits, s)
    exact, variates = np.array(logits), many_rows(len(logits))
    with np.errstate(invalid="ignore"):
        weights = np.exp((exact - exact.max()) / s.temperature)
    expected, best, margin = race(kept, weights, variates)
    positions = [0]
    dropped = [i for i in np.argsort(-exact, kind="stable").tolist() if i not in kept and weights[i] > 0]
    for token in dropped[:3]:
        positions += np.flatnonzero(weights[token] / variates[:, token] > best)[:1].tolist()
    for token in sorted(kept, key=lambda i: logits[i]):
        positions += np.flatnonzero(expected == token)[:1].tolist()
    positions = positions[: sampler.max_draws]
    tokens = sampler(torch.tensor([logits] * len(positions)), s, [12] * len(positions), positions)
    for token, position in zip(tokens, positions, strict=True):
        assert token in kept
        assert token == expected[position] or margin[position] < 1e-5, (position, margin[position])


def random_logits(rng: torch.Generator, size: int, scale: float = 2.0) -> list[float]:
    return (torch.randn(size, generator=rng) * scale).tolist()


# ---- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("all_greedy", [True, False])
def test_greedy_takes_the_first_maximum(sampler: Sampler, all_greedy: bool, rng: torch.Generator) -> None:
    logits = torch.randn(6, 200, generator=rng)
    expected = logits.argmax(dim=-1).tolist()
    logits[1, [40, 41, 170]], expected[1] = 9.0, 40
    logits[2], expected[2] = 0.0, 0
    logits[3], expected[3] = -INF, 0
    logits[4, 199], expected[4] = 50.0, 199
    logits[5], logits[5, 77], expected[5] = -INF, -3e38, 77
    settings = Settings(temperature=0, top_k=3, top_p=0.5)
    assert sampler(logits, settings, [1] * 6, [0] * 6, all_greedy=all_greedy) == expected


def test_out_is_used(device: str, rng: torch.Generator) -> None:
    for path in ("torch", "triton"):
        where = "cpu" if path == "torch" else device
        logits = torch.randn(3, 50, generator=rng).to(where)
        one, zero = torch.ones(3, device=where), torch.zeros(3, dtype=torch.int64, device=where)
        for greedy in (True, False):
            out = torch.full((3,), -5, dtype=torch.int32, device=where)
            arguments = (logits, one * (not greedy), zero.int(), one, one * 0, zero, zero)
            result = getattr(sampling, f"sample_{path}")(*arguments, out=out, all_greedy=greedy)
            assert result.data_ptr() == out.data_ptr() and (out >= 0).all()


def test_no_rows(sampler: Sampler) -> None:
    assert sampler(torch.empty(0, 50), [], [], []) == []


# ---- filters and the draw -------------------------------------------------------------------------------------------

FILTERS = [
    Settings(),
    Settings(temperature=0.3),
    Settings(top_k=1),
    Settings(top_k=7),
    Settings(top_k=127),
    Settings(top_k=128),
    Settings(top_k=500),
    Settings(top_p=0.1),
    Settings(top_p=0.9, temperature=0.7),
    Settings(top_p=0.999),
    Settings(min_p=0.2),
    Settings(temperature=1.5, top_k=20, top_p=0.8),
    Settings(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    Settings(top_p=0.5, min_p=0.3),
    Settings(temperature=1e-4, top_p=0.9),
]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_filters(sampler: Sampler, settings: Settings, rng: torch.Generator) -> None:
    check(sampler, random_logits(rng, 128), settings)


@pytest.mark.parametrize("settings", [Settings(top_k=3), Settings(top_k=99), Settings(top_k=5, top_p=0.5)], ids=str)
@pytest.mark.parametrize("kind", ["all equal", "boundary", "zeros", "two levels"])
def test_ties_are_kept(sampler: Sampler, settings: Settings, kind: str, rng: torch.Generator) -> None:
    logits = random_logits(rng, 100, scale=0.5)
    if kind == "all equal":
        logits = [1.25] * 100
    elif kind == "boundary":
        for index in (3, 40, 41, 70, 99):
            logits[index] = 2.0
        logits[50] = 3.0
    elif kind == "zeros":  # the two zeros are one logit
        logits = [-0.0 if i % 3 else 0.0 for i in range(30)] + [-5.0] * 70
    else:
        logits = [float(i % 2) for i in range(100)]
    check(sampler, logits, settings)


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(top_k=10), Settings(top_p=0.9), Settings(min_p=0.01)], ids=str
)
@pytest.mark.parametrize("num_allowed", [1, 4, 30])
def test_masked_tokens_are_never_drawn(
    sampler: Sampler, settings: Settings, num_allowed: int, rng: torch.Generator
) -> None:
    logits = random_logits(rng, 96)
    allowed = torch.randperm(96, generator=rng)[:num_allowed].tolist()
    check(sampler, [x if i in allowed else -INF for i, x in enumerate(logits)], settings)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("settings", [Settings(top_k=3), Settings(top_p=0.5), Settings(min_p=0.5)], ids=str)
def test_logits_of_any_magnitude(sampler: Sampler, scale: float, settings: Settings, rng: torch.Generator) -> None:
    check(sampler, random_logits(rng, 70, scale), settings)
    check(sampler, [scale] * 60 + [-scale] * 10, settings)


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-6])
def test_almost_zero_temperature_is_greedy(sampler: Sampler, temperature: float) -> None:
    logits = torch.linspace(0, 5, 90).roll(17).repeat(2, 1)
    settings = [Settings(temperature=temperature), Settings(temperature=temperature, top_p=0.9, top_k=5)]
    assert sampler(logits, settings, [3, 4], [0, 1]) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    "settings",
    [Settings(top_k=120), Settings(top_p=0.9), Settings(top_k=110, top_p=0.7)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["flat", "one lane", "wide range", "ties", "negative zeros"])
@pytest.mark.slow
def test_the_slow_search(device: str, settings: Settings, kind: str, rng: torch.Generator) -> None:
    """Rows where the lanes' three greatest logits do not decide, so that the whole row is searched."""
    logits = torch.randn(130, generator=rng) * 0.2
    if kind == "one lane":  # everything that matters lies 32 apart
        logits[5::32] += 4
    elif kind == "wide range":
        logits = logits.sign() * 10 ** (torch.rand(130, generator=rng) * 40 - 39.5)
        logits[::50] *= -1e38
    elif kind == "ties":  # more ties than the scratch holds
        logits = (logits * 2).round() / 2
    elif kind == "negative zeros":
        logits = torch.tensor([-1.0] * 20 + [-0.0] * 100 + [1.0] * 10)[torch.randperm(130, generator=rng)]
    check(Sampler("sample_triton", device, max_block=32), logits.tolist(), settings)


@pytest.mark.parametrize("settings", [Settings(top_p=0.95, temperature=1.5), Settings(top_k=1500, top_p=0.99)], ids=str)
def test_the_twin_when_the_head_does_not_decide(settings: Settings, rng: torch.Generator) -> None:
    logits = random_logits(rng, 30000, 1.0)
    kept, _ = survivors(logits, settings)
    assert len(kept) > 1024
    one, seeds, positions = torch.ones(20), [12] * 20, list(range(20))
    tokens = sampling.sample_torch(
        torch.tensor([logits] * 20), settings.temperature * one, (settings.top_k * one).int(), settings.top_p * one,
        one * 0, torch.tensor(seeds), torch.tensor(positions),
    )  # fmt: skip
    weights = np.exp((np.array(logits) - max(logits)) / settings.temperature)
    expected, _, margin = race(kept, weights, noise_of(seeds, positions, len(logits)))
    assert ((tokens.numpy() == expected) | (margin < 1e-5)).all()


# ---- the distribution, and independence -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [24, 100])
@pytest.mark.parametrize("settings", [Settings(temperature=1.3), Settings(top_k=9, top_p=0.9)], ids=str)
def test_distribution(device: str, settings: Settings, size: int, rng: torch.Generator) -> None:
    """Chi-square of many draws, over seeds and over positions, against the probabilities."""
    logits = random_logits(rng, size, 1.0)
    kept, probabilities = survivors(logits, settings)
    num_draws = 20000
    one = torch.ones(num_draws, device=device)
    arguments = [
        torch.tensor([logits] * num_draws, device=device), settings.temperature * one, (settings.top_k * one).int(),
        settings.top_p * one, 0 * one,
    ]  # fmt: skip
    many, same = torch.arange(num_draws, device=device), torch.full((num_draws,), 99, device=device)
    for seed, position in ((many, same), (same, many)):
        counts = sampling.sample(*arguments, seed, position).bincount(minlength=size).tolist()
        assert sum(counts[i] for i in kept) == num_draws
        chi_square = sum(
            (counts[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in zip(kept, probabilities, strict=True)
        )
        degrees = len(kept) - 1
        assert chi_square < degrees + 6 * math.sqrt(2 * degrees) + 12  # far beyond six standard deviations


def mixed_batch(rng: torch.Generator, num_rows: int, size: int) -> tuple[torch.Tensor, ...]:
    def choose(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_rows,), generator=rng)]

    return (
        torch.randn(num_rows, size, generator=rng) * 2, choose([0.0, 0.5, 1.0, 1.7]), choose([0, 0, 3, 20]).int(),
        choose([1.0, 1.0, 0.9, 0.3]), choose([0.0, 0.0, 0.1]),
        torch.randint(-(2**62), 2**62, (num_rows,), generator=rng),
        torch.randint(0, 2**40, (num_rows,), generator=rng),
    )  # fmt: skip


def test_triton_equals_the_twin(device: str, rng: torch.Generator) -> None:
    arguments = mixed_batch(rng, 24, 300)
    expected = sampling.sample_torch(*arguments).tolist()
    for block in (64, 8192):
        result = sampling.sample_triton(*(x.to(device) for x in arguments), max_block=block).tolist()
        for row, (token, twin) in enumerate(zip(result, expected, strict=True)):
            if token == twin:
                continue
            logits, temperature, k, p, m, seed, position = (x[row] for x in arguments)
            kept, _ = survivors(logits.tolist(), Settings(*(x.item() for x in (temperature, k, p, m))))
            weights = np.exp((logits.double() / temperature).numpy())
            assert race(kept, weights, noise_of([seed.item()], [position.item()], len(logits)))[2] < 1e-5


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_a_row_does_not_depend_on_the_others(path: str, device: str, rng: torch.Generator) -> None:
    arguments = [x if path == "torch" else x.to(device) for x in mixed_batch(rng, 12, 288)]
    function = getattr(sampling, f"sample_{path}")
    options = {} if path == "torch" else {"max_block": 64}
    together = function(*arguments, **options).tolist()
    alone = [function(*(x[row : row + 1] for x in arguments), **options).item() for row in range(12)]
    assert alone == together
    # Rows of a wider buffer, in another order.
    order = torch.randperm(12, generator=rng).to(arguments[0].device)
    wide = torch.full((12, 320), INF, device=arguments[0].device)
    wide[:, :288] = arguments[0][order]
    shuffled = function(wide[:, :288], *(x[order] for x in arguments[1:]), **options).tolist()
    assert shuffled == [together[row] for row in order.tolist()]


@pytest.mark.parametrize("settings", [Settings(temperature=0), Settings(), Settings(top_k=5, top_p=0.9)], ids=str)
def test_broken_rows_harm_nobody(sampler: Sampler, settings: Settings, rng: torch.Generator) -> None:
    """NaN and infinite rows give an index in range, and their neighbours what they give anyway."""
    logits = torch.randn(5, 100, generator=rng)
    sound = sampler(logits, settings, [5] * 5, [0] * 5)
    logits[1, 3], logits[2], logits[3], logits[4, 60] = float("nan"), float("nan"), -INF, INF
    tokens = sampler(logits, settings, [5] * 5, [0] * 5)
    assert tokens[0] == sound[0] and tokens[4] == 60
    assert all(0 <= token < 100 for token in tokens)


# ---- what a verifier of drafts, and a promise about seeds, build on ------------------------------------------------


def some_rows(sampler: Sampler, rng: torch.Generator, size: int = 100) -> tuple[torch.Tensor, list[int], list[int]]:
    """Logits of which every row has a few likely tokens, seeds and positions."""
    number = min(sampler.max_draws, 24)
    seeds = torch.randint(-(2**62), 2**62, (number,), generator=rng).tolist()
    positions = torch.randint(0, 2**40, (number,), generator=rng).tolist()
    return torch.randn(number, size, generator=rng), seeds, positions


@pytest.mark.parametrize("how", ["excluded", "lowered", "filtered"])
def test_tokens_that_lose_make_no_difference(sampler: Sampler, how: str, rng: torch.Generator) -> None:
    """Of fewer candidates the winner wins again: its noise is its own. (Inverting a distribution moves all tokens.)"""
    logits, seeds, positions = some_rows(sampler, rng)
    drawn = sampler(logits, Settings(), seeds, positions)
    for part in (0.2, 0.9):
        losers = torch.rand(logits.shape, generator=rng) < part
        losers[range(len(drawn)), drawn] = False
        if how == "filtered":  # the weakest filter that keeps the winner, and stronger ones that do
            ranks = (logits > logits.gather(1, torch.tensor(drawn).unsqueeze(1))).sum(dim=1).tolist()
            settings = [Settings(top_k=1 + rank + int(part * (98 - rank))) for rank in ranks]
            assert sampler(logits, settings, seeds, positions) == drawn
        else:
            lower = logits - (INF if how == "excluded" else 3 * torch.rand(logits.shape, generator=rng))
            assert sampler(torch.where(losers, lower, logits), Settings(), seeds, positions) == drawn


def test_a_greater_vocabulary_makes_no_difference(sampler: Sampler, rng: torch.Generator) -> None:
    """Padding behind the last token, and whole blocks of it: the tokens keep their noise."""
    logits, seeds, positions = some_rows(sampler, rng, size=75)
    settings = Settings(top_p=0.98)
    drawn = sampler(logits, settings, seeds, positions)
    for size in (76, 97, 200):
        padded = torch.full((len(logits), size), -INF)
        padded[:, :75] = logits
        assert sampler(padded, settings, seeds, positions) == drawn


def test_more_tiles_than_a_word_has_bits(device: str, rng: torch.Generator) -> None:
    """35 tiles: those that may hold the winner are marked in 32 bits at a time."""
    logits = [0.3 * x for x in random_logits(rng, 1100, 1.0)]
    weights = np.exp(np.array(logits))
    expected, _, margin = race(list(range(1100)), weights, noise_of([12] * 200, list(range(200)), 1100))
    late = np.flatnonzero((expected >= 1024) & (margin > 1e-5))[:2].tolist()
    positions = [*late, *np.flatnonzero((expected < 1024) & (margin > 1e-5))[:2].tolist()]
    sampler = Sampler("sample_triton", device, max_block=32)
    tokens = sampler(torch.tensor([logits] * 4), Settings(), [12] * 4, positions)
    assert tokens == expected[positions].tolist()


def test_one_token(sampler: Sampler) -> None:
    assert sampler(torch.tensor([[3.0], [-1e30]]), Settings(), [5, 6], [0, 1]) == [0, 0]


def test_a_draft_from_nearly_the_same_logits_is_nearly_always_the_token(rng: torch.Generator) -> None:
    """Two rows with one noise draw the same token with a probability of at least (1 - TV) / (1 + TV)."""
    num_rows = 4000
    target = torch.randn(num_rows, 500, generator=rng) * 2
    draft = target + 0.3 * torch.randn(target.shape, generator=rng)
    distance = (target.softmax(dim=-1) - draft.softmax(dim=-1)).abs().sum(dim=-1) / 2
    bound = ((1 - distance) / (1 + distance)).mean().item()
    one, zero = torch.ones(num_rows), torch.zeros(num_rows)
    rest = (one, zero.int(), one, zero, torch.full((num_rows,), 77), torch.arange(num_rows))
    same = (sampling.sample_torch(target, *rest) == sampling.sample_torch(draft, *rest)).float().mean().item()
    assert same > bound - 4 * math.sqrt(bound * (1 - bound) / num_rows)


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5])
def test_token_logprobs(device: str, k: int, rng: torch.Generator) -> None:
    logits = torch.randn(4, 60, generator=rng) * 3
    logits[1, 7], logits[2, 20] = -INF, 30.0
    logits[3, :5] = 8.0  # ties: rank counts the strictly greater
    tokens = torch.tensor([11, 7, 20, 3], dtype=torch.int32)
    logprob, rank, top_ids, top = sampling.token_logprobs(logits.to(device), tokens.to(device), k)
    expected = logits.double().log_softmax(dim=-1)
    assert (logprob.dtype, rank.dtype, top_ids.dtype, top.dtype) == (
        torch.float32, torch.int32, torch.int32, torch.float32,
    )  # fmt: skip
    assert top_ids.shape == top.shape == (4, k)
    for row, token in enumerate(tokens.tolist()):
        values = expected[row].tolist()
        assert logprob[row].item() == pytest.approx(values[token], abs=1e-5)
        assert rank[row].item() == 1 + sum(x > values[token] for x in values)
        assert top[row].tolist() == pytest.approx(sorted(values, reverse=True)[:k], abs=1e-5)
        assert top[row].tolist() == pytest.approx([values[i] for i in top_ids[row].tolist()], abs=1e-5)
