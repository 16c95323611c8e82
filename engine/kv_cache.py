"""Which blocks of the KV cache belong to which request, and which prefixes the cache still holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from hashlib import sha256

from .block_pool import BlockPool
from .config import SchedulerConfig
from .invariants import require
from .request import Request

Registered = list[tuple[int, bytes]]  # (block, key): what has to be revoked should the step fail


class BlockTable:
    """The blocks of one request, in the order of its tokens; append-only, of one length in every KV group."""

    __slots__ = ("groups", "num_registered")

    def __init__(self, groups: list[list[int]]) -> None:
        self.groups = groups
        self.num_registered = len(groups[0])  # leading blocks that can be found by others


class KVCacheManager:
    """Block tables of the running requests over one pool; every block of a table belongs to one KV group."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.num_groups = config.num_groups
        self.caching = config.enable_prefix_caching
        self.pool = BlockPool(config.num_blocks)
        self.max_tokens = (config.num_blocks - 1) // config.num_groups * config.block_size  # of one request alone
        self.tables: dict[int, BlockTable] = {}  # by request id
        self.prefix_queries = 0  # tokens looked up; resumed requests would flatter the rate and are not counted
        self.prefix_hits = 0  # tokens found
        # A secret start of every chain: keys cannot be computed outside of this process (prefix-cache timing attacks).
        self.seed = os.urandom(32)
        self.group_suffixes = [b"" if group == 0 else group.to_bytes(2, "little") for group in range(config.num_groups)]

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the tokens, all groups together."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def too_small(self, request: Request) -> str:
        """What to tell a request that the cache cannot hold even alone."""
        sizes = f"{request.num_tokens} tokens do not fit the KV cache, which holds {self.max_tokens} in all"
        return f"{sizes}: shorten the request, or raise --gpu-memory-utilization or --kv-cache-memory-bytes"

    def extend_hashes(self, request: Request) -> None:
        """Hash the blocks that have filled since the last call: SHA-256 of (parent, int32 token ids, extra keys).

        The extra key is the cache salt, in the first block only: the chain carries it on. Nothing to do without
        prefix caching.
        """
        size, hashes, tokens = self.block_size, request.block_hashes, request.token_ids
        start, end = len(hashes), len(tokens) // size
        if start >= end or not self.caching:
            return
        ids = tokens[start * size : end * size]
        if sys.byteorder == "big":
            ids.byteswap()
        data, stride = ids.tobytes(), size * ids.itemsize
        parent = hashes[-1] if hashes else self.seed
        for offset in range(0, len(data), stride):
            content = parent + data[offset : offset + stride]
            if not hashes and request.cache_salt is not None:
                content += b"salt" + request.cache_salt.encode("utf-8", "surrogatepass")
            parent = sha256(content).digest()
            hashes.append(parent)

    def admit(self, request: Request, budget: int, whole: int, read: bool = True, promised: int = 0) -> int:
        """Match the longest cached prefix and allocate the first chunk, in one go.

        All tokens of the request must fit into the free blocks but `promised`, hits that are free included, though only
        the chunk's blocks are taken. The chunk is what is left to compute, at most `budget` tokens; what is left must
        not be cut if it is at most `whole` tokens. Without `read` nothing is matched. Returns the tokens to compute in
        this step and sets `num_computed_tokens` to the hit; 0, with nothing changed, when refused.
        """
        pool, size = self.pool, self.block_size
        num_tokens = len(request.token_ids)
        # At least one token is computed: its logits are needed.
        hits = self._match(request, (num_tokens - 1) // size if read else 0)
        num_hits = len(hits[0])
        remaining = num_tokens - num_hits * size
        num_new = min(remaining, budget)
        if num_new < remaining <= whole:
            return 0
        free_hits = sum(1 for blocks in hits for block in blocks if pool.refs[block] == 0)
        needed = self.num_blocks_for(num_tokens) - num_hits * self.num_groups + free_hits
        if needed + promised > pool.num_free:
            return 0
        for blocks in hits:
            for block in blocks:
                pool.share(block)
        self.tables[request.id] = BlockTable(hits)
        request.num_computed_tokens = num_hits * size
        self.grow(request, request.num_computed_tokens + num_new)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            if self.caching and read and request.first_scheduled is None:  # who starts over was counted before
                self.prefix_queries += num_tokens
                self.prefix_hits += request.num_computed_tokens
        return num_new

    def grow(self, request: Request, num_tokens: int) -> int:
        """Append blocks until the table holds `num_tokens`. Returns the entries appended; -1, nothing done: no room."""
        groups, pool = self.tables[request.id].groups, self.pool
        missing = -(-num_tokens // self.block_size) - len(groups[0])
        if missing <= 0:
            return 0
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
        for blocks, suffix in zip(table.groups, self.group_suffixes, strict=True):
            pairs = [(block, key + suffix) for block, key in zip(blocks[start:end], hashes[start:end], strict=True)]
            for block, key in pairs:
                self.pool.register(block, key)
            registered += pairs
        table.num_registered = end

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
        for block, key in registered:
            if self.pool.keys[block] == key:
                self.pool.revoke(block)

    def distrust(self, request: Request) -> None:
        """Forget every block with the content of a request's, whether it still runs or not: it may be worthless."""
        for key in request.block_hashes:
            for suffix in self.group_suffixes:
                while (block := self.pool.find(key + suffix)) is not None:
                    self.pool.revoke(block)

    def free(self, request: Request) -> None:
        """Give up all blocks of a request, its tail first."""
        for blocks in self.tables.pop(request.id).groups:
            self.pool.release(reversed(blocks))

    def check_invariants(self, running: Mapping[int, Request], thorough: bool) -> None:
        """Raises InvariantError unless the running requests, and only these, hold blocks.

        `thorough`: and every reference is an entry of a table, and every key in a table stands for a full block of
        tokens that are known and computed (or about to be). That is O(blocks), some 0.2 s for 100,000 of them.
        """
        require(self.tables.keys() == running.keys(), "tables of requests that do not run, or none for one")
        if not running:
            require(self.num_free_blocks == self.pool.num_blocks - 1, "nothing runs, but blocks are referenced")
        if not thorough:
            return
        self.pool.check_invariants()
        refs = [0] * self.pool.num_blocks
        refs[0] = 1
        for id, table in self.tables.items():
            request, length = running[id], len(table.groups[0])
            committed = min(request.num_computed_tokens, request.num_tokens) // self.block_size
            require(length * self.block_size >= request.num_computed_tokens, f"{request}: computed beyond its blocks")
            require(len(request.block_hashes) == request.num_tokens // self.block_size * self.caching, "hashes missing")
            for blocks, suffix in zip(table.groups, self.group_suffixes, strict=True):
                require(len(blocks) == length, "tables of the groups differ in length")
                for index, block in enumerate(blocks):
                    require(block != 0, "null block in a table")
                    refs[block] += 1
                    if (key := self.pool.keys[block]) is not None:
                        require(index < committed, f"{request}: block {index} registered before its tokens")
                        expected = request.block_hashes[index] + suffix
                        require(key == expected, f"{request}: block {index} has a wrong key")
        require(refs == self.pool.refs, "reference counts differ from the tables")

    def _match(self, request: Request, max_blocks: int) -> list[list[int]]:
        """The blocks of the longest prefix that every group holds, one list a group; at most `max_blocks` each."""
        hits: list[list[int]] = [[] for _ in range(self.num_groups)]
        for key in request.block_hashes[:max_blocks]:
            found = []
            for suffix in self.group_suffixes:
                block = self.pool.find(key + suffix)
                if block is None:
                    return hits
                found.append(block)
            for blocks, block in zip(hits, found, strict=True):
                blocks.append(block)
        return hits
