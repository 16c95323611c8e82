"""The body of a request, read and validated: on a thread where it is large, or has many values."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel

from ..errors import ApiError
from ..http import body as small_body
from ..http import large_body
from ..http.disconnect import unless_disconnected
from ..state import INLINE_CHARACTERS
from ..wire.validation import unknown_parameter, validated

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")


async def read_request(model: type[Model], request: Request) -> Model:
    """The validated body, of which `request.state` then knows what `measure` says. Raises ApiError (400, 415, 429);
    with --strict-params also for fields that the model lacks.
    """
    check_type(request)
    raw = b"".join([piece async for piece in request.stream()])  # starlette's own way keeps it as long as the request
    raw = raw.removeprefix(codecs.BOM_UTF8)  # which files of Windows begin with, and JSON may (RFC 8259, section 8.1)
    decode = measure(request, raw)
    body = await work_on_body(request, lambda: validated(model, decode(raw)))
    if (held := getattr(request.state, "held_body", None)) is not None:
        held.release()
    check_ignored(request, list(body.model_extra or ()), list(model.model_fields))
    return body


def check_ignored(request: Request, names: list[str], known: Sequence[str] = ()) -> None:
    """Counts what of a request was ignored. `known`: the fields that it may have. Raises ApiError (400) with
    --strict-params."""
    if not names:
        return
    server = request.app.state.server
    if server.config.strict_params:
        raise unknown_parameter(names[0])
    server.metrics.unknown_fields.take(names, known)


def measure(request: Request, raw: bytes) -> Callable[[bytes], Any]:
    """How to decode this body. The request's state gets `body_size`, the bytes that it brings (to which are added those
    of what it goes on from), and `body_work`, what this body alone costs, as Lanes.run takes it; 0: hardly anything.
    """
    request.state.body_size = len(raw)
    request.state.body_work = large_body.work_of(raw)
    return large_body.decode if request.state.body_work else small_body.decode


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
    ClientDisconnected as soon as nobody waits for it, ApiError (429) where too much is to be read.
    """
    size = request.state.body_work
    if not size:
        return work()
    return await unless_disconnected(request.receive, request.app.state.server.bodies.run(size, work))


async def on_bodies(request: Request, size: int, work: Callable[[], T]) -> T:
    """The result of `work` on what is stored, of about so many characters that are tokenised in the same time: where
    bodies are read, unless it is little."""
    return work() if size <= INLINE_CHARACTERS else await request.app.state.server.bodies.run(size, work)
