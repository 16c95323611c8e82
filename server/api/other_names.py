"""Other platforms' names for what is there: POST /invocations of SageMaker, /v1/engines/{model}/completions of OpenAI's
first clients"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from ..errors import bad_request
from ..generation.tasks import CLASSIFY, EMBED, GENERATE, REWARD
from ..state import ServerState
from ..wire.requests import CompletionRequest
from ..wire.scores import SCORED
from .answer import answer
from .chat import chat_completions
from .classify import classify, pooling
from .completions import Completion, completions
from .embeddings import embeddings
from .read import check_type, measure, read_request, work_on_body
from .route import new_router
from .scores import rerank, scores

router = new_router()

Handler = Callable[[Request], Awaitable[Response]]
_KINDS = ("messages", "prompt", "input", "query", *SCORED)  # fields that only one kind of request has


@router.post("/invocations", response_class=Response)
async def invocations(request: Request) -> Response:
    """Whatever the body's fields, and of inputs and conversations what the model does, make of it."""
    check_type(request)
    raw = await request.body()  # kept, for the one who answers it reads it again
    decode = measure(request, raw)
    fields = await work_on_body(request, lambda: decode(raw))
    return await _handler(request, fields if isinstance(fields, dict) else {})(request)


def _handler(request: Request, fields: dict[str, Any]) -> Handler:
    """Raises ApiError (400, 503)."""
    kinds = [kind for kind in _KINDS if kind in fields]
    if len(kinds) != 1:
        names = ", ".join(f"'{kind}'" for kind in _KINDS)
        raise bad_request(f"The body must have exactly one of {names}.", None, "missing_required_parameter")
    if kinds[0] not in ("messages", "input"):
        return completions if kinds[0] == "prompt" else rerank if kinds[0] == "query" else scores
    wanted = (GENERATE, EMBED, CLASSIFY, REWARD) if kinds[0] == "messages" else (EMBED, CLASSIFY, REWARD)
    name = fields.get("model")
    info = ServerState.of(request).serving(name if isinstance(name, str) else None, wanted).engine_info()
    task = next((task for task in wanted if task in info.tasks), wanted[0])
    if task == GENERATE:
        return chat_completions
    if "task" in fields or (task != EMBED and info.by_token):
        return pooling
    return embeddings if task == EMBED else classify


@router.post("/v1/engines/{model:path}/completions", response_class=Response)
async def engine_completions(request: Request, model: str) -> Response:
    """A completion of the model that the path names."""
    body = await read_request(CompletionRequest, request)
    body.model = model
    return await answer(Completion(request, body))
