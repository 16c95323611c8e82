"""The noise of the draw: of every (seed, position, token) an exponential variate, made where it is wanted.

A token is drawn by Gumbel-max: greatest logit / temperature + g, or what is the same, greatest probability / E, where
g = -log(E) and the E of a row's tokens are independent exponential variates. E is a function of seed, position and
token alone. So a token keeps its noise whatever the other logits are, and taking away tokens that lose changes nothing.

Nearly all tokens are hopeless, and most of their noise is never computed. A block of 32 tokens has one word: 27 bits
make the least E of the block (that of 32 exponential variates is one, divided by 32), 5 bits say which token has it,
the leader. An exponential variate forgets how long it has lasted, so the other tokens' E is that least and one more
variate, from a word of their own. This is the exact joint law, and the least of a block bounds all of its tokens.

Words are Philox4x32-10's (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the key is seed's low
and high 32 bits, the counter (position's low 32 bits, its high ones, i // 4, stream), and the word is output i % 4. i
is the block in stream 0, the token in stream 1.

A word becomes v in (0, 1), in fp32 and the same bits everywhere, and -log(1 - v) the variate. Small variates win, and
near 0 floats are dense: the least is 2**-28 / 32 for a leader, exact to fp32. The greatest is 24 log 2.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

BLOCK_TOKENS = 32
# A token with a smaller probability than this, relative to the greatest, cannot win: the least E is 2**-33, and the
# greatest 16.64 * (1 + 1 / 32).
LEAST_WEIGHT = 5e-12

_BLOCK_STREAM, _TOKEN_STREAM = 0, 1
_BLOCKS = tl.constexpr(_BLOCK_STREAM)
_TOKENS = tl.constexpr(_TOKEN_STREAM)


# ---- numpy ----------------------------------------------------------------------------------------------------------
# Not torch: its operations on a few numbers take several times as long, and it has no products of unsigned words.

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.arange(10, dtype=np.uint32).reshape(10, 1, 1) * np.array([[0x9E3779B9], [0xBB67AE85]], np.uint32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """counter uint32 [4, N] and key uint32 [2, N] → the four output words, uint32 [N, 4]."""
    even, odd = counter[0::2].copy(), counter[1::2]
    products = [np.empty(even.shape, dtype=np.uint64) for _ in range(2)]  # one still holds the odd words
    words = [product.view(np.uint32).reshape(*even.shape, 2)[::-1] for product in products]  # low, high; swapped
    for i, round_key in enumerate(key + _KEY_STEPS):
        np.multiply(even, _MULTIPLIERS, out=products[i % 2])
        np.bitwise_xor(words[i % 2][..., 1], odd, out=even)
        np.bitwise_xor(even, round_key, out=even)
        odd = words[i % 2][..., 0]
    result = np.empty((even.shape[1], 4), dtype=np.uint32)
    result[:, 0::2], result[:, 1::2] = even.T, odd.T
    return result


def block_noise(seed: np.ndarray, position: np.ndarray, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """seed and position int64 [S] → the least E of each block, fp32 [S, num_blocks], and its leader, int64, 0 to 31."""
    groups = np.arange(-(-num_blocks // 4))
    words = _words(seed[:, None], position[:, None], groups, _BLOCK_STREAM).reshape(len(seed), -1)[:, :num_blocks]
    return _exponential(words >> 5, 2.0**-27) / np.float32(BLOCK_TOKENS), (words & 31).astype(np.int64)


def token_noise(
    seed: np.ndarray, position: np.ndarray, token: np.ndarray, least: np.ndarray, leader: np.ndarray
) -> np.ndarray:
    """E of tokens, fp32 [N]; seed, position and token int64 [N]; least and leader [N]: of their blocks."""
    words = _words(seed, position, token // 4, _TOKEN_STREAM)[np.arange(len(token)), token % 4]
    return least + np.where(token % BLOCK_TOKENS == leader, np.float32(0), _exponential(words, 2.0**-32))


def _words(seed: np.ndarray, position: np.ndarray, group: np.ndarray, stream: int) -> np.ndarray:
    """seed, position and group: int64, of shapes that go together → uint32 [their size, 4]."""
    size = np.broadcast_shapes(seed.shape, group.shape)
    counter, key = np.empty((4, *size), dtype=np.uint32), np.empty((2, *size), dtype=np.uint32)
    counter[0], counter[1], counter[2], counter[3] = position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF, group, stream
    key[0], key[1] = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    return philox4x32(counter.reshape(4, -1), key.reshape(2, -1))


def _exponential(words: np.ndarray, scale: float) -> np.ndarray:
    uniform = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(scale), np.float32(1 - 2**-24))
    rest = 1 - uniform
    # -log1p(-uniform), which would take ten times as long: what rounding lost of the rest is added back.
    return (uniform - (1 - rest)) - np.log(rest)


# ---- triton ---------------------------------------------------------------------------------------------------------


@triton.jit
def block_noise_triton(seed, position, groups):
    """Scalars, and groups int32 [G] of four blocks → the least E fp32 [G, 4], and the leader int32 [G, 4], 0 to 31."""
    words = _words_triton(seed, position, groups, _BLOCKS)
    least = _exponential_triton(words >> 5, 1.0 / 134217728) * (1.0 / 32)
    return least, (words & 31).to(tl.int32)


@triton.jit
def token_noise_triton(seed, position, quads, least, leader):
    """E of quads int32 [Q] of tokens, fp32 [Q, 4]. least and leader [Q]: of their blocks."""
    rest = _exponential_triton(_words_triton(seed, position, quads, _TOKENS), 1.0 / 4294967296)
    place = (quads % 8 * 4)[:, None] + tl.arange(0, 4)[None, :]
    return least[:, None] + tl.where(place == leader[:, None], 0.0, rest)


@triton.jit
def _words_triton(seed, position, groups, STREAM: tl.constexpr):
    counter = position.to(tl.uint64, bitcast=True)
    third = groups.to(tl.uint32)
    low, high = third * 0 + counter.to(tl.uint32), third * 0 + (counter >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, third, third * 0 + STREAM)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [groups.shape[0], 4])


@triton.jit
def _exponential_triton(words, scale):
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * scale, 1 - 1.0 / 16777216)
    rest = 1 - uniform
    # As above; tl.log is exact to a unit in the last place, near 1 too.
    return (uniform - (1 - rest)) - tl.log(rest)
