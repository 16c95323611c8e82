"""Around every request: its id, the HTTP metrics, and the last resort when a handler breaks. Plain ASGI, no task."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import internal_error
from ..histogram import Histogram
from ..observe.request_log import Finished
from .path import drop_slash
from .request_id import clean_id

logger = logging.getLogger(__name__)

FINE = (.01, .025, .05, .075, .1, .25, .5, .75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)  # fmt: skip
COARSE = (0.1, 0.5, 1)
PROBES = frozenset(
    {"/metrics", "/health", "/livez", "/readyz", "/ping", "/version", "/load", "/server_info", "/ui/events"}
)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


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
            await self.app(scope, receive, watch)
        except ClientDisconnect:
            pass  # it left before its request was whole
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
    """Starlette's, without the coroutine that it puts between every chunk of a stream and the socket."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.allow_all_origins and not any(name == b"origin" for name, _ in scope.get("headers", ())):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def simple_response(self, scope: Scope, receive: Receive, send: Send, request_headers: Headers) -> None:
        def forward(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                return self.send(message, send, request_headers)
            return send(message)

        await self.app(scope, receive, forward)
