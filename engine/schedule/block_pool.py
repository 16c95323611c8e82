"""Blocks of the KV cache as plain integers: who is free, who is referenced, which content a block is known to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import require

NULL_BLOCK = 0  # never given out: pads tables, and stands for blocks that a sliding window has left behind


class BlockPool:
    """Reference counts, an intrusive free list and a map from content key to blocks, all O(1) a block.

    Eviction is lazy: a freed block keeps its key and can be hit until it is taken for a new owner. Among the free,
    blocks without a key go first, then the least recently freed. No two blocks are ever merged: blocks with equal
    content stay apart under one key, so tables only grow.
    """

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the null block. All blocks start free and without a key."""
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has nothing to give: block 0 is reserved"
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.refs = [0] * num_blocks
        self.refs[NULL_BLOCK] = 1
        self.keys: list[bytes | None] = [None] * num_blocks
        self.by_key: dict[bytes, int | dict[int, None]] = {}  # a dict is an ordered set of equal blocks
        # Called with the key once no block holds its content any more, for whatever reason.
        self.lost: Callable[[bytes], None] | None = None
        # The free list is a ring of pointers through these two lists. The null block is never free: it is the head.
        self.next = [*range(1, num_blocks), NULL_BLOCK]
        self.prev = [num_blocks - 1, *range(num_blocks - 1)]

    def find(self, key: bytes) -> int | None:
        """A block that holds this content (free or not), or None."""
        found = self.by_key.get(key)
        if isinstance(found, dict):
            return next(iter(found))
        return found

    def share(self, block: int) -> None:
        """One more reference to a block that was found; a free one leaves the free list."""
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1

    def take_many(self, count: int) -> list[int]:
        """Blocks whose content is worth least, with one reference each. The caller has checked `num_free`."""
        blocks = []
        block = NULL_BLOCK
        for _ in range(count):
            block = self.next[block]
            assert block != NULL_BLOCK, "no free block: check num_free first"
            if self.keys[block] is not None:
                self.revoke(block)
            self.refs[block] = 1
            blocks.append(block)
        rest = self.next[block]
        self.next[NULL_BLOCK], self.prev[rest] = rest, NULL_BLOCK
        self.num_free -= count
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each. Give the blocks of a sequence tail first, so that its head outlives its tail."""
        refs, keys, following, previous = self.refs, self.keys, self.next, self.prev
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            refs[block] -= 1
            if refs[block]:
                assert refs[block] > 0, f"block {block} released more often than referenced"
                continue
            self.num_free += 1
            before = NULL_BLOCK if keys[block] is None else previous[NULL_BLOCK]  # no content to keep: to the front
            after = following[before]
            following[before], previous[block] = block, before
            following[block], previous[after] = after, block

    def register(self, block: int, key: bytes) -> None:
        """From now on the block can be found under `key`. The content may still be on its way (stream order)."""
        assert self.refs[block] > 0 and self.keys[block] is None, f"block {block} is free or registered already"
        self.keys[block] = key
        known = self.by_key.get(key)
        if known is None:
            self.by_key[key] = block
        elif isinstance(known, dict):
            known[block] = None
        else:
            self.by_key[key] = {known: None, block: None}

    def revoke(self, block: int) -> None:
        """The block can no longer be found; its owners keep it. No-op for a block without a key."""
        key = self.keys[block]
        if key is None:
            return
        self.keys[block] = None
        known = self.by_key[key]
        if isinstance(known, dict):
            del known[block]
            if known:
                return
        del self.by_key[key]
        if self.lost is not None:
            self.lost(key)

    def check_invariants(self) -> None:
        """Raises InvariantError where the counts, the free list and the map disagree. O(blocks)."""
        free: list[int] = []
        block, before = self.next[NULL_BLOCK], NULL_BLOCK
        while block != NULL_BLOCK:
            require(self.prev[block] == before, f"free list torn at block {block}")
            require(len(free) < self.num_blocks, "free list is a loop")
            free.append(block)
            block, before = self.next[block], block
        require(self.prev[NULL_BLOCK] == before, "free list torn at its end")
        require(len(free) == self.num_free, f"{len(free)} blocks in the free list, {self.num_free} counted")
        require(all(self.refs[block] == 0 for block in free), "a free block is referenced")
        require(self.refs[NULL_BLOCK] == 1 and self.keys[NULL_BLOCK] is None, "the null block was given out")
        require(self.refs.count(0) == len(free), "a block without reference is not in the free list")
        require(min(self.refs) >= 0, "negative reference count")
        keyed = 0
        for key, known in self.by_key.items():
            blocks = list(known) if isinstance(known, dict) else [known]
            keyed += len(blocks)
            require(all(self.keys[block] == key for block in blocks), "map and block disagree about a key")
        require(keyed == self.num_blocks - self.keys.count(None), "a block has a key the map does not know")

    def _unlink(self, block: int) -> None:
        before, after = self.prev[block], self.next[block]
        self.next[before], self.prev[after] = after, before
        self.num_free -= 1
