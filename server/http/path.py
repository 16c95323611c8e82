"""What a request's path is, before anybody looks at it."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from starlette.types import Scope

from ..errors import ApiError, bad_request, shorten

MOST_ENCODINGS = 4  # one upon the other: what is encoded more often means nothing that anybody asks for


def drop_slash(scope: Scope, root_path: str) -> None:
    """A path means the same with a slash at its end. Not where the slash is escaped, nor where it is the whole path."""
    path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
    if path.endswith("/") and raw.endswith(b"/") and len(path.removeprefix(root_path)) > 1:
        scope["path"], scope["raw_path"] = path[:-1], raw[:-1]


def check_path(scope: Scope) -> None:
    """Raises ApiError (400) for a path with dot segments: whoever matches it as it stands and whoever resolves it would
    take it for two different routes."""
    if has_dot_segments(scope.get("raw_path") or scope["path"].encode()):
        raise _dot_segments(scope["path"])


def has_dot_segments(path: bytes) -> bool:
    """Whether a segment is `.` or `..`, plain or percent-encoded, however often and in whatever mixture; a backslash
    parts segments, too, and what follows a semicolon counts for nothing, as some proxies have it."""
    if b"%" not in path and b"/." not in path and b"\\" not in path:
        return False
    for _ in range(MOST_ENCODINGS):
        path = unquote_to_bytes(path)
    if unquote_to_bytes(path) != path:
        return True
    segments = path.replace(b"\\", b"/").split(b"/")
    return any(segment.partition(b";")[0] in (b".", b"..") for segment in segments)


def _dot_segments(path: str) -> ApiError:
    message = f"The path {shorten(ascii(path))} has a segment . or .., plain or encoded: send the path that it means."
    return bad_request(message, None, "invalid_path")
