"""What a request's path is, before anybody looks at it."""

from __future__ import annotations

from starlette.types import Scope


def drop_slash(scope: Scope, root_path: str) -> None:
    """A path means the same with a slash at its end. Not where the slash is escaped, nor where it is the whole path."""
    path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
    if path.endswith("/") and raw.endswith(b"/") and len(path.removeprefix(root_path)) > 1:
        scope["path"], scope["raw_path"] = path[:-1], raw[:-1]
