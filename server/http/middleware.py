"""Around every request: its id, the HTTP metrics, and the last resort when a handler breaks. Plain ASGI, no task."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from ipaddress import ip_address
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ApiError, internal_error, shorten
from ..histogram import Histogram
from ..observe.request_log import Finished
from ..options.http import HttpConfig, json_list
from .path import check_path, drop_slash
from .request_id import clean_id

logger = logging.getLogger(__name__)

FINE = (.01, .025, .05, .075, .1, .25, .5, .75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)  # fmt: skip
COARSE = (0.1, 0.5, 1)
PROBES = frozenset(
    {"/metrics", "/health", "/livez", "/readyz", "/ping", "/version", "/load", "/server_info", "/ui/events"}
)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
READING = frozenset({"GET", "HEAD", "OPTIONS"})  # change nothing, and a page of another origin cannot read them
# Origins of this machine: its pages, and applications that show pages of their own.
LOOPBACK = (
    r"https?://(localhost|tauri\.localhost|127(\.\d{1,3}){3}|0\.0\.0\.0|\[::1\])(:\d+)?"
    r"|(app|file|tauri|vscode-file|vscode-webview)://.*"
)

# Of names that no public name server knows: a page of such a host is nobody else's.
PRIVATE_DOMAINS = (".localhost", ".local", ".internal", ".lan", ".home.arpa")


class HttpMetrics(Collector):
    """The names of prometheus-fastapi-instrumentator, which vLLM's users chart."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, str, str], int] = defaultdict(int)  # (handler, method, status class)
        self.durations: defaultdict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(COARSE))
        self.fine_durations = Histogram(FINE)
        self.request_bytes: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])  # handler → [requests, bytes]
        self.response_bytes: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])

        self.refusals: Counter[str] = Counter()  # connections that the server ended, by reason

    def observe(self, handler: str, method: str, status: int, seconds: float, bytes_in: int, bytes_out: int) -> None:
        self.requests[handler, method, f"{status // 100}xx"] += 1
        self.durations[handler, method].observe(seconds)
        self.fine_durations.observe(seconds)
        for table, size in ((self.request_bytes, bytes_in), (self.response_bytes, bytes_out)):
            table[handler][0] += 1
            table[handler][1] += size

    def collect(self) -> Iterator[Metric]:
        refusals = CounterMetricFamily("http_refused_connections", "Connections ended for a reason.", labels=["reason"])
        for reason, count in self.refusals.items():
            refusals.add_metric([reason], count)
        yield refusals
        requests = CounterMetricFamily("http_requests", "Requests.", labels=["handler", "method", "status"])
        for key, count in self.requests.items():
            requests.add_metric(key, count)
        yield requests
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "Time from the request to its last byte.", labels=["handler", "method"]
        )
        for labels, histogram in self.durations.items():
            durations.add_metric(labels, histogram.buckets(), histogram.sum)
        yield durations
        fine = HistogramMetricFamily(
            "http_request_duration_highr_seconds", "The same over all handlers, in finer buckets.", labels=[]
        )
        fine.add_metric([], self.fine_durations.buckets(), self.fine_durations.sum)
        yield fine
        for name, table in (("request", self.request_bytes), ("response", self.response_bytes)):
            sizes = SummaryMetricFamily(f"http_{name}_size_bytes", f"Size of the {name} bodies.", labels=["handler"])
            for handler, (count, size) in table.items():
                sizes.add_metric([handler], count, size)
            yield sizes


