"""Headers that are meant for one connection, and for nobody behind it (RFC 9110, section 7.6.1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

HOPS = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
))  # fmt: skip
TENANT = b"x-vserve-tenant"  # from one API process of a server to another, which does not see the client


def passed_on(headers: Iterable[tuple[bytes, bytes]], *, but: Collection[bytes]) -> list[tuple[bytes, bytes]]:
    """Without those of the connection, also those that its `Connection` header names, and without `but`, names in
    small letters."""
    each = [(name.lower(), name, value) for name, value in headers]
    listed = b",".join(value for small, _, value in each if small == b"connection")
    dropped = {*HOPS, *but, *(name.strip().lower() for name in listed.split(b","))}
    return [(name, value) for small, name, value in each if small not in dropped]
