"""The router as an ASGI application: a request goes to one of the servers, and its answer is passed on as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..errors import ApiError
from ..http.auth import is_admin_path
from ..http.hops import passed_on
from ..http.large_body import LARGE
from ..http.middleware import HttpMetrics
from ..http.path import has_dot_segments
from .asked import Asked, read
from .backend import Backend, Backends
from .metrics import RouterMetrics

logger = logging.getLogger(__name__)

PROBES = ("/health", "/livez", "/readyz", "/ping")
OTHERS = frozenset(("/tokenize", "/detokenize", "/classify", "/pooling", "/score", "/rerank", "/invocations"))
ONE_MODEL = "/v1/models/"
LARGEST_REFUSAL = 1 << 20  # bytes
# What one server made, others do not know.
_IDS = re.compile(r"/v1/(?:responses|chat/completions|requests)/([^/]+)")
_VERBS = frozenset(("render", "batch", "input_tokens", "compact"))
_MADE = re.compile(rb'"id": ?"((?:resp|chatcmpl)[\w-]+)"')
_NOT_SENT = frozenset((b"host", b"content-length", b"x-request-id", b"expect"))
_NOT_PASSED = frozenset((b"x-request-id", b"server", b"date"))


class Unanswered(Exception):
    """Not a byte has come; the message is the reason, for counting."""


@dataclass
class Begun:
    """An answer whose first bytes are there."""

    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes
    rest: AsyncIterator[bytes]
    answer: httpx.Response

    @property
    def is_stream(self) -> bool:
        return self.answer.headers.get("content-type", "").startswith("text/event-stream")


class RouterApp:
    def __init__(
        self, backends: Backends, http: httpx.AsyncClient, *, server_key: str | None = None, asks_for_keys: bool = False
    ) -> None:
        """`server_key`: what servers get instead of the client's own key; `asks_for_keys`: the router itself does."""
        self.backends = backends
        self.metrics = RouterMetrics(backends.each)
        self.http_metrics = HttpMetrics()
        self.registry = CollectorRegistry()
        self.registry.register(self.metrics)
        self.registry.register(self.http_metrics)
        self.num_open = 0
        self.draining = False
        self._http = http
        self._passes_cancelling = server_key is None or asks_for_keys
        self._server_key = None if server_key is None else f"Bearer {server_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        scope["route"] = SimpleNamespace(path=_label(path))  # for the metrics
        try:
            if path in PROBES:
                response = self._probe(path)
            elif path == "/metrics":
                response = Response(generate_latest(self.registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})
            elif not _is_routed(path, scope["method"]):
                raise ApiError(404, "The router passes on what models are asked; ask the server itself for the rest.")
            elif is_admin_path(path) and not self._passes_cancelling:
                # With the servers' key, anybody could end what another has begun.
                message = "This router asks nobody for a key, and passes no cancelling on: start it with --api-key."
                raise ApiError(403, message, code="cancelling_not_passed_on")
            elif self.draining:
                raise ApiError(503, "The router is shutting down.", type="service_unavailable_error", code="draining")
            elif path == "/v1/models":
                response = await self._models(scope)
            else:
                self.num_open += 1
                try:
                    await self._forward(scope, receive, send)
                finally:
                    self.num_open -= 1
                return
        except ApiError as error:
            response = error.response(scope)
        await response(scope, receive, send)

    def _probe(self, path: str) -> Response:
        if path == "/livez" or (self.backends.serving and not self.draining):
            return Response(status_code=200)
        reason = "draining" if self.draining else "no server takes requests"
        return Response(msgspec.json.encode({"status": reason}), 503, media_type="application/json")

    async def _models(self, scope: Scope) -> Response:
        """Of all servers that take requests; what one says is heard with the client's own key."""
        headers, refusal, heard = self._headers(scope), None, False
        found: dict[str, Any] = {}

        async def ask(backend: Backend) -> httpx.Response:
            request = httpx.Request("GET", f"{backend.url}/v1/models", headers=headers, extensions=_patience(10))
            return await self._http.send(request)

        answers = await asyncio.gather(*map(ask, self.backends.serving), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, httpx.Response) and answer.status_code == 200:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    for card in answer.json()["data"]:
                        found.setdefault(card["id"], card)
                    heard = True
            elif isinstance(answer, httpx.Response):
                refusal = answer
        if not found and refusal is not None:
            return Response(refusal.content, refusal.status_code, media_type="application/json")
        if not heard:
            raise _all_gone(len(answers)) if answers else _nobody()
        return Response(msgspec.json.encode({"object": "list", "data": list(found.values())}),
                        media_type="application/json")  # fmt: skip

    # ---- one request ----

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """For as long as the client is there: when it leaves, so does the request to the server."""
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            return
        work = asyncio.create_task(self._answer(request, body, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _answer(self, request: Request, body: bytes, send: Send) -> None:
        try:
            await self._try_each(request, body, send)
        finally:
            self.backends.forget(request.scope["state"]["request_id"])

    async def _try_each(self, request: Request, body: bytes, send: Send) -> None:
        arrival, scope = time.monotonic(), request.scope
        asked = await self._asked(request, body)
        unknown = [id for id in asked.ids if not self.backends.knows(id)]
        tried: set[Backend] = set()
        refusal: Begun | None = None
        request_id = scope["state"]["request_id"]
        while (chosen := self.backends.choose(asked, tried)) is not None:
            backend, num_tokens = chosen
            tried.add(backend)
            with backend.open():
                try:
                    with backend.waiting(num_tokens):
                        self.backends.note(request_id, backend)
                        begun = await self._begin(backend, scope, body)
                except Unanswered as reason:
                    self.metrics.retries[backend.url, str(reason)] += 1
                    continue
                try:
                    try:
                        elsewhere = bool(unknown) or not self.backends.all_have(asked.model)
                        again = begun.status >= 400 and await _is_another_s_turn(begun, elsewhere)
                    except httpx.TransportError:  # nothing of it was passed on
                        self.metrics.retries[backend.url, "connection"] += 1
                        continue
                    if again:
                        if refusal is None or begun.status != 404:  # who has it and is full says more
                            refusal = begun
                        self.metrics.retries[backend.url, f"status_{begun.status}"] += 1
                        continue
                    self.metrics.first_byte.observe(time.monotonic() - arrival)
                    for id in _MADE.findall(begun.first[:65536]):
                        self.backends.note(id.decode(), backend)
                    await self._pass_on(begun, backend, send)
                    return
                finally:
                    await begun.answer.aclose()
        if refusal is None:
            raise_error = _nobody() if not tried else _all_gone(len(tried))
            await raise_error.response(scope)(scope, request.receive, send)
            return
        await self._pass_on(refusal, None, send)

    async def _asked(self, request: Request, body: bytes) -> Asked:
        asked = Asked()
        if body:
            asked = read(body) if len(body) < LARGE else await asyncio.to_thread(read, body)
        named = _IDS.match(request.url.path)
        if named is not None and named[1] not in _VERBS:
            asked = replace(asked, ids=(*asked.ids, named[1]))
        if request.url.path.startswith(ONE_MODEL):
            asked = replace(asked, model=request.url.path.removeprefix(ONE_MODEL))
        session = request.headers.get("x-session-id")
        return asked if session is None else replace(asked, session=session)

    async def _begin(self, backend: Backend, scope: Scope, body: bytes) -> Begun:
        """Raises Unanswered, also where the server is lost before its first byte."""
        sending = asyncio.create_task(self._first(backend, scope, body))
        lost = asyncio.create_task(backend.lost.wait())
        try:
            await asyncio.wait((sending, lost), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise Unanswered("lost")
            return sending.result()
        except httpx.TransportError as error:
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                self.backends.failed(backend)
            raise Unanswered("connection") from None
        finally:
            lost.cancel()
            sending.cancel()

    async def _first(self, backend: Backend, scope: Scope, body: bytes) -> Begun:
        path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii")
        query = scope.get("query_string", b"").decode("ascii")
        request = httpx.Request(
            scope["method"], f"{backend.url}{path}{query and '?'}{query}", headers=self._headers(scope), content=body,
            extensions=_patience(None),
        )  # fmt: skip
        answer = await self._http.send(request, stream=True)
        try:
            rest = answer.aiter_raw()
            first = await anext(rest, b"")
        except BaseException:
            await answer.aclose()
            raise
        headers = passed_on(answer.headers.raw, but=_NOT_PASSED)
        return Begun(answer.status_code, headers, first, rest, answer)

    async def _pass_on(self, begun: Begun, backend: Backend | None, send: Send) -> None:
        await send({"type": "http.response.start", "status": begun.status, "headers": begun.headers})
        if backend is not None:
            self.metrics.answers[backend.url, f"{begun.status // 100}xx"] += 1
        await send(_body(begun.first))
        try:
            async for chunk in begun.rest:
                await send(_body(chunk))
        except httpx.TransportError as error:
            assert backend is not None
            self.metrics.broken[backend.url] += 1
            logger.warning("%s broke off an answer: %s", backend.url, str(error) or type(error).__name__)
            if not begun.is_stream:
                raise
            broken = ApiError(502, "The server broke off its answer.", type="server_error", code="server_lost")
            await send(_body(b"\n\ndata: " + broken.body() + b"\n\ndata: [DONE]\n\n"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        unsent = _NOT_SENT if self._server_key is None else _NOT_SENT | {b"authorization", b"x-api-key"}
        headers = passed_on(scope["headers"], but=unsent)
        if self._server_key is not None:
            headers.append((b"authorization", self._server_key))
        if not any(name == b"accept-encoding" for name, _ in headers):
            headers.append((b"accept-encoding", b"identity"))
        return [*headers, (b"x-request-id", scope["state"]["request_id"].encode())]


async def _is_another_s_turn(begun: Begun, may_be_elsewhere: bool) -> bool:
    """Whether another server may say something else. A key's share is used up everywhere alike."""
    if begun.status == 404:
        again = may_be_elsewhere
    elif begun.status == 429:
        again = True
    else:
        again = begun.status in (502, 503, 504)
    if not again:
        return False
    async for chunk in begun.rest:
        begun.first += chunk
        if len(begun.first) > LARGEST_REFUSAL:
            break
    begun.rest = _nothing()
    return begun.status != 429 or b'"queue_full"' in begun.first


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


def _patience(read: float | None) -> dict[str, Any]:
    return {"timeout": {"connect": 5.0, "read": read, "write": 60.0, "pool": None}}


def _is_routed(path: str, method: str) -> bool:
    cancels = path == "/abort_request" or path.startswith("/v1/requests/")
    if has_dot_segments(path.encode()) or (is_admin_path(path) and not cancels):
        return False
    if path == "/v1/chat/completions" and method == "GET":
        return False  # a list of what one server has stored
    return path.startswith(("/v1/", "/v2/")) or path in OTHERS or cancels


def _label(path: str) -> str:
    """Few, whatever clients ask for."""
    if path in OTHERS or path in PROBES or path == "/metrics":
        return path
    known = re.match(r"/v[12]/(chat/completions|completions|responses|messages|embeddings|models|rerank|score)", path)
    return known[0] if known else "other"


def _nobody() -> ApiError:
    return ApiError(
        503, "No server takes requests now.", type="service_unavailable_error", code="no_server",
        headers={"retry-after": "1"},
    )  # fmt: skip


def _all_gone(count: int) -> ApiError:
    return ApiError(
        503, f"{count} of the servers were asked, and none has begun to answer.", type="service_unavailable_error",
        code="no_answer", headers={"retry-after": "1"},
    )  # fmt: skip