class RequestMiddleware:
    def __init__(
        self, app: ASGIApp, metrics: HttpMetrics, listeners: Sequence[Callable[[Finished], None]] = ()
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.listeners = listeners  # to hear of every request when it is over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        drop_slash(scope, scope.get("root_path", ""))
        headers = dict(scope["headers"])
        request_id = clean_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id  # a handler may replace it by the one in the body
        started, start = time.time(), time.monotonic()
        state["arrival"] = start
        status = 0
        bytes_out = 0

        def watch(message: Message) -> Awaitable[None]:
            nonlocal status, bytes_out
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", state["request_id"].encode())]
            else:
                bytes_out += len(message.get("body", b""))
                if not message.get("more_body"):  # who has all of the answer may ask again, and not this process
                    release()
            return send(message)

        def send_event(data: bytes) -> Awaitable[None]:  # no coroutine of its own: this runs for every streamed chunk
            nonlocal bytes_out
            bytes_out += len(data)
            return send({"type": "http.response.body", "body": data, "more_body": True})

        def release() -> None:
            if (ticket := state.get("ticket")) is not None:
                ticket.release()

        state["send_event"] = send_event  # of a stream: the layers further in only look at how an answer begins
        try:
            check_path(scope)  # before anybody compares it with anything
            await self.app(scope, receive, watch)
        except ClientDisconnect:
            pass  # it left before its request was whole
        except ApiError as error:  # of the path, or of a body that was to be passed on
            if status:
                raise
            await error.response(scope)(scope, receive, watch)
        except Exception:
            request_id = state["request_id"]
            logger.exception("request %s failed", request_id)
            if status:  # too late for an error: the server closes the connection, which the client notices
                raise
            await internal_error(request_id).response(scope)(scope, receive, watch)
        finally:
            release()
            if not state.get("passed_on"):  # else the process that answers counts it
                self._over(scope, headers, status, started, start, bytes_out)

    def _over(
        self, scope: Scope, headers: dict[bytes, bytes], status: int, started: float, start: float, bytes_out: int
    ) -> None:
        """Tells whoever listens, and counts. `status`: 0 where nothing was sent."""
        state, route = scope["state"], scope.get("route")
        handler = getattr(route, "path", "none")  # never the raw path: it would be a label without bound
        finished = Finished(
            state["request_id"], (scope.get("client") or ("",))[0], scope["method"], handler, scope["path"],
            status or 499, started, time.monotonic() - start, headers, state.get("generation"),
            "" if (key := state.get("key")) is None else key.name,
        )  # fmt: skip
        for listener in self.listeners:
            listener(finished)
        if handler not in PROBES:
            method = scope["method"] if scope["method"] in METHODS else "OTHER"
            length = headers.get(b"content-length", b"")
            self.metrics.observe(
                handler, method, status or 499, time.monotonic() - start,
                int(length) if length.isdigit() else 0, bytes_out,
            )  # fmt: skip


class Cors(CORSMiddleware):
    """Starlette's, without the coroutine that it puts between every chunk of a stream and the socket; and with a guard
    where nobody needs a key: a page of an origin that is not allowed gets nothing done, not even unread."""

    def __init__(
        self, app: ASGIApp, origins: Sequence[str] | None, needs_keys: bool, allow_methods: Sequence[str] = ("*",),
        allow_headers: Sequence[str] = ("*",), allow_credentials: bool = False, expose_headers: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`origins`: None: any where keys are needed, else those of this machine; the rest as CORSMiddleware has it."""
        at_home = LOOPBACK if origins is None and not needs_keys else None
        usual = ["*"] if at_home is None else []
        super().__init__(
            app, usual if origins is None else origins, allow_methods, allow_headers, allow_credentials, at_home,
            expose_headers=expose_headers,
        )  # fmt: skip
        self._guards = not needs_keys and not self.allow_all_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._guards and scope["type"] == "http" and scope["method"] not in READING:
            headers = Headers(scope=scope)
            if (foreign := self._foreign_origin(scope, headers)) is not None:
                await _origin_not_allowed(foreign).response(scope)(scope, receive, send)
                return
        if self.allow_all_origins and not any(name == b"origin" for name, _ in scope.get("headers", ())):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def _foreign_origin(self, scope: Scope, headers: Headers) -> str | None:
        """The one that the request comes from, where it is neither allowed nor that of this server's own page. What
        another process has passed on, that one has judged."""
        origin = headers.get("origin")
        if origin is None or self.is_allowed_origin(origin) or scope.get("state", {}).get("forwarded"):
            return None
        # Behind a proxy the host may be another. No page can set either header; browsers send the first where a name
        # is sure to be that of who answers (https, localhost). Otherwise whoever owns a public name may have let it
        # point here while his page was open (DNS rebinding): then it is no proof that origin and host are the same.
        if headers.get("sec-fetch-site") == "same-origin":
            return None
        host = headers.get("host", "")
        return None if origin.partition("://")[2] == host and not _is_public_name(host) else origin

    async def simple_response(self, scope: Scope, receive: Receive, send: Send, request_headers: Headers) -> None:
        def forward(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                return self.send(message, send, request_headers)
            return send(message)

        await self.app(scope, receive, forward)


def cors_options(config: HttpConfig, needs_keys: bool, exposed: Sequence[str] = ()) -> dict[str, Any]:
    """What Cors is told. `exposed`: headers of answers that pages may read, beside the usual ones."""
    return {
        "origins": None if config.allowed_origins is None else json_list("allowed_origins", config.allowed_origins),
        "needs_keys": needs_keys,
        "allow_methods": json_list("allowed_methods", config.allowed_methods),
        "allow_headers": json_list("allowed_headers", config.allowed_headers),
        "allow_credentials": config.allow_credentials,
        "expose_headers": ["x-request-id", "retry-after", *exposed],
    }


def _is_public_name(host: str) -> bool:
    """Whether anybody can have a host of that name: it is no IP address, has several parts, and is in no domain that
    is for private networks."""
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        name = name.lower().rstrip(".")
        return "." in name and not name.endswith(PRIVATE_DOMAINS)
    return False


def _origin_not_allowed(origin: str) -> ApiError:
    message = (
        f"Pages of {shorten(origin)} may not change anything on this server, which asks nobody for a key: allow them "
        "with --allowed-origins, a JSON list."
    )
    return ApiError(403, message, code="origin_not_allowed")
