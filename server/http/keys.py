"""API keys as the server holds them: digests, each with a name for the log and what it may use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256

from ..client.board import Board
from ..generation.quota import Quota
from ..options.http import HttpConfig


@dataclass(frozen=True)
class Key:
    digest: bytes
    name: str  # in the log
    quota: Quota
    may_prioritize: bool  # its requests may set `priority`

    @property
    def owner(self) -> str:
        """Whose requests are whose: see auth.owner_of."""
        return self.digest.hex()


class Keys:
    """A set of keys, found by their digests."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = {key.digest: key for key in keys}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: bytes | None) -> Key | None:
        if presented is None:
            return None
        # How long this takes may tell how much of a digest is that of a key. Nobody can do anything with it: who wants
        # to come nearer needs a text with a digest of his choice, as hard to find as the key.
        return self._keys.get(sha256(presented).digest())

    def __contains__(self, key: Key) -> bool:
        return key.digest in self._keys

    def renewed(self, newer: Keys) -> Keys:
        """The newer ones, of which those that were here have what they used in the last minute and what they have
        open: reading the file again is no way to a fresh share."""
        keys = []
        for key in newer._keys.values():
            older = self._keys.get(key.digest)
            if older is not None:
                key.quota.open = older.quota.open
            kept = older is not None and older.quota.limits == key.quota.limits
            keys.append(replace(key, quota=older.quota) if older is not None and kept else key)
        return Keys(keys)


def load_keys(config: HttpConfig, option: str, board: Board | None = None) -> Keys:
    """`option`: api_key or admin_api_key. From the option, the lines of its file, and the environment. Administrators
    have no limits but those that their file gives them. Raises ConfigError."""
    usual = (config.key_requests_per_minute, config.key_tokens_per_minute, config.max_open_requests)
    if option != "api_key":
        usual = (0, 0, 0)
    keys: dict[bytes, Key] = {}
    for line in config.key_lines(option):  # what the file says of a key comes before where else it stands
        own = (line.requests_per_minute, line.tokens_per_minute, line.max_open_requests)
        requests, tokens, opened = (a if b is None else b for a, b in zip(usual, own, strict=True))
        may_prioritize = option == "admin_api_key" or not {line.name, "*"}.isdisjoint(config.priority_keys)
        digest = sha256(line.key.encode()).digest()
        quota = Quota(requests, tokens, board, digest, opened)
        keys.setdefault(digest, Key(digest, line.name, quota, may_prioritize))
    return Keys(keys.values())
