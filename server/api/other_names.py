"""Other platforms' names for what is there: POST /invocations of SageMaker, /v1/engines/{model}/completions of OpenAI's
first clients"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from ..errors import bad_request
from ..wire.requests import CompletionRequest
from .answer import answer
from .chat import chat_completions
from .completions import Completion, completions
from .embeddings import embeddings
from .read import check_type, measure, read_request, work_on_body
from .route import new_router

router = new_router()

# The field that only this kind of request has.
_KINDS: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "messages": chat_completions,
    "prompt": completions,
    "input": embeddings,
}


@router.post("/invocations", response_class=Response)
async def invocations(request: Request) -> Response:
    """A chat, a completion or embeddings: whichever has the fields of the body."""
    check_type(request)
    raw = await request.body()  # kept, for the one who answers it reads it again
    decode = measure(request, raw)
    fields = await work_on_body(request, lambda: decode(raw))
    kinds = [kind for kind in _KINDS if isinstance(fields, dict) and kind in fields]
    if len(kinds) != 1:
        names = ", ".join(f"'{kind}'" for kind in _KINDS)
        raise bad_request(f"The body must have exactly one of {names}.", None, "missing_required_parameter")
    return await _KINDS[kinds[0]](request)


@router.post("/v1/engines/{model:path}/completions", response_class=Response)
async def engine_completions(request: Request, model: str) -> Response:
    """A completion of the model that the path names."""
    body = await read_request(CompletionRequest, request)
    body.model = model
    return await answer(Completion(request, body))
