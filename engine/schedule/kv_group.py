"""The KV groups: which blocks a request keeps for some of the layers, and what of a prefix those need to find again."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..cache.kv_layout import blocks_held
from ..options.scheduler_config import SchedulerConfig
from .block_pool import NULL_BLOCK, BlockPool


class KVGroup(ABC):
    """Layers that keep the same tokens, and so have a block table of their own for each request."""

    __slots__ = ("block_size", "index", "pool", "suffix")

    def __init__(self, index: int, block_size: int, pool: BlockPool) -> None:
        self.index, self.block_size, self.pool = index, block_size, pool
        self.suffix = b"" if index == 0 else index.to_bytes(2, "little")  # of its keys: groups share no content

    @abstractmethod
    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens has at most at one moment."""

    @abstractmethod
    def match(self, keys: list[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of these keys' blocks; null where no token behind it sees them."""

    @abstractmethod
    def num_left(self, num_computed_tokens: int) -> int:
        """Leading blocks that no token behind the computed ones sees."""

    @abstractmethod
    def leave_behind(self, blocks: list[int], left: int, num_computed_tokens: int) -> int:
        """Gives back the blocks that this request's next tokens do not see; `left` leading ones it has already.
        Returns how many it then has.

        `num_computed_tokens` counts what was computed before the step that is being planned: a step that is taken back
        in part (`Scheduler.postpone`) never needs more. Steps in flight may still read what is given back here, and
        the step being planned may write it, for whoever takes the block. They run in order on one stream, so all reads
        of the steps before come first. The device's tables keep the old numbers: no kernel reads a key before the
        window (tests/kernels/test_attention.py holds them to it, with NaN in such blocks).
        """


class FullGroup(KVGroup):
    """Keeps all tokens."""

    __slots__ = ()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, keys: list[bytes]) -> list[int]:
        find, suffix = self.pool.find, self.suffix
        blocks: list[int] = []
        for key in keys:
            block = find(key + suffix)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_left(self, num_computed_tokens: int) -> int:
        return 0

    def leave_behind(self, blocks: list[int], left: int, num_computed_tokens: int) -> int:
        return 0


class WindowGroup(KVGroup):
    """Keeps the last `window` tokens, and gives back what lies behind them: the null block takes the place of such a
    block in the table, which so stays as long as the others' and only ever grows."""

    __slots__ = ("chunk", "num_seen", "window")

    def __init__(self, index: int, block_size: int, pool: BlockPool, window: int, chunk: int) -> None:
        """`chunk`: tokens of a request that a step computes at most."""
        super().__init__(index, block_size, pool)
        self.window, self.chunk = window, chunk
        self.num_seen = -(-(window - 1) // block_size)  # blocks before its own that a block's first token sees

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_held(num_tokens, self.window, self.chunk, self.block_size)

    def match(self, keys: list[bytes]) -> list[int]:
        """Of a prefix, it needs only the blocks that the token behind it sees. The longest one therefore is found from
        its end: after a gap, the prefix ends before it."""
        find, suffix = self.pool.find, self.suffix
        blocks: list[int] = []
        length = index = len(keys)
        while index and len(blocks) < self.num_seen:
            index -= 1
            block = find(keys[index] + suffix)
            if block is None:
                length, blocks = index, []
            else:
                blocks.append(block)
        return [NULL_BLOCK] * (length - len(blocks)) + blocks[::-1]

    def num_left(self, num_computed_tokens: int) -> int:
        return max(0, (num_computed_tokens - self.window + 1) // self.block_size)

    def leave_behind(self, blocks: list[int], left: int, num_computed_tokens: int) -> int:
        first = self.num_left(num_computed_tokens)
        if first <= left:
            return left
        self.pool.release(reversed(blocks[left:first]))
        blocks[left:first] = [NULL_BLOCK] * (first - left)
        return first


def kv_groups(config: SchedulerConfig, pool: BlockPool) -> list[KVGroup]:
    """One for each of config.windows, in that order."""
    size, chunk = config.block_size, config.max_num_batched_tokens
    return [
        WindowGroup(index, size, pool, window, chunk) if window else FullGroup(index, size, pool)
        for index, window in enumerate(config.windows)
    ]
