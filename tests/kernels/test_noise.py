"""The noise of the draw against Random123's vectors, a Philox in plain Python and the law it must have."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from vserve.kernels.sampling import noise

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
INT64 = 2**63 - 1
TOKENS = 512


def philox(counter: list[int], key: list[int]) -> list[int]:
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ k, second & 0xFFFFFFFF, (first >> 32) ^ d ^ m, first & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


def words_of(seed: int, position: int, size: int, stream: int) -> np.ndarray:
    """The words of a stream as noise.py's docstring has them, uint32 [size]."""
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    counter = [position & 0xFFFFFFFF, (position >> 32) & 0xFFFFFFFF]
    return np.array([philox([*counter, i // 4, stream], key)[i % 4] for i in range(size)], dtype=np.uint32)


def plain_noise(seed: int, position: int, size: int) -> np.ndarray:
    """E of the tokens 0 … size - 1 in fp64, one after the other."""
    blocks, tokens = words_of(seed, position, -(-size // 32), 0).tolist(), words_of(seed, position, size, 1).tolist()
    result = []
    for token in range(size):
        block = blocks[token // 32]
        least = -math.log1p(-((block >> 5) + 0.5) / 2**27) / 32
        leads = block % 32 == token % 32
        result.append(least + (0 if leads else -math.log1p(-(tokens[token] + 0.5) / 2**32)))
    return np.array(result)


def noise_of(seed: np.ndarray, position: np.ndarray, size: int) -> np.ndarray:
    """E of the tokens 0 … size - 1 of many rows by the numpy functions, [S, size]."""
    tokens = np.tile(np.arange(size), len(seed))
    least, leader = (x.repeat(32, axis=1)[:, :size].ravel() for x in noise.block_noise(seed, position, -(-size // 32)))
    return noise.token_noise(seed.repeat(size), position.repeat(size), tokens, least, leader).reshape(-1, size)


@triton.jit
def _noise_kernel(seed_ptr, position_ptr, words_ptr, noise_ptr, SIZE: tl.constexpr):
    """Of tokens 0 … SIZE - 1: the words of both streams, and E."""
    row = tl.program_id(0)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    quads, four = tl.arange(0, SIZE // 4), tl.arange(0, 4)[None, :]
    place = row * SIZE + quads[:, None] * 4 + four
    for stream in tl.static_range(2):
        words = noise._words_triton(seed, position, quads, stream)
        tl.store(words_ptr + row * SIZE + stream * SIZE + place, words.to(tl.int64))
    groups = tl.arange(0, SIZE // 128)
    least, leader = noise.block_noise_triton(seed, position, groups)
    tl.store(noise_ptr + row * SIZE + groups[:, None] * 4 + four, least)
    tl.debug_barrier()
    least = tl.load(noise_ptr + row * SIZE + quads // 8)
    tl.debug_barrier()
    tl.store(noise_ptr + row * SIZE + groups[:, None] * 4 + four, leader.to(tl.float32))
    tl.debug_barrier()
    leader = tl.load(noise_ptr + row * SIZE + quads // 8).to(tl.int32)
    tl.debug_barrier()
    tl.store(noise_ptr + place, noise.token_noise_triton(seed, position, quads, least, leader))


def triton_noise(seeds: np.ndarray, positions: np.ndarray, device: str) -> tuple[np.ndarray, np.ndarray]:
    """→ words uint32 [S, stream, TOKENS], E fp32 [S, TOKENS]"""
    words = torch.zeros(len(seeds), 2, TOKENS, dtype=torch.int64, device=device)
    result = torch.zeros(len(seeds), TOKENS, device=device)
    seed, position = (torch.from_numpy(x).to(device) for x in (seeds, positions))
    _noise_kernel[(len(seeds),)](seed, position, words, result, SIZE=TOKENS)
    return words.cpu().numpy().astype(np.uint32), result.cpu().numpy()


def keys(rng: torch.Generator, number: int) -> tuple[np.ndarray, np.ndarray]:
    seeds = torch.randint(-INT64, INT64, (number,), generator=rng).numpy()
    positions = torch.randint(0, INT64, (number,), generator=rng).numpy()
    seeds[:5], positions[:5] = [0, -1, 1, 2**32, -INT64 - 1], [0, INT64, 2**32 - 1, 1, 2**32]
    return seeds, positions


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert philox(counter, key) == answer
    words = noise.philox4x32(np.array([counter] * 3, dtype=np.uint32).T, np.array([key] * 3, dtype=np.uint32).T)
    assert words.tolist() == [answer] * 3


def test_words_of_seed_position_and_token(device: str, rng: torch.Generator) -> None:
    """Both paths take the words that the docstring names, bit for bit, of all 64 bits of seed and position."""
    seeds, positions = keys(rng, 8)
    words, _ = triton_noise(seeds, positions, device)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for stream in (0, 1):
            expected = words_of(seed, position, TOKENS, stream)
            assert (words[row, stream] == expected).all()
            ours = noise._words(seeds[row : row + 1], positions[row : row + 1], np.arange(TOKENS // 4), stream)
            assert (ours.ravel() == expected).all()


def test_every_bit_of_the_key_counts(rng: torch.Generator) -> None:
    seeds, positions = (key[-1:] for key in keys(rng, 6))
    bits = np.left_shift(np.int64(1), np.arange(63))
    one, other = np.full(63, seeds[0]), np.full(63, positions[0])
    flipped = [noise_of(one ^ bits, other, 64), noise_of(one, other ^ bits, 64), noise_of(seeds[:1], positions[:1], 64)]
    flipped.append(noise_of(seeds[:1] ^ (-INT64 - 1), positions[:1], 64))
    assert len(np.unique(np.concatenate(flipped), axis=0)) == 2 * 63 + 2


def test_noise(device: str, rng: torch.Generator) -> None:
    seeds, positions = keys(rng, 8)
    result = noise_of(seeds, positions, TOKENS)
    expected = np.stack([plain_noise(*key, TOKENS) for key in zip(seeds.tolist(), positions.tolist(), strict=True)])
    assert result.dtype == np.float32
    assert (np.abs(result - expected) < 5e-7 * expected + 2**-24 * np.exp(expected)).all()  # v is an fp32 below 1
    _, by_triton = triton_noise(seeds, positions, device)
    assert by_triton == pytest.approx(result, rel=3e-7)


@triton.jit
def _exponential_kernel(words_ptr, out_ptr, scale, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, noise._exponential_triton(tl.load(words_ptr + at).to(tl.uint32), scale))


@pytest.mark.parametrize("bits", [27, 32])
def test_both_tails_of_the_exponential(bits: int, device: str) -> None:
    """Never 0 nor infinite, as exact as fp32 for the small ones that win, and monotone."""
    small = [0, 1, 2, 3, 255, 2**10, 2**15 + 1, 2**20 + 7, 2 ** (bits - 2), 2 ** (bits - 1)]
    words = np.array([*small, *(2**bits - 1 - np.array([2**bits // 8, 2**12, 2**8, 3, 1, 0]))], dtype=np.uint32)
    out = torch.zeros(len(words), device=device)
    _exponential_kernel[(1,)](torch.from_numpy(words.astype(np.int64)).to(device), out, 2.0**-bits, SIZE=len(words))
    exact = np.array([-math.log1p(-(word + 0.5) / 2**bits) for word in words.tolist()])
    for result in (noise._exponential(words, 2.0**-bits), out.cpu().numpy()):
        assert (result > 0).all() and np.isfinite(result).all() and (np.diff(result) >= 0).all()
        assert result[:11] == pytest.approx(exact[:11], rel=3e-7)
        assert result == pytest.approx(exact, rel=0.35)
        assert result[-1] == pytest.approx(24 * math.log(2))


def test_lighter_tokens_cannot_win() -> None:
    ends = np.array([0, 2**32 - 1], dtype=np.uint32)
    least, greatest = noise._exponential(ends >> 5, 2.0**-27)[0] / 32, noise._exponential(ends, 2.0**-32)[1] * 33 / 32
    assert 0.5 < noise.LEAST_WEIGHT / (least / greatest) < 0.99


def test_noise_is_exponential_and_independent(rng: torch.Generator) -> None:
    """The law of 64 tokens (two blocks) over 20,000 rows: exponential, pairs independent, no token favoured."""
    num_rows, size = 20_000, 64
    seeds = torch.randint(-INT64, INT64, (num_rows,), generator=rng).numpy()
    result = noise_of(seeds, np.arange(num_rows), size).astype(np.float64)
    uniform = -np.expm1(-result)
    counts = np.stack([np.histogram(uniform[:, token], bins=20, range=(0, 1))[0] for token in range(size)])
    chi_square = ((counts - num_rows / 20) ** 2 / (num_rows / 20)).sum(axis=1)
    assert chi_square.max() < 19 + 6 * math.sqrt(2 * 19) + 12
    correlation = np.corrcoef(uniform.T) - np.eye(size)
    assert np.abs(correlation).max() < 6 / math.sqrt(num_rows)
    # Small values together: the least of a block is shared by all of its tokens, and must not show.
    small = uniform < 0.1
    together = (small.T.astype(np.float64) @ small) / num_rows
    np.fill_diagonal(together, 0.01)
    assert np.abs(together - 0.01).max() < 6 * math.sqrt(0.01 / num_rows)
    winners = np.bincount(result.argmin(axis=1), minlength=size)
    assert ((winners - num_rows / size) ** 2 / (num_rows / size)).sum() < 63 + 6 * math.sqrt(2 * 63)
