"""Which blocks of the KV cache belong to which request, and which prefixes the cache still holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import cycle, groupby

from ..cache.kv_layout import longest_request
from ..errors import require
from ..link.media import MediaItem
from ..options.scheduler_config import SchedulerConfig
from .block_pool import NULL_BLOCK, BlockPool
from .encoder_cache import EncoderCache, media_keys, pictures_of
from .kv_events import KVEvents
from .kv_group import KVGroup, kv_groups
from .request import Request
from .state_group import Registered, StateGroup


class BlockTable:
    """The blocks of one request, in the order of its tokens; append-only, of one length in every KV group."""

    __slots__ = ("groups", "left", "num_registered")

    def __init__(self, groups: list[list[int]], left: list[int]) -> None:
        self.groups = groups
        self.left = left  # of each group: leading entries that are null, for no token to come sees those blocks
        self.num_registered = len(groups[0])  # leading blocks that can be found by others


class KVCacheManager:
    """Block tables of the running requests over one pool; every block of a table belongs to one KV group."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self.pool = BlockPool(config.num_blocks)
        chunk, size = config.max_num_batched_tokens, config.block_size
        self.groups = kv_groups(config, self.pool)
        self.num_groups = len(self.groups)
        self.state = StateGroup(config) if config.num_state_slots else None  # of layers that keep no tokens
        self.encoder = EncoderCache(config) if config.encoder_cache_tokens else None  # of features of pictures
        # Of one request alone.
        self.max_tokens = longest_request(config.windows, config.num_blocks, chunk, size, config.max_model_len)
        self.tables: dict[int, BlockTable] = {}  # by request id
        self.events: KVEvents | None = None  # see publish
        self.prefix_queries = 0  # tokens looked up; resumed requests would flatter the rate and are not counted
        self.prefix_hits = 0  # tokens found
        # A secret start of every chain: keys cannot be computed outside of this process (prefix-cache timing attacks).
        # Engines that are to know the same blocks by the same keys are given one secret.
        given = config.prefix_cache_seed
        self.seed = sha256(given.encode("utf-8", "surrogatepass")).digest() if given else os.urandom(32)

    def publish(self, events: KVEvents) -> None:
        """From now on they are told which contents come and go."""
        self.events, self.pool.lost = events, events.removed

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def num_blocks_missing(self, request: Request) -> int:
        """Free blocks that a running request may still take until all its tokens are computed, at most."""
        missing = max(0, -(-request.target // self.block_size) - len(self.tables[request.id].groups[0]))
        return sum(min(missing, group.blocks_for(request.target)) for group in self.groups)

    def too_small(self, request: Request) -> str:
        """What to tell a request that the cache cannot hold even alone."""
        sizes = f"{request.num_tokens} tokens do not fit the KV cache, which holds {self.max_tokens} in all"
        return f"{sizes}: shorten the request, or raise --gpu-memory-utilization or --kv-cache-memory-bytes"

    def media_problem(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> str | None:
        """Why a request cannot have these pictures; None: it can, or there are none."""
        if not media:
            return None
        if self.encoder is None:
            return "this engine reads no pictures: leave them out"
        return self.encoder.problem(token_ids, media)

    def extend_hashes(self, request: Request) -> None:
        """Hash the blocks that have filled since the last call: SHA-256 of (parent, int32 token ids, extra keys).

        Each extra key comes behind its length. Nothing to do without prefix caching.
        """
        size, hashes, tokens = self.block_size, request.block_hashes, request.token_ids
        start, end = len(hashes), len(tokens) // size
        if start >= end or not self.caching:
            return
        ids = tokens[start * size : end * size]
        if sys.byteorder == "big":
            ids.byteswap()
        data, stride = ids.tobytes(), size * ids.itemsize
        parent, extras = hashes[-1] if hashes else self.seed, extra_keys(request, size, start, end)
        for offset in range(0, len(data), stride):
            content = parent + data[offset : offset + stride]
            if extras:
                for extra in extras.get(len(hashes), ()):
                    content += len(extra).to_bytes(4, "little") + extra
            parent = sha256(content).digest()
            hashes.append(parent)

    def admit(self, request: Request, budget: int, whole: int, read: bool = True, promised: int = 0) -> int:
        """Match the longest cached prefix and allocate the first chunk, in one go.

        All tokens of the request must fit into the free blocks but `promised`, hits that are free included, though only
        the chunk's blocks are taken. The chunk is what is left to compute, at most `budget` tokens; what is left must
        not be cut if it is at most `whole` tokens. Without `read` nothing is matched. Returns the tokens to compute in
        this step and sets `num_computed_tokens` to the hit; 0, with nothing changed, when refused.

        With recurrent state a slot has to be free, too, and a hit ends where there is a snapshot. Who would hit one
        that this very plan writes waits for the next plan.
        """
        pool, size, state = self.pool, self.block_size, self.state
        if state is not None and not state.pool.num_free:
            return 0
        num_tokens = len(request.token_ids)
        # At least one token is computed: its logits are needed.
        hits = self._match(request, (num_tokens - 1) // size if read else 0)
        if self.encoder is not None and request.media:
            while (length := self.encoder.outside(request, len(hits[0]) * size) // size) < len(hits[0]):
                hits = self._match(request, length)
        junction = len(hits[0]) * size
        if state is not None:
            while (length := state.match(request.block_hashes[: len(hits[0])])) < len(hits[0]):
                hits = self._match(request, length)
            if state.is_coming(request.block_hashes[len(hits[0]) : junction // size]):
                return 0
        num_hits = len(hits[0])
        remaining = num_tokens - num_hits * size
        num_new = min(remaining, budget)
        if self.encoder is not None and num_hits * size < request.media_end:
            num_new = self.encoder.reach(request, num_hits * size, num_new)
        if state is not None:
            num_new = state.cut(num_hits * size, num_new, num_tokens, junction - junction % state.grain)
        if not num_new or num_new < remaining <= whole:
            return 0
        num_missing, needed = -(-num_tokens // size) - num_hits, promised
        for group, blocks in zip(self.groups, hits, strict=True):
            free_hits = sum(1 for block in blocks if pool.refs[block] == 0)
            # What a window leaves behind comes back, so that no more is taken than the group has at one moment.
            needed += min(num_missing + free_hits, group.blocks_for(num_tokens))
        if needed > pool.num_free:
            return 0
        request.num_computed_tokens = num_computed = num_hits * size
        left = [group.num_left(num_computed) for group in self.groups]
        for blocks, start in zip(hits, left, strict=True):
            for block in blocks[start:] if start else blocks:
                pool.share(block)
        self.tables[request.id] = BlockTable(hits, left)
        if state is not None:
            state.start(request, num_computed, junction)
        self.grow(request, num_computed + num_new)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            if self.caching and read and request.first_scheduled is None:  # who starts over was counted before
                self.prefix_queries += num_tokens
                self.prefix_hits += request.num_computed_tokens
        return num_new

    def chunk(self, request: Request, most: int) -> int:
        """Tokens that a step computes of a running request, at most `most`."""
        computed, target = request.num_computed_tokens, request.target
        num_new = min(target - computed, most)
        if self.encoder is not None and computed < request.media_end:
            num_new = self.encoder.reach(request, computed, num_new)
        if self.state is None:
            return num_new
        return self.state.cut(computed, num_new, target, self.state.held[request.id].junction)

    def grow(self, request: Request, num_tokens: int) -> int:
        """Append blocks until the table holds `num_tokens`. Returns the entries appended; -1, with none: no room."""
        table, pool = self.tables[request.id], self.pool
        groups = table.groups
        missing = -(-num_tokens // self.block_size) - len(groups[0])
        if missing <= 0:
            return 0
        computed = request.num_computed_tokens - request.num_in_flight_drafts  # at least
        table.left = [
            group.leave_behind(blocks, left, computed)
            for group, blocks, left in zip(self.groups, groups, table.left, strict=True)
        ]
        if missing * self.num_groups > pool.num_free:
            return -1
        for blocks in groups:
            blocks += pool.take_many(missing)
        return missing

    def register(self, request: Request, num_tokens: int, registered: Registered) -> None:
        """Let others find the full blocks among the first `num_tokens`, which are computed or about to be, and whose
        values are known. What is new is noted in `registered`."""
        table, hashes = self.tables[request.id], request.block_hashes
        start, end = table.num_registered, min(num_tokens // self.block_size, len(hashes))
        if start >= end:
            return
        for blocks, group, left in zip(table.groups, self.groups, table.left, strict=True):
            # A narrow window leaves a block behind before all its tokens are known: then nobody will find it.
            first, suffix = max(start, left), group.suffix
            keys = [key + suffix for key in hashes[first:end]]
            if self.events is not None:
                self._publish(request, group, first, keys)
            for block, key in zip(blocks[first:end], keys, strict=True):
                self.pool.register(block, key)
                registered.append((self.pool, block, key))
        table.num_registered = end

    def _publish(self, request: Request, group: KVGroup, first: int, keys: list[bytes]) -> None:
        """What of these blocks, the first of which is the request's block `first`, nobody has had so far."""
        assert self.events is not None
        size, find, tokens = self.block_size, self.pool.find, request.token_ids
        new = [index for index, key in enumerate(keys) if find(key) is None]
        # Runs: a block's index minus its position in the list is the same for neighbours.
        for _, run in groupby(enumerate(new), lambda pair: pair[1] - pair[0]):
            indices = [index for _, index in run]
            start, end = first + indices[0], first + indices[-1] + 1
            self.events.stored(
                group.index, keys[indices[0] : indices[-1] + 1],
                request.block_hashes[start - 1] if start else None, tokens[start * size : end * size],
                request.cache_salt, start == 0, request.adapter, pictures_of(request, size, start, end),
            )  # fmt: skip

    def unregister(self, request: Request, num_tokens: int) -> None:
        """Of what this request has registered, forget blocks beyond its first `num_tokens`: they are computed anew."""
        table, end = self.tables[request.id], num_tokens // self.block_size
        for blocks in table.groups:
            for block in blocks[end : table.num_registered]:
                if self.pool.keys[block] is not None:
                    self.pool.revoke(block)
        table.num_registered = min(table.num_registered, end)

    def revoke(self, registered: Registered) -> None:
        """Forget keys whose content was never computed; a block that has a new key by now keeps it."""
        for pool, block, key in registered:
            if pool.keys[block] == key:
                pool.revoke(block)
        if self.state is not None:
            self.state.drop(registered)

    def distrust(self, request: Request) -> None:
        """Forget every block with the content of a request's, whether it still runs or not: it may be worthless."""
        for key in request.block_hashes:
            for group in self.groups:
                while (block := self.pool.find(key + group.suffix)) is not None:
                    self.pool.revoke(block)
        if self.state is not None:
            self.state.distrust(request)
        if self.encoder is not None:
            self.encoder.distrust(request)

    def free(self, request: Request) -> None:
        """Give up all blocks of a request, its tail first, its slot and its pictures."""
        for blocks in self.tables.pop(request.id).groups:
            self.pool.release(reversed(blocks))
        if self.state is not None:
            self.state.free(request)
        if self.encoder is not None:
            self.encoder.free(request)

    def check_invariants(self, running: Mapping[int, Request], thorough: bool) -> None:
        """Raises InvariantError unless the running requests, and only these, hold blocks.

        `thorough`: and every reference is an entry of a table, and every key in a table stands for a full block of
        tokens that are known and computed (or about to be). That is O(blocks), some 0.2 s for 100,000 of them.
        """
        require(self.tables.keys() == running.keys(), "tables of requests that do not run, or none for one")
        if not running:
            require(self.num_free_blocks == self.pool.num_blocks - 1, "nothing runs, but blocks are referenced")
        if self.encoder is not None:
            self.encoder.check_invariants(running)
        if not thorough:
            return
        self.pool.check_invariants()
        if self.state is not None:
            self.state.check_invariants(running)
        refs = [0] * self.pool.num_blocks
        refs[0] = 1
        for id, table in self.tables.items():
            request, length = running[id], len(table.groups[0])
            committed = min(request.num_computed_tokens, request.num_tokens) // self.block_size
            require(length * self.block_size >= request.num_computed_tokens, f"{request}: computed beyond its blocks")
            require(len(request.block_hashes) == request.num_tokens // self.block_size * self.caching, "hashes missing")
            for blocks, group, left in zip(table.groups, self.groups, table.left, strict=True):
                require(len(blocks) == length, "tables of the groups differ in length")
                require(left <= group.num_left(request.num_computed_tokens), f"{request}: left behind too early")
                require(length - left <= group.blocks_for(length * self.block_size), f"{request}: more than its window")
                suffix = group.suffix
                for index, block in enumerate(blocks):
                    require((block == NULL_BLOCK) == (index < left), f"{request}: null block in a table, or none")
                    if block == NULL_BLOCK:
                        continue
                    refs[block] += 1
                    if (key := self.pool.keys[block]) is not None:
                        require(index < committed, f"{request}: block {index} registered before its tokens")
                        expected = request.block_hashes[index] + suffix
                        require(key == expected, f"{request}: block {index} has a wrong key")
        require(refs == self.pool.refs, "reference counts differ from the tables")

    def _match(self, request: Request, max_blocks: int) -> list[list[int]]:
        """The blocks of the longest prefix that every group holds, one list a group; at most `max_blocks` each.

        Each group in turn shortens what the others have found, until all agree. Full groups come first, so that
        windows are not looked for in all of a prompt that nobody has read.
        """
        keys = request.block_hashes[:max_blocks]
        hits: list[list[int]] = [[] for _ in self.groups]
        num_agreed = 0
        for index in cycle(range(self.num_groups)):
            hits[index] = self.groups[index].match(keys)
            num_agreed = num_agreed + 1 if len(hits[index]) == len(keys) else 1
            if num_agreed == self.num_groups:
                return hits
            keys = keys[: len(hits[index])]
        raise AssertionError("no group")


def extra_keys(request: Request, block_size: int, start: int, end: int) -> dict[int, tuple[bytes, ...]]:
    """What tells the blocks from `start` to `end` apart beside their tokens, by the index of the block from which on it
    does: the chain carries it on. The cache salt and the adapter, by the id of its load, from the first block on;
    pictures in every block that has some of their tokens."""
    found = media_keys(request, block_size, start, end) if start * block_size < request.media_end else {}
    extras: tuple[bytes, ...] = ()
    if request.cache_salt is not None:
        extras = (b"salt" + request.cache_salt.encode("utf-8", "surrogatepass"),)
    if request.adapter:
        extras += (b"adapter" + request.adapter.to_bytes(8, "little"),)
    if extras and not start:
        found[0] = extras + found.get(0, ())
    return found
