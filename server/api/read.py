"""The body of a request, read and validated: on a thread where it is large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel

from ..errors import ApiError
from ..http import body as small_body
from ..http import large_body
from ..http.disconnect import unless_disconnected
from ..http.large_body import LARGE
from ..wire.validation import unknown_parameter, validated

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")


async def read_request(model: type[Model], request: Request) -> Model:
    """The validated body, whose size is `request.state.body_size` from then on. Raises ApiError (400, 415); with
    --strict-params also for fields that the model lacks.
    """
    check_type(request)
    raw = b"".join([piece async for piece in request.stream()])  # starlette's own way keeps it as long as the request
    request.state.body_size = len(raw)
    if len(raw) <= LARGE:
        body = validated(model, small_body.decode(raw))
    else:
        body = await work_on_body(request, lambda: validated(model, large_body.decode(raw)))
    if (held := getattr(request.state, "held_body", None)) is not None:
        held.release()
    if body.model_extra and request.app.state.server.config.strict_params:
        raise unknown_parameter(next(iter(body.model_extra)))
    return body


def check_type(request: Request) -> None:
    """Raises ApiError (415) for a body that is no plain JSON."""
    # None counts as another: a page of any origin may post that, or text/plain, before the browser asks for permission.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        message = "Unsupported Media Type: Only 'application/json' is allowed; send the header "
        raise ApiError(415, message + "'Content-Type: application/json'.", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "A compressed body is not accepted.", code="unsupported_media_type")


async def work_on_body(request: Request, work: Callable[[], T]) -> T:
    """The result of `work`, which takes as long as the request's body is large: on a thread if it is. Raises
    ClientDisconnected as soon as nobody waits for it.
    """
    if request.state.body_size <= LARGE:
        return work()
    # The thread's queue keeps what nobody waits for any more until its turn comes; the body shall not stay with it.
    waiting = [work]

    async def wait() -> T:
        return await asyncio.get_running_loop().run_in_executor(
            request.app.state.server.bodies, lambda: waiting.pop()()
        )

    try:
        return await unless_disconnected(request.receive, wait())
    finally:
        waiting.clear()
