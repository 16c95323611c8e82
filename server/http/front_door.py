"""The ASGI application from the first second on: until the model is loaded it answers probes and asks for patience."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..client.client import Client
from ..errors import ApiError, still_loading
from .page import Page
from .path import check_path, drop_slash
from .probe import PROBES, probe
from .request_id import clean_id


class FrontDoor:
    def __init__(self, client: Client, root_path: str = "", page: Page | None = None) -> None:
        self.app: ASGIApp | None = None  # once the server is ready
        self.num_open = 0  # requests that it is working on
        self._client = client
        self._root_path = root_path
        self._page = page  # shows how far the loading is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if app is None:
            await self._wait(scope, receive, send)
            return
        self.num_open += 1
        try:
            await app(scope, receive, send)
        finally:
            self.num_open -= 1

    async def _wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        drop_slash(scope, self._root_path)
        path = scope["path"].removeprefix(self._root_path)
        try:
            check_path(scope)
            response = self._answer(path, scope)
        except ApiError as error:
            response = error.response(scope)
        headers = Headers(scope=scope)
        response.headers["x-request-id"] = clean_id(headers.get("x-request-id", ""))
        await response(scope, receive, send)

    def _answer(self, path: str, scope: Scope) -> Response:
        """Raises ApiError."""
        if path in PROBES:
            return probe(path, self._client, draining=False, serving=False)
        if self._page is not None and (file := self._page.answer(path, Headers(scope=scope))) is not None:
            return file if scope["method"] in ("GET", "HEAD") else Response(status_code=405)
        phase = self._client.phase
        raise still_loading(phase.phase if phase else "starting")
