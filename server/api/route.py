"""How requests reach their handlers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from ..errors import took_too_long
from ..generation.admission import Ticket
from ..generation.generation import Generation


class Route(APIRoute):
    """Calls the handler with the request and what stands in the path, which is text. FastAPI's own way there, through
    bodies and dependencies that no handler here has, takes 8 % of the time that a short request costs.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def handle(request: Request) -> Response:
            admission = request.app.state.server.admission
            if admission.request_timeout:
                return await in_time(request, self.endpoint(request, **request.path_params))
            response: Response = await self.endpoint(request, **request.path_params)
            return response

        return handle


async def in_time(request: Request, answering: Coroutine[Any, Any, Response]) -> Response:
    """Ends `answering` with a 408 when the request's time is over, whatever it is at: its body, a thread, a grammar.
    What the engine computes has a clock of its own; see `watch`.
    """
    admission = request.app.state.server.admission
    limit = admission.request_timeout
    try:
        left = request.state.arrival + limit - time.monotonic()
        async with asyncio.timeout(max(0.0, left)) as clock:
            request.state.clock = clock
            return await answering
    except TimeoutError:
        if not clock.expired():
            raise
        admission.timed_out("request")
        raise took_too_long(limit) from None


def watch(request: Request, ticket: Ticket, generation: Generation) -> None:
    """From now on the ticket's clocks run, which end an answer that has begun."""
    clock = getattr(request.state, "clock", None)
    if clock is not None:
        if clock.expired():
            return  # it ends the request
        clock.reschedule(None)
    ticket.watch(generation)


def new_router() -> APIRouter:
    return APIRouter(route_class=Route)
