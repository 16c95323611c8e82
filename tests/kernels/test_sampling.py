"""The sampler against filters and an inverse CDF written with sorted lists and float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from vserve.kernels import sampling

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


_UNIFORMS = sampling.philox_uniform_torch(torch.full((1 << 17,), 12), torch.arange(1 << 17)).sort()


def positions_of(uniforms: list[float]) -> tuple[list[int], list[float]]:
    """Positions whose noise with seed 12 lies nearest above each of the numbers, and that noise."""
    place = torch.searchsorted(_UNIFORMS.values, torch.tensor(uniforms)).clamp(max=len(_UNIFORMS.values) - 1)
    return _UNIFORMS.indices[place].tolist(), _UNIFORMS.values[place].tolist()


def inverse(kept: list[int], probabilities: list[float], uniform: float) -> tuple[int, float]:
    """→ the token, and how far the noise is from where another token begins."""
    end, margin, token = 0.0, uniform or 1.0, None
    for candidate, probability in zip(kept, probabilities, strict=True):
        end += probability
        margin = min(margin, abs(uniform - end))
        if token is None and end > uniform:
            token = candidate
    return kept[-1] if token is None else token, margin


def check(sampler: Sampler, logits: list[float], s: Settings) -> None:
    """Draws survivors at both ends of their intervals: a survivor too many or too few would move some of them."""
    kept, probabilities = survivors(logits, s)
    uniforms, end = [0.0], 0.0
    for probability in probabilities:
        if probability > 2e-3:
            uniforms += [end + 0.02 * probability, end + 0.97 * probability]
        end += probability
    step = -(-len(uniforms) // (sampler.max_draws - 1))
    positions, noise = positions_of([*uniforms[::step], 0.999999])
    rows = torch.tensor([logits] * len(positions))
    tokens = sampler(rows, s, [12] * len(positions), positions)
    for token, uniform in zip(tokens, noise, strict=True):
        expected, margin = inverse(kept, probabilities, uniform)
        assert token in kept
        assert token == expected or margin < 1e-6, (uniform, margin)


def random_logits(rng: torch.Generator, size: int, scale: float = 2.0) -> list[float]:
    return (torch.randn(size, generator=rng) * scale).tolist()


# ---- noise ----------------------------------------------------------------------------------------------------------

# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def philox(counter: list[int], key: list[int]) -> list[int]:
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ k, second & 0xFFFFFFFF, (first >> 32) ^ d ^ m, first & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


@triton.jit
def _philox_words(counter_ptr, seed_ptr, out_ptr):
    word = tl.load(counter_ptr + tl.arange(0, 1)).to(tl.uint32)
    second = tl.load(counter_ptr + 1 + tl.arange(0, 1)).to(tl.uint32)
    third = tl.load(counter_ptr + 2 + tl.arange(0, 1)).to(tl.uint32)
    fourth = tl.load(counter_ptr + 3 + tl.arange(0, 1)).to(tl.uint32)
    word, second, third, fourth = tl.philox(tl.load(seed_ptr), word, second, third, fourth)
    tl.store(out_ptr + tl.arange(0, 1), word.to(tl.int64))
    tl.store(out_ptr + 1 + tl.arange(0, 1), second.to(tl.int64))
    tl.store(out_ptr + 2 + tl.arange(0, 1), third.to(tl.int64))
    tl.store(out_ptr + 3 + tl.arange(0, 1), fourth.to(tl.int64))


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], key: list[int], answer: list[int], device: str) -> None:
    assert philox(counter, key) == answer
    words = sampling.philox4x32_torch(torch.tensor(counter).view(4, 1), torch.tensor(key).view(2, 1))
    assert words.flatten().tolist() == answer
    seed = key[0] | key[1] << 32
    seed -= (seed >> 63) << 64
    out = torch.zeros(4, dtype=torch.int64, device=device)
    _philox_words[(1,)](torch.tensor(counter, device=device), torch.tensor([seed], device=device), out)
    assert out.tolist() == answer


def test_philox_uniform(device: str, rng: torch.Generator) -> None:
    limit = 2**63 - 1
    seeds = torch.randint(-limit, limit, (300,), generator=rng)
    positions = torch.randint(0, limit, (300,), generator=rng)
    seeds[:4], positions[:4] = torch.tensor([0, -1, 1, 2**32]), torch.tensor([0, 2**32, 2**32 - 1, 1])
    result = sampling.philox_uniform_torch(seeds, positions)
    for seed, position, uniform in zip(seeds.tolist(), positions.tolist(), result.tolist(), strict=True):
        words = philox([position & 0xFFFFFFFF, position >> 32, 0, 0], [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF])
        assert uniform == (words[0] >> 8) / 2**24
    assert torch.equal(sampling.philox_uniform_triton(seeds.to(device), positions.to(device)).cpu(), result)
    assert torch.equal(sampling.philox_uniform(seeds.to(device), positions.to(device)).cpu(), result)


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
    kept, probabilities = survivors(logits, settings)
    assert len(kept) > 1024
    positions, noise = positions_of(torch.rand(20, generator=rng).tolist())
    one = torch.ones(20)
    tokens = sampling.sample_torch(
        torch.tensor([logits] * 20), settings.temperature * one, (settings.top_k * one).int(), settings.top_p * one,
        one * 0, torch.full((20,), 12), torch.tensor(positions),
    ).tolist()  # fmt: skip
    for token, uniform in zip(tokens, noise, strict=True):
        expected, margin = inverse(kept, probabilities, uniform)
        assert token == expected or margin < 1e-6


# ---- the distribution, and independence -----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [Settings(temperature=1.3), Settings(top_k=9, top_p=0.9)], ids=str)
def test_distribution(device: str, settings: Settings, rng: torch.Generator) -> None:
    """Chi-square of many draws, over seeds and over positions, against the probabilities."""
    logits = random_logits(rng, 24, 1.0)
    kept, probabilities = survivors(logits, settings)
    num_draws = 20000
    one = torch.ones(num_draws, device=device)
    arguments = [
        torch.tensor([logits] * num_draws, device=device), settings.temperature * one, (settings.top_k * one).int(),
        settings.top_p * one, 0 * one,
    ]  # fmt: skip
    many, same = torch.arange(num_draws, device=device), torch.full((num_draws,), 99, device=device)
    for seed, position in ((many, same), (same, many)):
        counts = sampling.sample(*arguments, seed, position).bincount(minlength=24).tolist()
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
            kept, probabilities = survivors(logits.tolist(), Settings(*(x.item() for x in (temperature, k, p, m))))
            uniform = sampling.philox_uniform_torch(seed.view(1), position.view(1)).item()
            assert inverse(kept, probabilities, uniform)[1] < 1e-6


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
    assert sampling.has_nan(logits).tolist() == [False, True, True, False, False]


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
