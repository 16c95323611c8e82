"""Who may ask what: every route of every API process, in every spelling of its path, with each kind of key."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httptools
import httpx
import pytest

from vserve.server.app import create_app
from vserve.server.client.board import Board
from vserve.server.client.meeting import FIRST, Meeting
from vserve.server.colleagues import SECRET, Elsewhere
from vserve.server.desk import Desk
from vserve.server.http.front_door import FrontDoor
from vserve.server.http.page import load_page
from vserve.server.http.path import has_dot_segments
from vserve.server.options.config import ServerConfig

ANYBODY, USER, ADMIN = range(3)
KEYS = {"nobody": ANYBODY, "user": USER, "admin": ADMIN}
REFUSALS = {ANYBODY: 401, USER: 403}  # of who may not: by what their key is
CONVERSATION, ITEM = "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items/{item_id}"
CHAT, RESPONSE = "/v1/chat/completions/{completion_id}", "/v1/responses/{response_id}"
FILE, BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"

# Whom each route asks for, and which process answers it. A new one needs a row.
TABLE = {
    **{("GET", path): (ANYBODY, "here") for path in ("/health", "/readyz", "/livez", "/ping", "/docs", "/redoc", "/",
                                                     "/ui/{name:path}")},
    ("POST", "/ping"): (ANYBODY, "here"),
    **{("POST", path): (USER, "here") for path in (
        "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/derender", "/v1/messages/render", "/inference/v1/generate", "/v1/completions",
        "/v1/completions/render", "/v1/messages", "/v1/messages/count_tokens", "/v2/chat", "/v2/embed",
        "/v1/embeddings", "/classify", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
        "/invocations",
        "/v1/engines/{model:path}/completions", "/tokenize", "/detokenize",
    )},
    **{("GET", path): (USER, "here") for path in (
        "/openapi.json", "/v1/models", "/v1/models/{model:path}", "/version", "/tokenizer_info", "/load", "/ui/events",
    )},
    ("GET", "/metrics"): (USER, "first"),
    **{("POST", path): (USER, "first") for path in (
        "/v1/responses", "/v1/responses/input_tokens", "/v1/responses/render", "/v1/responses/compact",
        f"{RESPONSE}/cancel", CHAT,
    )},
    **{("GET", path): (USER, "first") for path in (
        RESPONSE, f"{RESPONSE}/input_items", "/v1/chat/completions", CHAT, f"{CHAT}/messages",
    )},
    **{(method, path): (USER, "first") for method, path in (
        ("POST", "/v1/conversations"), ("GET", CONVERSATION), ("POST", CONVERSATION), ("DELETE", CONVERSATION),
        ("GET", f"{CONVERSATION}/items"), ("POST", f"{CONVERSATION}/items"), ("GET", ITEM), ("DELETE", ITEM),
        ("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", FILE), ("DELETE", FILE), ("GET", f"{FILE}/content"),
        ("POST", "/v1/batches"), ("GET", "/v1/batches"), ("GET", BATCH), ("POST", f"{BATCH}/cancel"),
    )},
    ("DELETE", RESPONSE): (USER, "first"),
    ("DELETE", CHAT): (USER, "first"),
    ("GET", "/server_info"): (ADMIN, "here"),
    **{("POST", path): (ADMIN, "here") for path in ("/v1/requests/{request_id}/cancel", "/abort_request")},
    **{("POST", path): (ADMIN, "first") for path in (
        "/reload", "/scale_data_parallel", "/scale_elastic_ep", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    )},
}  # fmt: skip
OWN = {
    ("GET", "/own/metrics"), ("POST", "/own/reload"), ("POST", "/own/engines"), ("GET", "/own/adapters"),
    ("POST", "/own/adapters"), ("POST", "/own/adapters/retire"), ("POST", "/own/chats"),
}  # fmt: skip

SAME: dict[str, Callable[[str], str]] = {
    "plain": str, "query": lambda path: f"{path}?x=/health", "slash": lambda path: path if path == "/" else f"{path}/",
    "absolute": lambda path: f"http://health{path}", "root path": lambda path: f"/proxy{path}",
}  # fmt: skip
# Another spelling of the same route; to the locks it is no public one.
ENCODED: dict[str, Callable[[str], str]] = {
    "letter": lambda path: f"/%{ord(path[1]):02x}{path[2:]}", "capital hex": lambda path: path[:-1] + hex_of(path[-1]),
    "slashes": lambda path: "/" + path[1:].replace("/", "%2f"),
}  # fmt: skip
NOTHING: dict[str, Callable[[str], str]] = {
    "double": lambda path: f"/{path}", "capitals": str.upper, "semicolon": lambda path: f"{path};x",
    "two roots": lambda path: f"/proxy/proxy{path}", "twice encoded": lambda path: f"/%25{ord(path[1]):02x}{path[2:]}",
}  # fmt: skip
DOTS = [
    "/.{}", "{}/.", "{}/..", "/x/..{}", "/health/..{}", "/v1/responses/../..{}", "/v1/responses/x/../../..{}",
    "/v1/responses/%2e%2e/%2E%2e{}", "/v1/responses/.%2e/%2e.{}", "/v1/responses/..%2f..%2f/{}",
    "/v1/responses/..%2F..{}",
    "/v1/responses%2f..%2f..{}", "/v1/responses/..%5c..{}", "/v1/responses/..\\..{}", "/v1/responses/%252e%252e/..{}",
    "/v1/responses/%252e%252e/%252e%252e{}", "/v1/responses/%25%32%65%25%32%65{}", "/v1/responses/%25252e%25252e{}",
    "/v1/responses/%2525252525252e.{}", "/v1/responses/..;x/..;{}", "/v1/responses//..//..{}", "http://x/v1/../v1/..{}",
    "/proxy/v1/responses/../..{}", "/v1/chat/completions/x/../../..{}", "/v1/requests/../..{}/cancel",
]  # fmt: skip


def hex_of(char: str) -> str:
    return f"%{ord(char):02X}"


def concrete(path: str) -> str:
    """A path of this route."""
    for name, value in {
        "{name:path}": next(page for page in load_page().paths if page.startswith("/ui/")).removeprefix("/ui/"),
        "{model:path}": "test", "{response_id}": "resp_1", "{completion_id}": "chatcmpl-1", "{request_id}": "one",
        "{file_id}": "file-1", "{batch_id}": "batch_1", "{conversation_id}": "conv_1", "{item_id}": "msg_1",
    }.items():  # fmt: skip
        path = path.replace(name, value)
    return path


class Process:
    """One of two: its application, whose routes only say who they are, its front door and its desk."""

    def __init__(self, folder: str, seat: int, board: Board, engine: Any, model: Any) -> None:
        config = ServerConfig(api_key=("user",), admin_api_key=("admin",), root_path="/proxy")
        self.seat, self.meeting = seat, Meeting(folder, seat, seat, board, "the secret")
        self.app = create_app(engine, config, model, meeting=self.meeting)
        self.server = self.app.state.server
        self.passed_on: list[Any] = []  # scopes of requests from the other one
        self.own: list[str] = []  # routes of the desk that were called
        self.app.router.routes[:] = map(copy.copy, self.app.router.routes)  # which all applications share
        for route in self.app.routes:
            route.app = self.says(route.path)  # type: ignore[attr-defined]
        self.front = FrontDoor(engine, "/proxy", load_page())
        self.front.app = self.app
        self.desk = Desk(self.meeting, self.receive)  # type: ignore[arg-type]
        self.desk.routes = {route: self.notes(route[1]) for route in self.desk.routes}

    def says(self, path: str) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"x-route", path.encode()), (b"x-seat", str(self.seat).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b""})

        return app

    def notes(self, path: str) -> Any:
        async def note(server: Any, body: bytes) -> None:
            self.own.append(path)

        return note

    async def receive(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed_on.append(scope)
        await self.front(scope, receive, send)

    async def ask(
        self, method: str, target: str, key: str = "nobody", app: Any = None, *headers: tuple[bytes, bytes]
    ) -> tuple[int, str, str]:
        """→ (status, route that answered, seat that did)."""
        raw = httptools.parse_url(target.encode()).path
        query = target.encode().partition(b"?")[2]
        scope = {
            "type": "http", "method": method, "path": unquote(raw.decode()), "raw_path": raw, "query_string": query,
            "headers": [*headers, *([] if key == "nobody" else [(b"authorization", f"Bearer {key}".encode())])],
            "root_path": "", "client": None, "server": None, "scheme": "http", "http_version": "1.1",
        }  # fmt: skip
        sent: list[Any] = []
        coming = iter([{"type": "http.request", "body": b""}])

        async def receive() -> Any:
            return next(coming, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await (app or self.front)(scope, receive, send)
        found = dict(sent[0]["headers"])
        return sent[0]["status"], found.get(b"x-route", b"").decode(), found.get(b"x-seat", b"").decode()


Two = tuple[Process, Process]


@pytest.fixture
def run(tmp_path: Path, engine: Any, text_model: Any) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """run(test) → `await test(first, second)`, whose desks are open."""
    board = Board(None, 2, FIRST)
    boards = board, Board(os.dup(board.descriptor), 2, 1)

    @contextlib.asynccontextmanager
    async def two() -> AsyncIterator[Two]:
        first, second = (Process(str(tmp_path), seat, boards[seat], engine, text_model) for seat in (0, 1))
        desks = []
        for process in (first, second):
            process.desk.open(process.server)
            desks.append(asyncio.create_task(process.desk.serve()))
        try:
            yield first, second
        finally:
            for process in (first, second):
                await process.server.colleagues.close()
            for desk in desks:
                desk.cancel()

    def do(test: Callable[..., Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with two() as (first, second):
                await test(first, second)

        asyncio.run(asyncio.wait_for(main(), 120))

    yield do
    for one in boards:
        os.close(one.descriptor)


def routes_of(process: Process) -> set[tuple[str, str]]:
    return {
        (method, route.path)  # type: ignore[attr-defined]
        for route in process.app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }


def test_every_route_asks_for_its_key_in_every_spelling(run: Any) -> None:
    async def test(*processes: Process) -> None:
        for process in processes:
            assert routes_of(process) == set(TABLE), "each route needs a row that says who may"
            for (method, route), (who, where) in TABLE.items():
                seat = "0" if where == "first" else str(process.seat)
                path = concrete(route)
                spellings = [(spell(path), who) for spell in SAME.values()]
                if path != "/":
                    encoded = {spell(path) for spell in ENCODED.values()} - {path}
                    spellings += [(target, max(who, USER)) for target in encoded]
                for target, asked in spellings:
                    for key, level in KEYS.items():
                        expected = (200, route, seat) if level >= asked else (REFUSALS[level], "", "")
                        assert await process.ask(method, target, key) == expected, (process.seat, target, key)

    run(test)


def test_what_is_spelled_like_no_route_opens_none(run: Any) -> None:
    async def test(*processes: Process) -> None:
        for process in processes:
            for method, route in TABLE:
                if route == "/":
                    continue  # //, too, is the page
                for spell in NOTHING.values():
                    target = spell(concrete(route))
                    for key, level in KEYS.items():
                        status, found, _ = await process.ask(method, target, key)
                        if found:  # by its parameter, a route that the key may ask anyway
                            assert "{" in found and TABLE[method, found][0] <= level > ANYBODY, (target, key, found)
                        else:
                            assert status in ((401,) if level == ANYBODY else (403, 404, 405)), (target, key, status)

    run(test)


def test_a_path_with_dots_opens_nothing_to_nobody(run: Any) -> None:
    """Not to an administrator either: whoever resolves it would find another route than the locks have seen."""

    async def test(*processes: Process) -> None:
        paths = {concrete(path) for _, path in (*TABLE, *OWN)} - {"/"}
        for process in processes:
            loading = FrontDoor(process.server.client, "/proxy", load_page())
            for key in KEYS:
                for dots in DOTS:
                    for path in paths if key == "user" else ("/own/engines", "/reload", "/v1/models"):
                        answer = await process.ask("POST", dots.format(path), key)
                        assert answer == (400, "", ""), (process.seat, dots, path, key, answer)
                    answer = await process.ask("GET", dots.format("/livez"), key, loading)
                    assert answer == (400, "", ""), dots
        assert not any(process.own or process.passed_on for process in processes)

    run(test)


def test_the_desk_answers_colleagues_alone(run: Any) -> None:
    async def test(first: Process, second: Process) -> None:
        assert set(first.desk.routes) == OWN, "each route of the desk needs a row"
        transport = httpx.AsyncHTTPTransport(uds=first.meeting.api_path(FIRST))
        secret = SECRET.decode()
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as stray:
            for method, path in (*OWN, ("GET", "/v1/models"), ("GET", "/health"), ("POST", "/reload")):
                for headers in ([], [(secret, "guess")], [(secret, "")], [("authorization", "Bearer admin")],
                                [(secret, "the secret"), (secret, "the secret")]):  # fmt: skip
                    answer = await stray.request(method, path, headers=headers)
                    assert answer.status_code == 403 and not answer.headers.get("x-route"), (path, headers)
            assert not first.own and not first.passed_on
        colleagues = second.server.colleagues
        for method, path in sorted(OWN):
            assert (await colleagues.client(FIRST).request(method, path)).status_code == 200
        assert first.own == [path for _, path in sorted(OWN)]
        for method, path in OWN:
            other = "POST" if method == "GET" else "GET"
            if (other, path) not in OWN:
                assert (await colleagues.client(FIRST).request(other, path)).status_code == 404
        for process in (first, second):  # and by no way of the server's own
            process.own.clear()
            for method, path in OWN:
                for key in KEYS:
                    assert (await process.ask(method, path, key))[0] == (401 if key == "nobody" else 404)
            assert not process.own

    run(test)


def test_a_request_is_passed_on_byte_for_byte(run: Any) -> None:
    """Whatever else looks at it sees what the locks have seen; and the secret is none of the client's business."""

    async def test(first: Process, second: Process) -> None:
        for target in ("/v1/responses/a%20b%7e", "/v1/responses/a?q=%2E%2e/../x&y=|", "/v1/responses/a%3Fb"):
            status, _, seat = await second.ask("GET", target, "user", None, (SECRET, b"guess"))
            assert (status, seat) == (200, "0") and "/v1/responses" in target
            scope = first.passed_on.pop()
            query = scope["query_string"]
            assert scope["raw_path"] + (b"?" + query if query else b"") == target.encode()
            assert SECRET not in dict(scope["headers"]), "it goes no further"
        # Past the check of dots: what a client library makes of them is another route.
        elsewhere = Elsewhere(second.app, second.server.colleagues)

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            scope["state"] = {"request_id": "r"}
            await elsewhere(scope, receive, send)

        for path in ("/v1/responses/../../own/reload", "/v1/responses/%2e%2e/%2e%2e/own/reload"):
            assert (await second.ask("POST", path, "user", inner))[0] == 400
            assert first.passed_on.pop()["raw_path"] == path.encode() and not first.own

    run(test)


@pytest.mark.parametrize("path", ["/..a", "/a..", "/...", "/.well-known", "/v1/models/Qwen3-0.6B", "/a%2eb", "/a%20b.",
                                  "/50%", "/%zz", "/100%25", "/a.;b", "/", "*"])  # fmt: skip
def test_dots_in_names_are_fine(path: str) -> None:
    assert not has_dot_segments(path.encode())


def test_a_long_path_is_looked_at_once() -> None:
    """However it is encoded: it stands before any key. Each round of decoding shortens it, and there are few."""
    deep = b"/" + b"%" + b"25" * 4000 + b"2e"
    assert has_dot_segments(deep)
    assert not has_dot_segments(b"/" + b"%41" * 2700)
