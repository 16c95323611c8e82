"""What requests keep of the KV cache in one KV group: all their blocks, or those that a sliding window still sees."""

from __future__ import annotations

from ..cache.kv_layout import blocks_held
from .block_pool import NULL_BLOCK, BlockPool


class KVGroup:
    """Layers that keep the same tokens, and so have a block table of their own for each request.

    A full group (window 0) keeps all. A window group gives back what lies behind its window: the null block takes the
    place of such a block in the table, which so stays as long as the others' and only ever grows.
    """

    __slots__ = ("block_size", "chunk", "index", "num_seen", "pool", "suffix", "window")

    def __init__(self, index: int, window: int, block_size: int, chunk: int, pool: BlockPool) -> None:
        """`chunk`: tokens of a request that a step computes at most."""
        self.index, self.window, self.block_size, self.chunk, self.pool = index, window, block_size, chunk, pool
        self.suffix = b"" if index == 0 else index.to_bytes(2, "little")  # of its keys: groups share no content
        self.num_seen = -(-(window - 1) // block_size)  # blocks before its own that a block's first token sees

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens has at most at one moment."""
        return blocks_held(num_tokens, self.window, self.chunk, self.block_size)

    def match(self, keys: list[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of these keys' blocks; null where a window does not see them.

        Of a prefix, a window group needs only the blocks that the token behind it sees. The longest one therefore is
        found from its end: after a gap, the prefix ends before it.
        """
        find, suffix = self.pool.find, self.suffix
        blocks: list[int] = []
        if not self.window:
            for key in keys:
                block = find(key + suffix)
                if block is None:
                    break
                blocks.append(block)
            return blocks
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
        """Leading blocks that no token behind the computed ones sees."""
        return max(0, (num_computed_tokens - self.window + 1) // self.block_size) if self.window else 0

    def leave_behind(self, blocks: list[int], left: int, num_computed_tokens: int) -> int:
        """Gives back the blocks that this request's next tokens do not see; `left` leading ones it has already.

        `num_computed_tokens` counts what was computed before the step that is being planned: a step that is taken back
        in part (`Scheduler.postpone`) never needs more. Steps in flight may still read what is given back here, and
        the step being planned may write it, for whoever takes the block. They run in order on one stream, so all reads
        of the steps before come first. The device's tables keep the old numbers: no kernel reads a key before the
        window (tests/kernels/test_attention.py holds them to it, with NaN in such blocks).
        """
        first = self.num_left(num_computed_tokens)
        if first <= left:
            return left
        self.pool.release(reversed(blocks[left:first]))
        blocks[left:first] = [NULL_BLOCK] * (first - left)
        return first
