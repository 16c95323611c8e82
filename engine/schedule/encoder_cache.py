"""Which features of pictures the device keeps, which of them a step computes, and how far prompts may go without.

The tower makes features of a whole picture, which stand for some tokens of a prompt. They are kept as an entry for as
long as a running request has not computed all of these tokens, and then until their room is needed, the least recently
used one first: another request with the same picture, or the same one after a preemption, finds them.

A request holds the entries of a picture that it is in the middle of, and perhaps of the next ones, and goes on past
these whatever others hold. Who waits for room waits before a picture and holds nothing, so that nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ..errors import require
from ..link.media import MediaItem
from ..link.plan import AxisPositions, Embed, Encode, LastSeen
from ..options.scheduler_config import SchedulerConfig
from ..vision.positions import axis_positions, merged
from .request import Request

Key = tuple[str | None, bytes]  # the cache salt, the picture's own

# What a step may encode: one of the largest pictures or many small ones, which are as long in attention at most, and
# no more in all else. Beside decodes, which all wait for it, less. One picture may be encoded in any step.
STEP_PATCHES, PATCHES_BESIDE_DECODES = 16_384, 4_096


@dataclass(slots=True, eq=False)
class Entry:
    """Features on the device, or about to be there."""

    number: int
    key: Key
    size: int  # features
    num_users: int = 0  # running requests that hold it


@dataclass(slots=True, eq=False)
class Holder:
    """A running request with pictures."""

    request: Request
    entries: dict[int, Entry] = field(default_factory=dict)  # by index into its media


class EncoderCache:
    """The books on entries. Which request is where, they read of the requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.capacity = config.encoder_cache_tokens
        self.tokens, self.merge = config.media_tokens, config.media_merge
        self.three_axes, self.whole = config.media_axes, config.media_whole
        self.longest, self.grain = config.longest_media, config.grain
        self.patch_cost = config.patch_cost if config.max_mixed_tokens else 0.0
        self.chunked = config.enable_chunked_prefill
        self.entries: dict[Key, Entry] = {}  # the least recently used one first
        self.held: dict[int, Holder] = {}  # by request id
        self.pending: list[tuple[Entry, Encode]] = []  # for the next plan
        self.forgotten: list[int] = []  # numbers that the next plan tells the device to forget
        self.orphans: set[Entry] = set()  # that nobody can find any more, but some still hold
        self.num_used = 0  # features of all entries
        self.num_queries = self.num_hits = 0  # pictures that were looked up, and found
        self.num_encoded_patches = 0
        self._last_number = 0
        self._budget = 0  # patches that the step may still encode
        self._cost = 0.0  # of each, in tokens
        self._alone = True  # no prompt is in the step yet

    # ---- what requests may have ----
    def problem(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> str | None:
        """Why a request cannot have these pictures. Whoever makes them has to have made them as config.json says."""
        end, sizes = 0, []
        for index, item in enumerate(media):
            of = f"picture {index + 1} of the prompt"
            frames, rows, columns = item.grid
            if item.start < end or item.length < 1 or item.start + item.length > len(token_ids):
                return f"{of}: its tokens {item.start} … {item.start + item.length} lie outside of it, or in another's"
            end = item.start + item.length
            if min(item.grid) < 1 or min(item.size) < 1 or rows % self.merge or columns % self.merge:
                return f"{of}: {rows} x {columns} patches of {frames} frames cannot be merged by {self.merge}"
            if len(item.pixels) != 3 * prod(item.size):
                return f"{of}: {len(item.pixels)} bytes are not the pixels of {item.size}"
            if self.whole and item.length > self.longest:
                return (
                    f"{of}: its {item.length} tokens have to be computed in one step, and steps have room for "
                    f"{self.longest} of them: send a smaller one, or raise --max-num-batched-tokens"
                )
            size = len(self._tokens_of(token_ids, item, item.start, end))
            if not size or (self.three_axes and size != prod(merged(item, self.merge))):
                return f"{of}: {size} of its {item.length} tokens stand for {rows} x {columns} patches"
            sizes.append(size)
        needed = max(sizes, default=0) if self.chunked else sum(sizes)
        if needed > self.capacity:
            return (
                f"the prompt's pictures have {needed} tokens, and the encoder cache has room for {self.capacity}: send "
                "smaller ones, or raise --mm-encoder-cache-tokens"
            )
        return None

    def begin(self, beside_decodes: bool) -> None:
        """Before prompts are planned: what requests have behind them they hold no longer."""
        for holder in self.held.values():
            media, computed = holder.request.media, holder.request.num_computed_tokens
            for index in [i for i in holder.entries if media[i].start + media[i].length <= computed]:
                self._let_go(holder.entries.pop(index))
        self._budget = PATCHES_BESIDE_DECODES if beside_decodes else STEP_PATCHES
        self._budget -= sum(prod(encode.item.grid) for _, encode in self.pending)
        self._cost = self.patch_cost if beside_decodes else 0.0
        self._alone = True

    def reach(self, request: Request, start: int, num_new: int) -> int:
        """Tokens of the chunk that a step may compute instead of `num_new` behind the first `start`: as far as the
        features are there, or can be computed in the step. 0: none.

        Beside decodes, what is encoded takes room of the chunk, as it takes time: a picture for which there is too
        little waits for a step in which no other prompt is.
        """
        held, budget, none_yet, alone = self._num_held(), self._budget, not self.pending, self._alone
        mine = self._entries_of(request)
        for index, item in self._items(request, start, start + num_new):
            before, whole = max(0, item.start - start), item.start + item.length - start
            if before >= num_new:
                break
            if self.whole and num_new < whole:
                return before
            if index in mine:
                continue
            entry = self.entries.get(_key(request, item))
            if entry is None or not entry.num_users:
                size = entry.size if entry is not None else self._size(request, item)
                held += size
                if held > self.capacity:
                    return before
            if entry is None:
                patches = prod(item.grid)
                cost, least = int(self._cost * patches), min(num_new, whole if self.whole else before + self.grain)
                too_much = (patches > budget and not none_yet) or (num_new - cost < least and not alone)
                if self.chunked and too_much:
                    return before
                num_new = max(num_new - cost, least)
                budget, none_yet, alone = budget - patches, False, False
        return num_new

    def take(self, request: Request, num_new: int) -> int:
        """For a running request that computes `num_new` tokens of its prompt in this step, as many as `reach` allows:
        the entries that these need are its own, and those that are not there are encoded. Returns what that costs, in
        tokens."""
        self._alone = False
        start, num_patches = request.num_computed_tokens, 0
        if start >= request.media_end:
            return 0
        holder = self.held.setdefault(request.id, Holder(request))
        for index, item in self._items(request, start, start + num_new):
            if index in holder.entries:
                continue
            key = _key(request, item)
            entry = self.entries.pop(key, None)
            self.num_queries += 1
            if entry is None:
                size = self._size(request, item)
                self._last_number += 1
                entry = Entry(self._last_number, key, size)
                self.num_used += size
                self.pending.append((entry, Encode(entry.number, item, size)))
                num_patches += prod(item.grid)
            else:
                self.num_hits += 1
            entry.num_users += 1
            self.entries[key] = holder.entries[index] = entry
        self._evict()
        self._budget -= num_patches
        return int(self._cost * num_patches)

    def outside(self, request: Request, num_tokens: int) -> int:
        """Of a prefix of so many tokens, how many can be a hit: where tokens of a picture see later ones of it, a chunk
        does not begin in the middle of one."""
        if self.whole:
            for item in request.media:
                if item.start < num_tokens < item.start + item.length:
                    return item.start
        return num_tokens

    # ---- the plan ----
    def hand_over(self) -> tuple[list[int], list[Encode]]:
        """Entries that are forgotten, and those that are made, with the plan that is given out now."""
        forgotten, pending = self.forgotten, self.pending
        self.forgotten, self.pending = [], []
        for _, encode in pending:
            self.num_encoded_patches += prod(encode.item.grid)
        return forgotten, [encode for _, encode in pending]

    def embeds(self, request: Request, index: int, start: int, num_new: int) -> list[Embed]:
        """Where the features of its entries go among these tokens, which are of row `index` of the plan."""
        found, holder = [], self.held[request.id]
        for number, item in self._items(request, start, start + num_new):
            first, last = max(start, item.start), min(start + num_new, item.start + item.length)
            at = self._tokens_of(request.token_ids, item, first, last)
            passed = len(self._tokens_of(request.token_ids, item, item.start, first))
            for run in _runs(at):
                token = int(run[0]) - start
                found.append(Embed(index, token, len(run), holder.entries[number].number, passed))
                passed += len(run)
        return found

    def axes(self, request: Request, index: int, start: int, num_new: int) -> AxisPositions | None:
        """Where these tokens are, if positions have three axes."""
        if not self.three_axes:
            return None
        return AxisPositions(index, axis_positions(request.media, self.merge, start, start + num_new).tobytes())

    def seen(self, request: Request, index: int, start: int, num_new: int) -> LastSeen | None:
        """How far these tokens see, if those of a picture see each other."""
        if not self.whole:
            return None
        positions = np.arange(start, start + num_new, dtype=np.int32)
        for _, item in self._items(request, start, start + num_new):
            for run in _runs(self._tokens_of(request.token_ids, item, item.start, item.start + item.length)):
                positions[max(0, run[0] - start) : max(0, run[-1] + 1 - start)] = run[-1]
        return LastSeen(index, positions.tobytes())

    # ---- what ends ----
    def free(self, request: Request) -> None:
        """It runs no longer."""
        if (holder := self.held.pop(request.id, None)) is not None:
            for entry in holder.entries.values():
                self._let_go(entry)

    def distrust(self, request: Request) -> None:
        """Its pictures' features may be why it failed: they are computed anew for whoever comes."""
        for item in request.media:
            if (entry := self.entries.get(_key(request, item))) is not None:
                self._lose(entry)

    def lose(self, numbers: Mapping[int, str] | set[int]) -> set[Key]:
        """Entries that were not made, or perhaps not. Returns the keys of those that there still are."""
        lost = [entry for entry in self.entries.values() if entry.number in numbers]
        for entry in lost:
            self._lose(entry)
        return {entry.key for entry in lost}

    def needs(self, request: Request, keys: set[Key]) -> bool:
        """Whether steps of this request have read one of these entries, or are about to."""
        end = request.num_computed_tokens
        return any(_key(request, item) in keys for _, item in self._items(request, 0, end))

    def check_invariants(self, running: Mapping[int, Request]) -> None:
        """Raises InvariantError unless every entry is held by running requests alone, and counted once."""
        require(self.held.keys() <= running.keys(), "features held by requests that do not run")
        users: dict[Entry, int] = {}
        for holder in self.held.values():
            for entry in holder.entries.values():
                users[entry] = users.get(entry, 0) + 1
        every = [*self.entries.values(), *self.orphans]
        require(all(entry.num_users == users.get(entry, 0) for entry in every), "users of features miscounted")
        require(users.keys() <= set(every), "features held that are nowhere")
        require(all(key == entry.key for key, entry in self.entries.items()), "features under another key")
        require(self.num_used == sum(entry.size for entry in every), "features miscounted")
        require(self.num_used <= self.capacity, "more features than there is room for")
        require(all(entry in set(every) for entry, _ in self.pending), "features to be made that are nowhere")

    def counts(self) -> dict[str, int]:
        """Fields of EngineStats."""
        return {
            "num_encoder_tokens": self.capacity,
            "num_encoder_tokens_used": self.num_used,
            "encoder_queries": self.num_queries,
            "encoder_hits": self.num_hits,
            "num_encoded_patches": self.num_encoded_patches,
        }

    def _items(self, request: Request, start: int, end: int) -> Iterator[tuple[int, MediaItem]]:
        """Those that have some of the tokens from `start` to `end`, with their indexes."""
        for index, item in enumerate(request.media):
            if item.start >= end:
                return
            if item.start + item.length > start:
                yield index, item

    def _tokens_of(self, token_ids: Sequence[int], item: MediaItem, start: int, end: int) -> np.ndarray:
        """Indexes of those between `start` and `end` that features stand for."""
        ids = np.asarray(token_ids[start:end], dtype=np.int32)
        return start + np.flatnonzero(ids == self.tokens[item.is_video])

    def _size(self, request: Request, item: MediaItem) -> int:
        return len(self._tokens_of(request.token_ids, item, item.start, item.start + item.length))

    def _entries_of(self, request: Request) -> Mapping[int, Entry]:
        holder = self.held.get(request.id)
        return {} if holder is None else holder.entries

    def _num_held(self) -> int:
        """Features that cannot go."""
        return sum(e.size for e in (*self.entries.values(), *self.orphans) if e.num_users)

    def _evict(self) -> None:
        for entry in [entry for entry in self.entries.values() if not entry.num_users]:
            if self.num_used <= self.capacity:
                return
            del self.entries[entry.key]
            self._forget(entry)

    def _let_go(self, entry: Entry) -> None:
        entry.num_users -= 1
        if not entry.num_users and entry in self.orphans:
            self.orphans.remove(entry)
            self._forget(entry)

    def _lose(self, entry: Entry) -> None:
        del self.entries[entry.key]
        if entry.num_users:
            self.orphans.add(entry)
        else:
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self.num_used -= entry.size
        left = [pending for pending in self.pending if pending[0] is not entry]
        if len(left) < len(self.pending):
            self.pending = left  # no device has heard of it
        else:
            self.forgotten.append(entry.number)


def _key(request: Request, item: MediaItem) -> Key:
    return request.cache_salt, item.key


def _runs(indexes: np.ndarray) -> list[np.ndarray]:
    """Growing numbers, cut where one does not follow the other."""
    return [run for run in np.split(indexes, np.flatnonzero(np.diff(indexes) > 1) + 1) if len(run)]


def media_keys(request: Request, block_size: int, first: int, end: int) -> dict[int, tuple[bytes, ...]]:
    """What tells blocks `first` to `end` apart that have the same placeholders: the pictures in each, and where in
    these it begins."""
    found: dict[int, tuple[bytes, ...]] = {}
    for item in request.media:
        last = min(end, -(-(item.start + item.length) // block_size))
        for block in range(max(first, item.start // block_size), last):
            offset = block * block_size - item.start
            found[block] = (*found.get(block, ()), b"media" + item.key + offset.to_bytes(8, "little", signed=True))
    return found


def pictures_of(request: Request, block_size: int, first: int, end: int) -> list[tuple[str, ...]]:
    """The names of the pictures in each of the blocks `first` to `end`; empty: no block has any."""
    if first * block_size >= request.media_end:
        return []
    found: list[tuple[str, ...]] = []
    for block in range(first, end):
        start = block * block_size
        here = (i for i in request.media if i.start < start + block_size and i.start + i.length > start)
        found.append(tuple(item.key.hex() for item in here))
    return found
