"""The locks: every route needs a key but a short list, and what controls the server needs a stronger one."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from ..client.board import Board
from ..errors import ApiError
from ..options.http import HttpConfig
from .keys import Key, load_keys

# Open to all, compared with the path as it came over the wire: no spelling of another route can look like these.
PUBLIC = ("/health", "/livez", "/readyz", "/ping")
# What controls or tells on the server, compared with the path that the router sees.
ADMIN = (
    "/server_info", "/reload", "/abort_request", "/v1/requests", "/start_profile", "/stop_profile",
    "/reset_prefix_cache", "/sleep", "/wake_up", "/pause", "/resume", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/scale_data_parallel", "/scale_elastic_ep",
)  # fmt: skip


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "Incorrect or missing API key; send it as 'Authorization: Bearer <key>'.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


class Locks:
    """Which request may pass."""

    def __init__(
        self, config: HttpConfig, root_path: str = "", pages: Iterable[str] = (), board: Board | None = None
    ) -> None:
        """`pages`: files that anybody may read: a browser has no key to send before a page has asked for one.
        `board`: of several API processes, which share what a key may use."""
        self._board = board
        self._config = config
        self._keys = load_keys(config, "api_key", board)
        self._admin_keys = load_keys(config, "admin_api_key", board)
        public = [*PUBLIC, "/metrics"] if config.public_metrics else PUBLIC
        self._public = {path.encode() for path in public} | {(root_path + path).encode() for path in public}
        self._pages = {path.encode() for path in pages} | {(root_path + path).encode() for path in pages}

    @property
    def are_needed(self) -> bool:
        return bool(self._keys or self._admin_keys)

    @property
    def need_keys(self) -> bool:
        """Who asks the model needs one."""
        return bool(self._keys)

    @property
    def isolate(self) -> bool:
        """Keys share no cached prefixes."""
        return self._config.isolate_keys

    @property
    def has_administrators(self) -> bool:
        return bool(self._admin_keys)

    def reload(self) -> None:
        """Reads the files of keys again. Raises ConfigError, and then the keys are what they were."""
        keys = load_keys(self._config, "api_key", self._board)
        admin_keys = load_keys(self._config, "admin_api_key", self._board)
        self._keys, self._admin_keys = self._keys.renewed(keys), self._admin_keys.renewed(admin_keys)

    def find(self, presented: bytes | None) -> Key | None:
        admin, key = self._admin_keys.find(presented), self._keys.find(presented)
        return admin or key

    def administers(self, key: Key | None) -> bool:
        """Whether it opens what controls the server."""
        return key is not None and key in (self._admin_keys or self._keys)

    def check(self, scope: Scope, key: Key | None) -> ApiError | None:
        """Why the request, which has brought this key, may not pass."""
        path = scope.get("raw_path") or scope["path"].encode()
        if path in self._public or (path in self._pages and scope["method"] in ("GET", "HEAD")):
            return None
        if self._admin_keys and not self.administers(key) and is_admin_path(get_route_path(scope)):
            if key is None:
                return unauthorized()
            return ApiError(403, "This route needs an admin API key.", code="admin_key_required")
        return unauthorized() if self._keys and key is None else None


class Authentication:
    def __init__(self, app: ASGIApp, locks: Locks) -> None:
        self.app = app
        self._locks = locks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = self._locks.find(presented_key(scope["headers"]))
            scope.setdefault("state", {}).update(locks=self._locks, key=key)
            if (refusal := self._locks.check(scope, key)) is not None:
                await refusal.response(scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def is_admin_path(path: str) -> bool:
    return any(path == admin or path.startswith(f"{admin}/") for admin in ADMIN)


def key_of(scope: Scope) -> Key | None:
    """The key that the request has brought, where the locks know it."""
    key: Key | None = scope.get("state", {}).get("key")
    return key


def owner_of(scope: Scope) -> str:
    """Whose request it is: the digest of its key; "" where the locks know no such key: all strangers are alike,
    and a made-up key has no share of its own."""
    key = key_of(scope)
    return "" if key is None else key.owner


def administers(scope: Scope) -> bool:
    """Whether who asks may read /server_info: without keys, anybody."""
    locks = scope.get("state", {}).get("locks")
    return locks is None or locks.administers(key_of(scope))


def has_administrators(scope: Scope) -> bool:
    """Whether there are admin keys: then who asks for a route of theirs has brought one."""
    locks = scope.get("state", {}).get("locks")
    return locks is not None and locks.has_administrators


def may_prioritize(scope: Scope) -> bool:
    """Whether who asks may set `priority`: where nobody needs a key, anybody."""
    locks, key = scope.get("state", {}).get("locks"), key_of(scope)
    return locks is None or not locks.need_keys or (key is not None and key.may_prioritize)


def cache_salt_of(scope: Scope, salt: str | None) -> str | None:
    """What parts the cached prefixes of who asks from those of other keys, and by its own `salt` from its own others.

    The space cannot be in an owner: no salt of one key makes that of another. A hash, so that nothing of a key leaves
    this process."""
    locks = scope.get("state", {}).get("locks")
    if locks is None or not locks.isolate:
        return salt
    mixed = f"{owner_of(scope)} {salt or ''}".encode("utf-8", "surrogatepass")
    return blake2b(mixed, digest_size=16).hexdigest()


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
