"""The other API processes of this server: they are asked over sockets that nobody else can reach.

The first process keeps what there is one of: stored responses, conversations and chats, the metrics of all, the number
of engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .client.meeting import FIRST, Meeting
from .http.hops import TENANT, passed_on
from .observe.shares import Page, lasting, summed

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds for a colleague's word
STARTING = 600.0  # for the first process to begin to listen: it may read adapters from the hub
KEPT = 2.0  # seconds that a connection waits for the next word: less than the other side keeps it
LOOK_UP = 0.1  # seconds between two looks for one that starts
AT_FIRST = re.compile(
    r"/metrics|/reload|/v1/(un)?load_lora_adapter|/scale_data_parallel|/scale_elastic_ep|/v1/responses(/.*)?|/v1/chat/completions/.+"
    r"|/v1/(files|batches|conversations)(/.*)?"
)
HERE = frozenset(f"/v1/chat/completions/{verb}" for verb in ("render", "derender", "batch"))
CHATS = "/v1/chat/completions"
SECRET = b"x-vserve-secret"  # the header that says that a process of this server asks
CANCEL = re.compile(r"/abort_request|/v1/requests/[^/]+/cancel")
_NOT_SENT = frozenset((b"host", b"content-length", b"x-request-id", b"expect", TENANT))
_NOT_PASSED = frozenset((b"x-request-id", b"server", b"date"))


class ColleagueError(OSError):
    """Who did not do what it was told to, and why, in one line; the others have done it."""


class Colleagues:
    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._clients: dict[int, httpx.AsyncClient] = {}
        self._last: dict[int, tuple[int, Page]] = {}  # what each seat has counted, and the client number of its process
        self._past: Page = []  # of processes that are gone

    @property
    def others(self) -> list[int]:
        return [seat for seat in range(self.meeting.board.num_seats) if seat != self.meeting.seat]

    def client(self, seat: int) -> httpx.AsyncClient:
        if seat not in self._clients:
            limits = httpx.Limits(max_connections=None, keepalive_expiry=KEPT)
            transport = httpx.AsyncHTTPTransport(uds=self.meeting.api_path(seat), verify=False, limits=limits)
            self._clients[seat] = httpx.AsyncClient(
                transport=transport, base_url="http://api", trust_env=False, auth=self._sign
            )
        return self._clients[seat]

    def _sign(self, request: httpx.Request) -> httpx.Request:
        """In the place of whatever a client has sent in this header."""
        request.headers[SECRET.decode()] = self.meeting.secret
        return request

    async def shares(self) -> list[Page]:
        """What the others have counted; of those that are gone or say nothing, what they said last, but for gauges."""
        silent = set(self.others)

        async def ask(seat: int) -> None:
            with contextlib.suppress(httpx.HTTPError, msgspec.MsgspecError):
                answer = await self.client(seat).get("/own/metrics", timeout=PATIENCE)
                number, page = msgspec.msgpack.decode(answer.content, type=tuple[int, Page])
                known = self._last.get(seat)
                if known is not None and known[0] != number:
                    self._past = summed([self._past, lasting(known[1])])
                self._last[seat] = number, page
                silent.discard(seat)

        await asyncio.gather(*map(ask, self.others))
        return [self._past, *(lasting(page) if seat in silent else page for seat, (_, page) in self._last.items())]

    async def tell(self, path: str, content: Any = None, timeout: float = PATIENCE, wait: bool = False) -> None:
        """All of them. Who is only starting will read what is new, or is told once it listens: `wait`.

        Raises ColleagueError for who does not do it."""
        deadline = time.monotonic() + timeout

        async def tell_one(seat: int) -> str | None:
            while True:
                try:
                    answer = await self.client(seat).post(path, json=content, timeout=timeout)
                except httpx.ConnectError:
                    if not wait:
                        return None
                    if time.monotonic() > deadline:
                        return f"API process {seat} is not there"
                    await asyncio.sleep(LOOK_UP)
                except httpx.TimeoutException:
                    return f"API process {seat} did not answer within {timeout:g} s"
                except httpx.HTTPError as error:
                    return f"API process {seat}: {error or type(error).__name__}"
                else:
                    return None if answer.is_success else f"API process {seat}: {answer.text or answer.status_code}"

        problems = await asyncio.gather(*map(tell_one, self.others))
        if found := "; ".join(problem for problem in problems if problem is not None):
            raise ColleagueError(f"{found}. The other API processes have done it: try again.")

    async def ask_first(self, path: str) -> bytes:
        """What the first process answers, which may still have to begin to listen. Raises ColleagueError."""
        deadline = time.monotonic() + STARTING
        while True:
            try:
                answer = await self.client(FIRST).get(path, timeout=PATIENCE)
                if answer.is_success:
                    return answer.content
                problem = str(answer.status_code)
            except httpx.HTTPError as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise ColleagueError(f"the first API process does not answer {path}: {problem}")
            await asyncio.sleep(LOOK_UP)

    async def give_first(self, path: str, content: bytes) -> None:
        """What the first process is to have. Raises ColleagueError."""
        try:
            answer = await self.client(FIRST).post(path, content=content, timeout=PATIENCE)
        except httpx.HTTPError as error:
            raise ColleagueError(f"the first API process: {error or type(error).__name__}") from None
        if not answer.is_success:
            raise ColleagueError(f"the first API process: {answer.text or answer.status_code}")

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


class Elsewhere:
    """Passes on what another process has to answer; within the limits of bodies, and behind the locks."""

    def __init__(self, app: ASGIApp, colleagues: Colleagues) -> None:
        self.app = app
        self._colleagues = colleagues

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("state", {}).get("forwarded"):
            await self.app(scope, receive, send)
            return
        path = get_route_path(scope)
        if CANCEL.fullmatch(path):
            await self._ask_each(scope, await _body(receive), receive, send)
        elif self._colleagues.meeting.is_first:
            await self.app(scope, receive, send)
        elif path not in HERE and (AT_FIRST.fullmatch(path) or (path == CHATS and scope["method"] != "POST")):
            await self._forward(FIRST, scope, await _body(receive), receive, send)
        else:
            await self.app(scope, receive, send)

    async def _ask_each(self, scope: Scope, body: bytes | None, receive: Receive, send: Send) -> None:
        """This process, then the others, until one does not say that it knows nothing of it."""
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self.app(scope, _again(body, receive), keep)
        if messages and messages[0]["status"] == 404:
            for seat in self._colleagues.others:
                with contextlib.suppress(httpx.HTTPError):
                    request = _request(scope, [body or b""])
                    answer = await self._colleagues.client(seat).send(request)
                    if answer.status_code != 404:
                        messages = [_start(answer), {"type": "http.response.body", "body": answer.content}]
                        break
        for message in messages:
            await send(message)

    async def _forward(self, seat: int, scope: Scope, body: bytes | None, receive: Receive, send: Send) -> None:
        if body is None:
            return  # it left
        whole = [body]
        del body  # once it is sent nobody needs it, however long the answer takes
        work = asyncio.create_task(self._pass_on(seat, scope, whole, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _pass_on(self, seat: int, scope: Scope, body: list[bytes], send: Send) -> None:
        client = self._colleagues.client(seat)
        scope["state"]["passed_on"] = True
        try:
            answer = await client.send(_request(scope, body), stream=True)
        except httpx.HTTPError:
            scope["state"]["passed_on"] = False  # this process says what became of it, and counts it
            raise
        try:
            await send(_start(answer))
            async for chunk in answer.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await answer.aclose()


def _request(scope: Scope, body: list[bytes]) -> httpx.Request:
    """`body`: whole, and taken out once it is sent. The target is the client's own, byte for byte: whoever reads it
    must see what the locks have seen."""
    from .http.tenant import tenant_of  # with the board's numpy, for which one process alone does not wait

    path, query = scope.get("raw_path") or scope["path"].encode(), scope.get("query_string", b"")
    headers = passed_on(scope["headers"], but=_NOT_SENT)
    headers.append((b"x-request-id", scope["state"]["request_id"].encode()))
    headers.append((TENANT, b"%d" % tenant_of(scope)))
    if body[0]:
        headers.append((b"content-length", b"%d" % len(body[0])))
    return httpx.Request(
        scope["method"], "http://api", headers=headers, content=_sent(scope, body) if body[0] else None,
        extensions={
            "target": path + (b"?" + query if query else b""),
            "timeout": {"connect": PATIENCE, "read": None, "write": PATIENCE, "pool": None},
        },
    )  # fmt: skip


async def _sent(scope: Scope, body: list[bytes]) -> AsyncIterator[bytes]:
    """The body. It takes no room here from then on: the other process has it, and counts it."""
    yield body.pop()
    if (held := scope["state"].get("held_body")) is not None:
        held.release()


def _start(answer: httpx.Response) -> Message:
    headers = passed_on(answer.headers.raw, but=_NOT_PASSED)
    return {"type": "http.response.start", "status": answer.status_code, "headers": headers}


async def _body(receive: Receive) -> bytes | None:
    """None where the client has left."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def _again(body: bytes | None, receive: Receive) -> Receive:
    """What has been read, once more."""
    left = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        if left:
            return left.pop()
        return {"type": "http.disconnect"} if body is None else await receive()

    return replay


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
