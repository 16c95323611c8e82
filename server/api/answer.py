"""A request's way through a dialect: let in, made prompts, submitted, then told as a stream or as one body."""

from __future__ import annotations

import time
from functools import partial

from fastapi import Request, Response

from ..client.routing import Route
from ..dialects.events import stream
from ..errors import ApiError, bad_request
from ..generation.admission import Ticket, guess_tokens
from ..generation.answer import Answer, collect
from ..generation.choice import Choice, Delta
from ..generation.generation import Generation
from ..generation.tasks import check_task
from ..http.auth import cache_salt_of, key_of, may_prioritize, owner_of
from ..http.disconnect import unless_disconnected
from ..http.event_stream import EventStream
from ..http.request_id import clean_id
from ..http.tenant import tenant_of
from .dialect import Deltas, Dialect, Head
from .route import watch


async def answer(dialect: Dialect) -> Response:
    """Raises ApiError and EngineDeadError until the answer begins, ClientDisconnected when nobody waits for it."""
    arrival = time.monotonic()
    request, body, server = dialect.request, dialect.body, dialect.server
    info = server.engine_info()
    if body.priority and info.scheduling_policy == "priority" and not may_prioritize(request.scope):
        message = "This key may not set 'priority': leave it out, or name the key in --priority-keys."
        raise ApiError(403, message, param="priority", code="priority_not_allowed")
    name = server.model_name(body.model)
    check_task(info, *dialect.tasks)
    if body.request_id is not None and "x-request-id" not in request.headers:
        request.state.request_id = clean_id(body.request_id)
    request_id = request.state.request_id
    head = Head(dialect.id_prefix + request_id, int(time.time()), name)
    ticket = await _admit(dialect, arrival)
    if dialect.in_background:
        generation = await unless_disconnected(request.receive, _submit(dialect, ticket, arrival, name))
        request.state.ticket = None
        return dialect.detach(generation, head, _deltas(dialect, generation), ticket)
    if dialect.streams:
        generation, first, deltas = await unless_disconnected(request.receive, _begin(dialect, ticket, arrival, name))
        events = dialect.events(generation, head)
        told = stream(generation, events, first, deltas, request_id)
        return EventStream(told, generation.close, dialect.headers, server.config.sse_ping_interval)
    generation, answers = await unless_disconnected(request.receive, _collect(dialect, ticket, arrival, name))
    response = await server.tokenise(dialect.slowness(answers), partial(dialect.respond, generation, answers, head))
    await dialect.settle()
    return response


async def _admit(dialect: Dialect, arrival: float) -> Ticket:
    """Not more than a guess: a request is let in, or not, before it is tokenised. Raises ApiError (400, 429)."""
    request, server = dialect.request, dialect.server
    num_tokens = guess_tokens(request.state.body_size, dialect.num_prompts, server.client.info)
    load = dialect.load(num_tokens)
    key = key_of(request.scope)
    if key is not None:
        key.quota.check_open(load.num_requests, load.param, server.admission.seconds_for, server.metrics.rejected)
        key.quota.check(num_tokens, server.metrics.rejected)
    ticket = server.admission.admit(
        load.num_requests, load.num_tokens, arrival, request.state.arrival, param=load.param,
        tenant=tenant_of(request.scope),
    )  # fmt: skip
    request.state.ticket = ticket  # released when the request is over, however it ends
    if key is not None:
        dialect.charge = key.quota.begin(num_tokens, load.num_requests)
        ticket.on_release = dialect.charge.finish
    return ticket


async def _submit(dialect: Dialect, ticket: Ticket, arrival: float, name: str) -> Generation:
    """Prompts that the engine has, with their clocks running, of the model of this name. Whoever gets them must close
    them."""
    request, body, server = dialect.request, dialect.body, dialect.server
    route = route_of(request, len(server.client.engines))
    prompts = await dialect.prompts()
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    load = dialect.load(num_tokens)
    if dialect.charge is not None:
        dialect.charge.settle(num_tokens)
    ticket.settle(load.num_tokens, param="prompt" if load.param == "n" else load.param)
    ready = await dialect.prepare(prompts)
    dialect.reports = [None] * len(ready.prompts)
    ended = None if ready.grammar is None else partial(server.grammars.release, ready.grammar)
    if (adapter := server.adapters.find(name)) is None:
        try:
            server.model_name(name)  # it may have been unloaded a moment ago
        except ApiError:
            if ended is not None:
                ended()
            raise
    generation = Generation(
        server.client,
        server.metrics,
        server.model.tokenizer,
        ready.prompts if adapter is None else [prompt.with_adapter(adapter.id) for prompt in ready.prompts],
        arrival=arrival,
        n=dialect.n,
        text=ready.text,
        priority=body.priority or 0,
        cache_salt=cache_salt_of(request.scope, body.cache_salt),
        tenant=ticket.tenant,
        route=route,
        on_close=ended if adapter is None else adapter.use(ended),
        model=name if adapter is None else server.model.names[0],
        adapter="" if adapter is None else adapter.name,
        tells_timing=server.config.enable_per_request_metrics,
    )
    await generation.submit()
    if dialect.charge is not None:
        dialect.charge.generation = generation
    server.generations[generation] = request.state.request_id, owner_of(request.scope)
    request.state.generation = generation  # for whoever looks at the request when it is over
    watch(request, ticket, generation)
    return generation


def route_of(request: Request, num_engines: int) -> Route:
    """Which engine its headers ask for. Raises ApiError (400)."""
    session, rank = request.headers.get("x-session-id"), request.headers.get("x-data-parallel-rank")
    if rank is None:
        return Route(session)
    if not rank.isascii() or not rank.isdigit() or len(rank) > 4 or int(rank) >= num_engines:
        raise bad_request(
            f"The header X-data-parallel-rank is {rank!r:.40}, and the engines here are 0 to {num_engines - 1} "
            "(--data-parallel-size): name one of them, or leave it out."
        )
    return Route(session, int(rank))


def _deltas(dialect: Dialect, generation: Generation) -> Deltas:
    """What becomes of it, told to the log too where that wants it."""
    log, request_id = dialect.server.request_log, dialect.request.state.request_id
    if log.prompts:
        log.prompt(request_id, generation, dialect.server.model.tokenizer)
    deltas = generation.deltas()
    if generation.scores_prompts:
        deltas = _described(dialect, generation, deltas)
    is_text = generation.prompts[0].sampling.pooling is None
    return log.listen(request_id, deltas) if log.outputs and is_text else deltas


async def _described(dialect: Dialect, generation: Generation, deltas: Deltas) -> Deltas:
    """The same, with each prompt described before anything of its choices comes out."""
    async for choice, delta in deltas:
        index = choice.index // generation.n
        if (entries := generation.prompt_logprobs[index]) is not None:
            generation.prompt_logprobs[index] = None
            await dialect.describe(generation, index, entries)
        yield choice, delta


async def _begin(
    dialect: Dialect, ticket: Ticket, arrival: float, name: str
) -> tuple[Generation, tuple[Choice, Delta], Deltas]:
    """Returns once the engine has said something: until then an error can still be a status code."""
    generation = await _submit(dialect, ticket, arrival, name)
    try:
        deltas = _deltas(dialect, generation)
        return generation, await anext(deltas), deltas
    except BaseException:
        generation.close()
        raise


async def _collect(dialect: Dialect, ticket: Ticket, arrival: float, name: str) -> tuple[Generation, list[Answer]]:
    generation = await _submit(dialect, ticket, arrival, name)
    try:
        return generation, await collect(generation.choices, _deltas(dialect, generation))
    finally:
        generation.close()
