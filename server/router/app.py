"""The router as an ASGI application: a request goes to one of the servers, and its answer is passed on as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from dataclasses import replace
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
from ..http.middleware import HttpMetrics
from ..http.request_id import MAX_ID_LENGTH, TAG_HEADER, TAG_LENGTH, clean_id
from ..lanes import Lanes
from .asked import NUM_LANES, Asked, asked_of
from .backend import Backend, Backends
from .begun import Begun, Verdict, lost
from .body import Body
from .metrics import RouterMetrics

logger = logging.getLogger(__name__)

PROBES = ("/health", "/livez", "/readyz", "/ping")
OTHERS = frozenset((
    "/tokenize", "/detokenize", "/classify", "/pooling", "/score", "/rerank", "/invocations", "/inference/v1/generate",
))  # fmt: skip
ONE_MODEL = "/v1/models/"
LISTS = ("/v1/chat/completions", "/v1/files", "/v1/batches")  # of what one server has stored
# What one server made, others do not know.
_IDS = re.compile(r"/v1/(?:responses|conversations|chat/completions|requests|files|batches)/([^/]+)")
_VERBS = frozenset(("render", "derender", "batch", "input_tokens", "compact"))
# Of the answer itself: what stands further in may be the client's own words.
_MADE = re.compile(
    rb'(?:event: ?[\w.]{1,64}\r?\n)?(?:data: ?)?\{\s*(?:"(?:type|sequence_number)": ?[\w."]{1,64},\s*)*'
    rb'(?:"response": ?\{\s*)?"id": ?"((?:resp_|conv_|chatcmpl-|file-|batch_)[\w.:-]{1,%d})"' % MAX_ID_LENGTH
)
_NOT_SENT = frozenset((
    b"host", b"content-length", b"x-request-id", b"expect", TAG_HEADER.encode(), b"forwarded", b"x-forwarded-for",
    b"x-forwarded-proto",
))  # fmt: skip
_NOT_PASSED = frozenset((b"x-request-id", b"server", b"date"))


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
        self.lanes = Lanes(NUM_LANES)  # where large bodies are looked at
        self._http = http
        self._passes_cancelling = server_key is None or asks_for_keys
        # Else the client's own key goes to the servers, and they judge of its page.
        self.judges_origins = server_key is not None or asks_for_keys
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
                        if card["id"] not in found or _length(card) > _length(found[card["id"]]):
                            found[card["id"]] = card
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
            content = b"".join([piece async for piece in request.stream()])
        except ClientDisconnect:
            return
        body = Body(content, scope["state"].get("held_body"))
        del content
        work = asyncio.create_task(self._try_each(request, body, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            body.drop()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _try_each(self, request: Request, body: Body, send: Send) -> None:
        arrival, scope = time.monotonic(), request.scope
        asked = await self._asked(request, body)
        is_stored = scope["method"] == "POST" and asked.is_stored(scope["path"])
        is_elsewhere = bool(asked.ids) or not self.backends.all_have(asked.model)
        was_lost = False  # with a server that may have died of it
        tried: set[Backend] = set()
        said: Begun | ApiError | None = None
        given_up: tuple[str, str] | None = None
        while (chosen := self.backends.choose(asked, tried)) is not None:
            backend, num_tokens = chosen
            tried.add(backend)
            if given_up is not None:
                self.metrics.retries[given_up] += 1
            if not asked.is_named:
                scope["state"]["request_id"] = backend.tag + scope["state"]["request_id"][TAG_LENGTH:]
            with backend.open():
                begun, verdict, why = await self._offer(backend, num_tokens, scope, body)
                try:
                    if begun is not None and _is_answer(verdict, is_elsewhere, asked):
                        self.metrics.first_byte.observe(time.monotonic() - arrival)
                        body.drop()
                        if begun.status < 400 and (made := _MADE.match(begun.first)) is not None:
                            self.backends.note(made[1].decode(), backend)
                        await self._pass_on(begun, backend, send)
                        return
                finally:
                    if begun is not None:
                        await begun.answer.aclose()
            given_up = backend.url, why
            if begun is None and verdict is Verdict.LOST:
                said = lost(is_stored)
            elif begun is not None and (said is None or verdict is not Verdict.MISSING):
                said = begun  # who has it and is full says more than who has it not
            if verdict is Verdict.TOO_LONG:
                length = backend.max_model_len(asked.model)
                asked = replace(asked, longer_than=length if length < math.inf else 0)
            elif verdict in (Verdict.DIED, Verdict.LOST):
                if was_lost or (is_stored and verdict is Verdict.LOST):
                    break
                was_lost = True
        body.drop()
        if isinstance(said, Begun):
            await self._pass_on(said, None, send)
            return
        error = said or (_all_gone(len(tried)) if tried else _nobody())
        await error.response(scope)(scope, request.receive, send)

    async def _asked(self, request: Request, body: Body) -> Asked:
        """What the request is about, and its id. Raises ApiError (400)."""
        headers, state, path = request.headers, request.scope["state"], request.scope["path"]
        # With the servers' own key, all clients are one to them.
        asked = await asked_of(request, body.content, self.lanes, by_key=self._server_key is None)
        ids = asked.ids
        if (named := _IDS.match(path)) is not None and named[1] not in _VERBS:
            ids = (*ids, named[1])
        elif path == "/abort_request":
            ids = (*ids, asked.request_id)
        elif asked.request_id and "x-request-id" not in headers:
            state["request_id"] = clean_id(asked.request_id)
        is_named = bool(asked.request_id) or clean_id(headers.get("x-request-id", "")) == state["request_id"]
        if path.startswith(ONE_MODEL):
            asked = replace(asked, model=path.removeprefix(ONE_MODEL), longer_than=0)  # as in the list of all
        return replace(asked, ids=ids, is_named=is_named)

    async def _offer(
        self, backend: Backend, num_tokens: int, scope: Scope, body: Body
    ) -> tuple[Begun | None, Verdict, str]:
        """→ (what it said, what that means for others, its name in the metrics)."""
        with backend.waiting(num_tokens):
            sending = asyncio.create_task(self._first(backend, scope, body))
            lost = asyncio.create_task(backend.lost.wait())
            try:
                await asyncio.wait((sending, lost), return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    return None, Verdict.LOST, "lost"
                begun, verdict = sending.result()
                return begun, verdict, f"status_{begun.status}"
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout):
                self.backends.failed(backend)
                return None, Verdict.BUSY, "connection"
            except httpx.TransportError:
                return None, Verdict.LOST, "connection"
            finally:
                lost.cancel()
                sending.cancel()

    async def _first(self, backend: Backend, scope: Scope, body: Body) -> tuple[Begun, Verdict]:
        path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii")
        query = scope.get("query_string", b"").decode("ascii")
        headers = [*self._headers(scope), (TAG_HEADER.encode(), backend.tag.encode())]
        if body.content:
            headers.append((b"content-length", str(len(body.content)).encode()))
        request = httpx.Request(
            scope["method"], f"{backend.url}{path}{query and '?'}{query}", headers=headers,
            content=body if body.content else None, extensions=_patience(None),
        )  # fmt: skip
        answer = await self._http.send(request, stream=True)
        try:
            rest = answer.aiter_raw()
            headers = passed_on(answer.headers.raw, but=_NOT_PASSED)
            begun = Begun(answer.status_code, headers, await anext(rest, b""), rest, answer)
            return begun, await begun.verdict()
        except BaseException:
            await answer.aclose()
            raise

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
        if self.judges_origins:
            unsent |= {b"origin"}
        headers = passed_on(scope["headers"], but=unsent)
        if self._server_key is not None:
            headers.append((b"authorization", self._server_key))
        if not any(name == b"accept-encoding" for name, _ in headers):
            headers.append((b"accept-encoding", b"identity"))
        if (client := scope.get("client")) is not None:  # among whom servers share; a client's own word is not sent on
            headers.append((b"x-forwarded-for", client[0].encode()))
        return [*headers, (b"x-request-id", scope["state"]["request_id"].encode())]


def _is_answer(verdict: Verdict, is_elsewhere: bool, asked: Asked) -> bool:
    """Whether it ends the request: no other server would say something else."""
    if verdict is Verdict.MISSING:
        return not is_elsewhere
    return verdict is Verdict.FINAL or (verdict is Verdict.TOO_LONG and asked.longer_than is not None)


def _length(card: dict[str, Any]) -> int:
    """Of the context, in tokens; a card in Anthropic's shape has another name for it. Raises TypeError."""
    return int(card.get("max_model_len") or card.get("max_input_tokens") or 0)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


def _patience(read: float | None) -> dict[str, Any]:
    return {"timeout": {"connect": 5.0, "read": read, "write": 60.0, "pool": None}}


def _is_routed(path: str, method: str) -> bool:
    """Of paths that RequestMiddleware has checked: none has dot segments."""
    cancels = path == "/abort_request" or path.startswith("/v1/requests/")
    if is_admin_path(path) and not cancels:
        return False
    if path in LISTS and method == "GET":
        return False
    return path.startswith(("/v1/", "/v2/")) or path in OTHERS or cancels


def _label(path: str) -> str:
    """Few, whatever clients ask for."""
    if path in OTHERS or path in PROBES or path == "/metrics":
        return path
    known = re.match(
        r"/v[12]/(chat/completions|completions|responses|conversations|messages|embeddings|models|rerank|score)", path
    )
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
