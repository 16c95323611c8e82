"""Which of several engines a prompt goes to: where its first token is expected soonest. Plain numbers, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 64  # tokens that one key stands for: a multiple of the cache's blocks, and few enough to look up
BYTES = 4 * BLOCK
# A request that is open slows the steps of its engine, as so many more tokens of a prompt would.
OPEN_TOKENS = 64
# So many tokens of prompts a request that is open always wait somewhere, for one of the next steps: where they do says
# nothing of the one after that. Without it, engines that are as busy get unequal numbers of open requests, and the one
# that has more of them makes all of its own wait in each step.
PASSING_TOKENS = 32
MAX_SESSIONS = 65_536
# So many tokens more before its first one than elsewhere a session waits for: with more, its engine is too busy.
PATIENCE = 16_384

Keys = list[int]


@dataclass(frozen=True, slots=True)
class Route:
    """What a client says of where its request should go."""

    session: str | None = None  # requests of one session go to one engine, where their prefixes are
    engine: int | None = None  # this one, and no other
    together: bool = False  # the session is one request's prompts: they stay together whatever the load


ANYWHERE = Route()


@dataclass(frozen=True, slots=True)
class Load:
    """Of one engine."""

    waiting_tokens: int  # of prompts that have no token of their answer yet, without what was found in the cache
    num_open: int  # requests without a last word


def prefix_keys(prompt: bytes, salt: str | None) -> Keys:
    """Of each full block, with all before it; `prompt`: int32. They mean something in this process only, which is
    enough: whoever could make two prompts collide would gain a longer wait."""
    key, keys = hash(salt), []
    for start in range(0, len(prompt) - BYTES + 1, BYTES):
        key = hash((key, prompt[start : start + BYTES]))
        keys.append(key)
    return keys


class Router:
    """What it believes of each engine's prefix cache: the blocks that it has sent there, the least recently used
    forgotten first, as the engine does."""

    def __init__(self, num_engines: int, cache_tokens: int) -> None:
        """`cache_tokens`: of one engine."""
        self._blocks = max(1, cache_tokens // BLOCK)
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]
        self._sessions: OrderedDict[int, int] = OrderedDict()  # by hash: a client's name may be long

    def choose(
        self, keys: Keys, num_tokens: int, loads: Sequence[Load | None], session: str | None = None,
        together: bool = False,
    ) -> tuple[int, int]:  # fmt: skip
        """→ (engine, tokens that it probably has cached). `loads`: of each engine, None where it takes nothing; one of
        them does. A session stays where it was as long as that engine takes requests, and unless it would wait there
        for PATIENCE more than elsewhere; `together`: even then."""
        hits = self.hits(keys)
        costs = {
            index: load.waiting_tokens + num_tokens - BLOCK * hits[index] + OPEN_TOKENS * load.num_open
            for index, load in enumerate(loads)
            if load is not None
        }
        passing = PASSING_TOKENS * min(load.num_open for load in loads if load is not None)
        _, _, _, chosen = min(
            (costs[index] - min(passing, load.waiting_tokens), load.waiting_tokens, len(known), index)
            for index, (load, known) in enumerate(zip(loads, self._known, strict=True))
            if load is not None
        )
        name = None if session is None else hash(session)
        last = None if name is None else self._sessions.get(name)
        if last is not None and last in costs and (together or costs[last] <= costs[chosen] + PATIENCE):
            chosen = last
        self._remember(keys, chosen)
        if name is not None:
            self._sessions[name] = chosen
            self._sessions.move_to_end(name)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen, min(BLOCK * hits[chosen], max(0, num_tokens - 1))

    def hits(self, keys: Keys) -> list[int]:
        """Leading blocks that each engine probably has."""
        found = []
        for known in self._known:
            count = 0
            for key in keys:
                if key not in known:
                    break
                count += 1
            found.append(count)
        return found

    def add(self) -> None:
        """One engine more, which has nothing yet."""
        self._known.append(OrderedDict())

    def remove_last(self) -> None:
        self._known.pop()

    def forget(self, engine: int) -> None:
        """It has died, and its cache with it."""
        self._known[engine].clear()

    def _remember(self, keys: Keys, engine: int) -> None:
        """The tail first, so that a prefix outlives what follows it, as in the engine's own cache."""
        known = self._known[engine]
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._blocks:
            known.popitem(last=False)
