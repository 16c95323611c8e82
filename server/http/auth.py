"""The locks: every route needs a key but a short list, and what controls the server needs a stronger one."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ApiError
from ..options.http import HttpConfig

# Open to all, compared with the path as it came over the wire: no spelling of another route can look like these.
PUBLIC = ("/health", "/livez", "/readyz", "/ping")
# What controls or tells on the server, compared with the path that the router sees.
ADMIN = (
    "/server_info", "/abort_request", "/v1/requests", "/start_profile", "/stop_profile", "/reset_prefix_cache",
    "/sleep", "/wake_up", "/pause", "/resume", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip


class Keys:
    """A set of keys, of which only digests are held. Comparing takes the same time whatever is presented."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in dict.fromkeys(keys)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holds(self, key: bytes | None) -> bool:
        if key is None:
            return False
        digest = sha256(key).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


def load_keys(given: Iterable[str], path: str | None, *variables: str) -> Keys:
    """From the option, the lines of a file (# begins a comment) and the environment."""
    keys = [key.strip() for key in given]
    if path is not None:
        lines = (line.strip() for line in Path(path).read_text().splitlines())
        keys += [line for line in lines if line and not line.startswith("#")]
    keys += [os.environ[name].strip() for name in variables if os.environ.get(name, "").strip()]
    return Keys(keys)


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "Incorrect or missing API key; send it as 'Authorization: Bearer <key>'.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


class Locks:
    """Which request may pass."""

    def __init__(self, config: HttpConfig, root_path: str = "", pages: Iterable[str] = ()) -> None:
        """`pages`: files that anybody may read: a browser has no key to send before a page has asked for one."""
        self._keys = load_keys(config.api_key, config.api_key_file, "VSERVE_API_KEY", "VLLM_API_KEY")
        self._admin_keys = load_keys(config.admin_api_key, config.admin_api_key_file, "VSERVE_ADMIN_API_KEY")
        public = [*PUBLIC, "/metrics"] if config.public_metrics else PUBLIC
        self._public = {path.encode() for path in public} | {(root_path + path).encode() for path in public}
        self._pages = {path.encode() for path in pages} | {(root_path + path).encode() for path in pages}

    @property
    def are_needed(self) -> bool:
        return bool(self._keys or self._admin_keys)

    @property
    def has_administrators(self) -> bool:
        return bool(self._admin_keys)

    def knows(self, key: bytes | None) -> bool:
        return self._keys.holds(key) | self._admin_keys.holds(key)

    def check(self, scope: Scope) -> ApiError | None:
        """Why the request may not pass."""
        path = scope.get("raw_path") or scope["path"].encode()
        if path in self._public or (path in self._pages and scope["method"] in ("GET", "HEAD")):
            return None
        key = presented_key(scope["headers"])
        if self._admin_keys:
            if self._admin_keys.holds(key):
                return None
            if is_admin_path(get_route_path(scope)):
                if not self._keys.holds(key):
                    return unauthorized()
                return ApiError(403, "This route needs an admin API key.", code="admin_key_required")
        if not self._keys or self._keys.holds(key):
            return None
        return unauthorized()


class Authentication:
    def __init__(self, app: ASGIApp, locks: Locks) -> None:
        self.app = app
        self._locks = locks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._locks.check(scope)) is not None:
            await refusal.response(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["locks"] = self._locks
        await self.app(scope, receive, send)


def is_admin_path(path: str) -> bool:
    return any(path == admin or path.startswith(f"{admin}/") for admin in ADMIN)


def owner_of(scope: Scope) -> str:
    """Whose request it is: the digest of its key; "" where the locks know no such key: all strangers are alike,
    and a made-up key has no share of its own."""
    locks = scope.get("state", {}).get("locks")
    key = None if locks is None else presented_key(scope["headers"])
    return sha256(key).hexdigest() if key is not None and locks.knows(key) else ""


def controls(scope: Scope, owner: str) -> bool:
    """Whether who asks may end what `owner` has begun: their own, and an administrator all; without keys, anybody.

    Where there are admin keys, nobody else comes as far as to a route that ends something."""
    locks = scope.get("state", {}).get("locks")
    return locks is None or locks.has_administrators or owner == owner_of(scope)


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Of exactly one Authorization header; where there is none, of exactly one x-api-key, as Anthropic's SDKs send."""
    values = [value for name, value in headers if name == b"authorization"]
    if not values:
        values = [value.strip() for name, value in headers if name == b"x-api-key"]
        return values[0] or None if len(values) == 1 else None
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None
