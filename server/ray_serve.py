"""A Ray Serve application: replicas of one model that come and go with the queue, routed as engines of one server are.

serve run vserve.server.ray_serve:build model=Qwen/Qwen3-0.6B min_replicas=1 max_replicas=3
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..engine.options.config import EngineConfig
from .client.replicas import make_client
from .client.routing import Load, Router
from .errors import ApiError
from .http.tenant import tenant_of
from .lanes import TENANT, Lanes
from .options.config import ServerConfig
from .options.keywords import from_keywords
from .router.asked import LARGEST_BODY, NUM_LANES, Ask, Asked, asked_of
from .router.begun import lost

logger = logging.getLogger(__name__)

OPEN_REQUESTS = 4096  # of a replica, and of the front: engines have queues of their own
DRAINING = 3600.0  # seconds that a replica which is to go may still answer
CACHE_TOKENS = 1 << 20  # of a replica's prefix cache, about
HOP = frozenset((b"content-length", b"connection", b"transfer-encoding"))


class Policy(RequestRouter):
    """Where the first token is expected soonest: see client/routing.py. Serve pickles all of this file by value for it:
    classes of this file are others there, so that what it is to recognise stands elsewhere."""

    def initialize_state(self, cache_tokens: int = CACHE_TOKENS) -> None:
        self._router = Router(0, cache_tokens)
        self._slots: list[ReplicaID | None] = []  # the router's indices
        self._open: dict[ReplicaID, dict[str, Ask]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best one, and then those that are tried while it takes no more."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        self._keep(replicas)
        loads = [self._load(slot) if slot in replicas else None for slot in self._slots]
        given = pending_request.args[0] if pending_request is not None and pending_request.args else None
        ask = given if isinstance(given, Ask) else Ask(Asked(), 0)
        index, _ = self._router.choose(ask.asked.keys, ask.num_tokens, loads, ask.asked.session)
        best = self._slots[index]
        assert best is not None
        return [[replicas[best]], [replica for id, replica in replicas.items() if id != best]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if pending_request.args and isinstance(pending_request.args[0], Ask):
            id = pending_request.metadata.internal_request_id
            self._open.setdefault(replica_id, {})[id] = pending_request.args[0]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._open.get(replica_id, {}).pop(internal_request_id, None)

    def _load(self, replica: ReplicaID | None) -> Load:
        asks = self._open.get(replica, {}).values() if replica is not None else ()
        return Load(sum(ask.num_tokens for ask in asks if not ask.begun), len(asks))

    def _keep(self, replicas: Iterable[ReplicaID]) -> None:
        """A slot for each of them; who has gone leaves its own, with what was in its cache."""
        there = {*replicas, *self.curr_replicas}
        for index, slot in enumerate(self._slots):
            if slot is not None and slot not in there:
                self._slots[index] = None
                self._router.forget(index)
                self._open.pop(slot, None)
        for replica in replicas:
            if replica not in self._slots:
                if None not in self._slots:
                    self._slots.append(None)
                    self._router.add()
                self._slots[self._slots.index(None)] = replica


class Model:
    """A replica: an engine, and the server's application without its port."""

    async def __init__(self, engine: EngineConfig, config: ServerConfig) -> None:  # type: ignore[misc]
        from .app import create_app
        from .text.model import load_text_model

        self._client = make_client(engine, restarts=config.engine_restarts)
        model, _ = await asyncio.gather(
            asyncio.to_thread(load_text_model, engine.model, config, engine), self._client.start()
        )
        self._app = create_app(self._client, config, model)
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()

    async def answer(
        self, ask: Ask, method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> AsyncIterator[Any]:
        """The status, the headers, then the body as it comes."""
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query, "root_path": "", "headers": headers,
            "client": None, "server": None,
        }  # fmt: skip
        coming: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(64)
        left = asyncio.Event()
        given = iter([{"type": "http.request", "body": body}])

        async def receive() -> dict[str, Any]:
            for message in given:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, coming.put)  # type: ignore[arg-type]
            finally:
                if not left.is_set():
                    await coming.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await coming.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"]
                    yield [pair for pair in message["headers"] if pair[0].lower() not in HOP]
                elif message.get("body"):
                    yield message["body"]
            await task
        finally:
            left.set()
            task.cancel()

    def check_health(self) -> None:
        """Raises RuntimeError where the engine will not come back; Serve then starts another replica."""
        if self._client.dead is not None:
            raise RuntimeError(self._client.dead)


class Front:
    """What HTTP reaches."""

    def __init__(self, model: Any, largest_body: int = LARGEST_BODY) -> None:
        """`largest_body`: bytes."""
        self._model = model.options(stream=True)
        self._largest_body = largest_body
        self._lanes = Lanes(NUM_LANES)  # where large bodies are looked at

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except ApiError as error:
            return error.response(request.scope)

    async def _answer(self, request: Request) -> Response:
        body, path = await self._body(request), request.scope["path"]
        TENANT.set(tenant_of(request.scope))
        asked = await asked_of(request, body, self._lanes)
        ask = Ask(asked, asked.num_tokens)
        headers = [pair for pair in request.headers.raw if pair[0] not in HOP]
        is_stored = request.method == "POST" and asked.is_stored(path)
        for is_last in (is_stored, True):
            parts = self._model.answer.remote(
                ask, request.method, path, request.scope["query_string"], headers, body
            )  # fmt: skip
            try:
                status, found = await anext(parts), await anext(parts)
                break
            except RayActorError:
                if is_last:
                    raise lost(is_stored) from None
                logger.warning("a replica died before it had answered; the request goes to another")

        async def rest() -> AsyncIterator[bytes]:
            async for part in parts:
                ask.begun = True
                yield part
            ask.begun = True

        response = StreamingResponse(rest(), status)
        response.raw_headers = found
        return response

    async def _body(self, request: Request) -> bytes:
        """Raises ApiError (413)."""
        pieces, size = [], 0
        async for piece in request.stream():
            pieces.append(piece)
            size += len(piece)
            if size > self._largest_body:
                message = f"The request's body exceeds {self._largest_body} bytes; send less, or raise max_body_size."
                raise ApiError(413, message, code="body_too_large")
        return b"".join(pieces)


def build(args: dict[str, Any]) -> serve.Application:
    """`args`: options of Serve's autoscaling (min_replicas, max_replicas, target_ongoing_requests, upscale_delay_s, …),
    and those of `vserve serve`, with underscores. Raises ConfigError, TypeError for one that does not exist."""
    scaling = {"min_replicas": 1, "max_replicas": 1, "target_ongoing_requests": 64}
    scaling |= {name: args[name] for name in args if name in AutoscalingConfig.model_fields}
    engine, config, _ = from_keywords({name: value for name, value in args.items() if name not in scaling})
    takes = {"num_cpus": engine.cpu_threads or 1} if engine.device == "cpu" else {"num_gpus": engine.num_ranks}
    model = serve.deployment(
        Model, name="model", ray_actor_options=takes, max_ongoing_requests=OPEN_REQUESTS, autoscaling_config=scaling,
        graceful_shutdown_timeout_s=DRAINING, graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(request_router_class=Policy),
    )  # fmt: skip
    made = serve.deployment(
        Front, name="front", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=OPEN_REQUESTS * 16,
        graceful_shutdown_timeout_s=DRAINING,
    )  # fmt: skip
    return made.bind(model.bind(engine, config), config.max_body_size or LARGEST_BODY)
