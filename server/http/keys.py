"""API keys as the server holds them: digests, each with a name for the log and what it may use."""

from __future__ import annotations

import hmac
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
    """A set of keys. Comparing takes the same time whatever is presented."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = {key.digest: key for key in keys}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: bytes | None) -> Key | None:
        if presented is None:
            return None
        digest = sha256(presented).digest()
        found = None
        for known, key in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = key
        return found

    def __contains__(self, key: Key) -> bool:
        return key.digest in self._keys

    def renewed(self, newer: Keys) -> Keys:
        """The newer ones, of which those that were here have what they used in the last minute: reading the file again
        is no way to a fresh share."""
        keys = []
        for key in newer._keys.values():
            older = self._keys.get(key.digest)
            kept = older is not None and older.quota.limits == key.quota.limits
            keys.append(replace(key, quota=older.quota) if older is not None and kept else key)
        return Keys(keys)


def load_keys(config: HttpConfig, option: str, board: Board | None = None) -> Keys:
    """`option`: api_key or admin_api_key. From the option, the lines of its file, and the environment. Administrators
    have no limits but those that their file gives them. Raises ConfigError."""
    usual = (config.key_requests_per_minute, config.key_tokens_per_minute) if option == "api_key" else (0, 0)
    keys: dict[bytes, Key] = {}
    for line in config.key_lines(option):  # what the file says of a key comes before where else it stands
        limits = (
            usual[0] if line.requests_per_minute is None else line.requests_per_minute,
            usual[1] if line.tokens_per_minute is None else line.tokens_per_minute,
        )
        may_prioritize = option == "admin_api_key" or not {line.name, "*"}.isdisjoint(config.priority_keys)
        digest = sha256(line.key.encode()).digest()
        keys.setdefault(digest, Key(digest, line.name, Quota(*limits, board, digest), may_prioritize))
    return Keys(keys.values())
