"""Among whom the room for bodies and the queue are shared: keys, and client addresses where requests bring none."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv6Address, ip_address

from starlette.types import Scope

from .auth import key_of
from .hops import TENANT


def tenant_of(scope: Scope) -> int:
    """63 bits: a number made of the key, or of the address. All that come over a Unix socket are one tenant, as are all
    behind a proxy that tells the addresses of none."""
    if (key := key_of(scope)) is not None:
        return _number(key.digest)
    if scope.get("state", {}).get("forwarded"):  # what it says last is the other process's word
        return next((int(value) for name, value in reversed(scope["headers"]) if name == TENANT), 0)
    client = scope.get("client")
    return _of_address(client[0]) if client else 0


@lru_cache(1 << 12)
def _of_address(address: str) -> int:
    """One of IPv6 counts by its network of 64 bits: so many are one machine's."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return _number(sha256(address.encode()).digest())
    if isinstance(parsed, IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    return _number(sha256(parsed.packed[:8]).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8]) >> 1
