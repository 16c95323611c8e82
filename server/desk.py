"""Where an API process is asked by the others of its server: over a socket in their private folder."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine.errors import ConfigError
from .client.meeting import Meeting, listen
from .client.replicas import Replicas
from .client.scaling import ScalingError, scale
from .colleagues import SECRET
from .dialects.pieces import Pieces
from .dialects.store import Stored
from .errors import ApiError
from .generation.adapters import Record
from .http.front_door import FrontDoor
from .http.server import Server
from .state import ServerState

_encode = msgspec.msgpack.Encoder().encode


class Desk:
    """An ASGI application. What is not below /own/ are requests that another process passes on."""

    def __init__(self, meeting: Meeting, front: FrontDoor) -> None:
        self._meeting = meeting
        self._front = front
        self.server: ServerState | None = None  # once there is one
        self._socket: socket.socket | None = None
        self.routes: dict[tuple[str, str], Callable[[ServerState, bytes], Awaitable[bytes | None]]] = {
            ("GET", "/own/metrics"): self._metrics,
            ("POST", "/own/reload"): self._reload,
            ("POST", "/own/engines"): self._scale,
            ("GET", "/own/adapters"): self._adapters,
            ("POST", "/own/adapters"): self._take_adapter,
            ("POST", "/own/adapters/retire"): self._retire_adapter,
            ("POST", "/own/chats"): self._store_chat,
        }

    def open(self, server: ServerState) -> None:
        """From now on the others find the socket, and what they say waits there for `serve`."""
        self.server = server
        self._socket = listen(self._meeting.api_path(self._meeting.seat))

    async def serve(self) -> None:
        """Until it is cancelled."""
        assert self._socket is not None, "it has been opened"
        await Server(self, last_bytes=0).serve(sockets=[self._socket])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = scope["path"].startswith("/own/")
        if not self._is_of_a_colleague(scope):
            await Response("This socket is for API processes of one server.", 403)(scope, receive, send)
        elif not own:
            scope.setdefault("state", {})["forwarded"] = True
            await self._front(scope, receive, send)
        else:
            response = await self._answer(Request(scope, receive))
            await response(scope, receive, send)

    def _is_of_a_colleague(self, scope: Scope) -> bool:
        """Whether it brings the secret of the meeting, which goes no further."""
        given = [value for name, value in scope["headers"] if name == SECRET]
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != SECRET]
        return len(given) == 1 and hmac.compare_digest(given[0], self._meeting.secret.encode())

    async def _answer(self, request: Request) -> Response:
        route, server = self.routes.get((request.method, request.scope["path"])), self.server
        if route is None:
            return Response(status_code=404)
        if server is None:
            return Response(status_code=503)
        try:
            content = await route(server, await request.body())
        except ApiError as error:
            return Response(error.message, error.status)
        except (ConfigError, ScalingError) as error:
            return Response(str(error), 500)
        return Response(content)

    async def _metrics(self, server: ServerState, body: bytes) -> bytes:
        return _encode((self._meeting.client, server.metrics_page.shares.page()))

    async def _reload(self, server: ServerState, body: bytes) -> None:
        server.reload()

    async def _scale(self, server: ServerState, body: bytes) -> None:
        asked = msgspec.json.decode(body)
        assert isinstance(server.client, Replicas)
        await scale(server.client, asked["size"], asked["drain_timeout"])

    async def _adapters(self, server: ServerState, body: bytes) -> bytes:
        return _encode(server.adapters.records())

    async def _take_adapter(self, server: ServerState, body: bytes) -> None:
        server.adapters.take(msgspec.json.decode(body, type=Record))

    async def _retire_adapter(self, server: ServerState, body: bytes) -> None:
        await server.adapters.retire(msgspec.json.decode(body)["id"])

    async def _store_chat(self, server: ServerState, body: bytes) -> None:
        kind = tuple[str, str, bytes, Pieces, str, dict[str, str]]
        id, owner, answer, messages, model, metadata = msgspec.msgpack.decode(body, type=kind)
        server.chats.put(id, owner, Stored(answer, messages, model=model, metadata=metadata))
