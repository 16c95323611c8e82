"""How many blocks the tokens of a request take, and how many tokens the blocks hold. Without torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def blocks_held(num_tokens: int, window: int, chunk: int, block_size: int) -> int:
    """Blocks that a request of `num_tokens` has at most at one moment, when steps compute up to `chunk` of its tokens.

    A step sees its own tokens and, with a window (0: none), the window - 1 before them, wherever in a block they begin.
    """
    every = -(-num_tokens // block_size)
    if not window:
        return every
    return min(every, -(-(window + chunk - 2) // block_size) + 1)


def longest_request(windows: Sequence[int], num_blocks: int, chunk: int, block_size: int, max_model_len: int) -> int:
    """Tokens of a request that `num_blocks` blocks, the null block among them, hold while it is alone.

    `windows`: of each KV group. A multiple of block_size; where all groups have windows, the context is the limit.
    """
    most = num_blocks - 1 if 0 in windows else -(-max_model_len // block_size)

    def needed(blocks: int) -> int:
        return sum(blocks_held(blocks * block_size, window, chunk, block_size) for window in windows)

    return bisect_right(range(1, most + 1), num_blocks - 1, key=needed) * block_size
