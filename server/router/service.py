"""The router's process, from its first request to its last."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Sequence

import httpx
from starlette.types import ASGIApp

from ..http.auth import Authentication, Locks
from ..http.body_limit import BodyLimit
from ..http.middleware import Cors, RequestMiddleware, cors_options
from ..http.server import Server
from ..http.uvicorn_options import uvicorn_options
from ..options.config import ServerConfig
from .app import RouterApp
from .asked import LARGEST_BODY
from .backend import Backends

logger = logging.getLogger("vserve")

LAST_BYTES = 2  # seconds


def guarded(router: RouterApp, config: ServerConfig, locks: Locks) -> RequestMiddleware:
    """The application that clients reach."""
    app: ASGIApp = BodyLimit(router, lambda: config.max_body_size or LARGEST_BODY, lambda reason: None)
    if locks.are_needed:
        app = Authentication(app, locks)
    if router.judges_origins:
        app = Cors(app, **cors_options(config, locks.need_keys))
    return RequestMiddleware(app, router.http_metrics)


class RouterService:
    def __init__(
        self, urls: Sequence[str], config: ServerConfig, sock: socket.socket, *, server_key: str | None,
        interval: float, cache_tokens: int,
    ) -> None:  # fmt: skip
        """As the options of `vserve router`."""
        self._config, self._sock = config, sock
        # The environment's proxies are for the way out, not for servers of one's own.
        # Given up before servers do so (vLLM's after 5 s), else a request may be sent to one that just closes.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1024, keepalive_expiry=3)
        self._http = httpx.AsyncClient(trust_env=False, limits=limits)
        self._backends = Backends(urls, self._http, api_key=server_key, interval=interval, cache_tokens=cache_tokens)
        locks = Locks(config)
        self.app = RouterApp(self._backends, self._http, server_key=server_key, asks_for_keys=locks.are_needed)
        self._rejected: Counter[str] = Counter()
        self._server = Server(
            guarded(self.app, config, locks), last_bytes=LAST_BYTES, **uvicorn_options(config, self._refused)
        )
        self._stopping: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until `stop`, and what is open then has ended."""
        watching = asyncio.create_task(self._backends.watch())
        try:
            await self._server.serve(sockets=[self._sock])
        finally:
            watching.cancel()
            self.app.lanes.close()
            await self._http.aclose()

    def stop(self) -> None:
        """Nothing new begins; what runs gets --shutdown-timeout to finish. Called again: it ends at once."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._drain())
        else:
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        self.app.draining = True
        deadline = time.monotonic() + self._config.shutdown_timeout
        while self.app.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._server.should_exit = True

    def _refused(self, reason: str) -> None:
        self.app.http_metrics.refusals[reason] += 1
