"""Whose a request is: a key's that the server knows, or nobody's."""

from __future__ import annotations

from typing import Any

import pytest

from vserve.server.http.auth import Locks, owner_of, presented_key
from vserve.server.options.http import HttpConfig


def scope(locks: Locks | None, key: str | None) -> Any:
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    state = {} if locks is None else {"locks": locks, "key": locks.find(presented_key(headers))}
    return {"type": "http", "headers": headers, "state": state}


@pytest.mark.parametrize(
    "keys", [{"admin_api_key": ("admin",)}, {"api_key": ("one", "two"), "admin_api_key": ("admin",)}]
)
def test_a_key_that_nobody_knows_owns_nothing(keys: dict[str, tuple[str, ...]]) -> None:
    locks = Locks(HttpConfig(**keys))
    known = [key for some in keys.values() for key in some]
    owners = {owner_of(scope(locks, key)) for key in known}
    assert len(owners) == len(known) and "" not in owners
    assert [owner_of(scope(locks, key)) for key in ("made up", "admi", None)] == [""] * 3


def test_without_locks_all_are_alike() -> None:
    assert owner_of(scope(None, "any")) == owner_of(scope(None, None)) == ""
