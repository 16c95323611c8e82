"""POST /v1/responses, and what becomes of stored ones: GET, DELETE, cancel"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from fastapi import Request, Response

from ..auth import owner_of
from ..dialects.as_chat import speaking_of
from ..dialects.responses_events import ResponseEvents
from ..dialects.responses_items import item_messages
from ..dialects.responses_request import NAMES, ResponsesRequest
from ..errors import ApiError, bad_request, shorten, unsupported
from ..generation import Generation
from ..logprobs import LogprobFormat
from ..protocol import ChatRequest
from ..speech import Speech
from ..state import ServerState
from ..validation import read_request
from .answer import IGNORED_HEADER, Answer, Head, header_list, respond, told
from .route import new_router
from .tokens import chat_tokens

router = new_router()


@router.post("/v1/responses", response_class=Response)
async def create_response(request: Request) -> Response:
    """An answer to items: text, reasoning and function calls."""
    body = await read_request(ResponsesRequest, request)
    server = ServerState.of(request)
    owner = owner_of(request.scope)
    messages = [*_previous(server, body, owner), *body.messages()]
    chat = body.chat(messages)
    # Whoever knows it may read the response: it is not made of anything that a client chooses.
    id = f"resp_{uuid.uuid4().hex}"

    async def tokenise() -> list[list[int]]:
        if body.truncation == "auto":
            return [await _fitted(request, chat)]
        _, token_ids = await chat_tokens(request, chat, chat.messages)
        return [token_ids]

    def finished(response: dict[str, Any]) -> None:
        if body.stores:
            said = item_messages(response["output"], "output")
            server.responses.put(id, owner, response, [*messages, *said])

    def events(generation: Generation, head: Head) -> ResponseEvents:
        response = _response(body, chat, server, id, head)
        return ResponseEvents(generation, response, server.model.tokenizer, LogprobFormat.of(chat), finished)

    def streamed(generation: Generation, head: Head) -> ResponseEvents:
        stream = events(generation, head)
        server.responses.running[owner, stream.response["id"]] = stream
        return stream

    def full(generation: Generation, answers: list[Answer], head: Head) -> dict[str, Any]:
        return told(events(generation, head), answers).response

    with speaking_of(NAMES):
        response = await respond(
            request,
            chat,
            id_prefix="resp_",
            tokenise=tokenise,
            echo=None,
            default_max_tokens=None,
            chunks=streamed,
            full=full,
            speech=Speech.of(chat, server.model),
        )
    if body.ignored:
        response.headers[IGNORED_HEADER] = header_list(body.ignored)
    return response


@router.get("/v1/responses/{response_id}", response_class=Response)
async def get_response(request: Request, response_id: str) -> Response:
    """A stored response, or how far one is that is being streamed."""
    server, owner = ServerState.of(request), owner_of(request.scope)
    if request.query_params.get("stream", "false") not in ("", "false", "0"):
        raise unsupported("stream", "Streaming a stored response")
    if (running := server.responses.streamed(response_id, owner)) is not None:
        return _json(msgspec.json.encode(running.response))
    if (stored := server.responses.get(response_id, owner)) is None:
        raise _not_found(response_id)
    return _json(stored.response)


@router.delete("/v1/responses/{response_id}", response_class=Response)
async def delete_response(request: Request, response_id: str) -> Response:
    """Forgets a stored response."""
    if not ServerState.of(request).responses.delete(response_id, owner_of(request.scope)):
        raise _not_found(response_id)
    return _json(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))


@router.post("/v1/responses/{response_id}/cancel", response_class=Response)
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a response that is being streamed; one that has ended stays as it is."""
    server, owner = ServerState.of(request), owner_of(request.scope)
    if (running := server.responses.streamed(response_id, owner)) is not None:
        running.generation.cancel()
        return _json(msgspec.json.encode({**running.response, "status": "cancelled"}))
    if (stored := server.responses.get(response_id, owner)) is None:
        raise _not_found(response_id)
    return _json(stored.response)


def _previous(server: ServerState, body: ResponsesRequest, owner: str) -> list[dict[str, Any]]:
    """The conversation that the request goes on with."""
    id = body.previous_response_id
    if id is None:
        return []
    if (stored := server.responses.get(id, owner)) is None:
        raise bad_request(
            f"There is no stored response `{shorten(id)}`; send the conversation itself as 'input'.",
            "previous_response_id",
            "previous_response_not_found",
        )
    return stored.conversation()


async def _fitted(request: Request, chat: ChatRequest) -> list[int]:
    """The prompt of as many of the latest turns as leave room for the answer; of the last one in any case."""
    limit = ServerState.of(request).engine_info().max_model_len
    _, asked = chat.token_limit
    room = asked or max(1, limit // 8)  # a good answer is rarely longer, and nobody said
    messages = chat.messages
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    first = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    starts = [first, *(i for i in turns if i > first)]
    fewest, most = 0, len(starts) - 1  # turns to leave out
    drop = 0  # most conversations fit
    while True:
        chat.messages = messages[:first] + messages[starts[drop] :]
        _, token_ids = await chat_tokens(request, chat, chat.messages)
        if len(token_ids) + room <= limit:
            most = drop
        else:
            fewest = min(drop + 1, len(starts) - 1)
        if fewest >= most and drop == most:
            return token_ids
        drop = (fewest + most) // 2


def _response(body: ResponsesRequest, chat: ChatRequest, server: ServerState, id: str, head: Head) -> dict[str, Any]:
    """As it is when it begins."""
    defaults = server.model.defaults
    reasoning, text = body.reasoning, body.text
    return {
        "id": id,
        "object": "response",
        "created_at": head.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": head.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": None,
        "store": body.stores,
        "temperature": defaults.get("temperature", 1.0) if chat.temperature is None else chat.temperature,
        "text": {
            "format": {"type": "text"} if text is None or text.format is None else text.format,
            "verbosity": None if text is None else text.verbosity,
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.get("top_p", 1.0) if chat.top_p is None else chat.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _not_found(id: str) -> ApiError:
    return ApiError(404, f"There is no stored response `{shorten(id)}`.", param="response_id", code="not_found")


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
