"""Where an API process is asked by the others of its server: over a socket in their private folder."""

from __future__ import annotations

import socket

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine.errors import ConfigError
from .client.meeting import Meeting, listen
from .client.replicas import Replicas
from .client.scaling import ScalingError, scale
from .generation.adapters import Record
from .http.front_door import FrontDoor
from .http.server import Server
from .state import ServerState

_encode = msgspec.msgpack.Encoder().encode


class Desk:
    """An ASGI application. What is not for this process itself are requests that another one passes on."""

    def __init__(self, meeting: Meeting, front: FrontDoor) -> None:
        self._meeting = meeting
        self._front = front
        self.server: ServerState | None = None  # once there is one
        self._socket: socket.socket | None = None

    def open(self, server: ServerState) -> None:
        """From now on the others find the socket, and what they say waits there for `serve`."""
        self.server = server
        self._socket = listen(self._meeting.api_path(self._meeting.seat))

    async def serve(self) -> None:
        """Until it is cancelled."""
        assert self._socket is not None, "it has been opened"
        await Server(self, last_bytes=0).serve(sockets=[self._socket])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith("/own/"):
            scope.setdefault("state", {})["forwarded"] = True
            await self._front(scope, receive, send)
            return
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path, server = request.url.path, self.server
        if server is None:
            return Response(status_code=503)
        if path == "/own/metrics":
            return Response(_encode((self._meeting.client, server.metrics_page.shares.page())))
        if path == "/own/reload":
            try:
                server.reload()
            except ConfigError as error:
                return Response(str(error), 500)
        elif path == "/own/engines":
            asked = msgspec.json.decode(await request.body())
            assert isinstance(server.client, Replicas)
            try:
                await scale(server.client, asked["size"], asked["drain_timeout"])
            except ScalingError as error:
                return Response(str(error), 500)
        elif path == "/own/adapters" and request.method == "GET":
            return Response(_encode(server.adapters.records()))
        elif path == "/own/adapters":
            server.adapters.take(msgspec.json.decode(await request.body(), type=Record))
        elif path == "/own/adapters/retire":
            await server.adapters.retire(msgspec.json.decode(await request.body())["id"])
        else:
            return Response(status_code=404)
        return Response(status_code=200)
