"""Where a request ends must not be open to interpretation: a proxy in front may read it differently."""

from __future__ import annotations

from collections.abc import Iterable

from .refusal import malformed


def body_length(version: str, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Bytes of the body; None: it is chunked. Headers' names are in lower case. Raises Refusal."""
    if version not in ("1.0", "1.1"):
        raise malformed("only versions 1.0 and 1.1 are spoken here")
    lengths, encodings, hosts = [], [], 0
    for name, value in headers:
        if name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            encodings.append(value)
        elif name == b"host":
            hosts += 1
        if b"\r" in value or b"\n" in value or b"\0" in value:
            raise malformed("a header has a line break in it")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise malformed("it needs exactly one Host header")
    if len(lengths) + len(encodings) > 1:
        raise malformed("its length is given twice")
    if lengths and not (lengths[0].isdigit() and len(lengths[0]) < 20):
        raise malformed("Content-Length is not a number")
    if encodings and (encodings[0].lower() != b"chunked" or version == "1.0"):
        raise malformed("the only Transfer-Encoding is chunked")
    return int(lengths[0]) if lengths else None if encodings else 0
