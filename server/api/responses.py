"""POST /v1/responses, and what becomes of stored ones: GET, DELETE, cancel, input_items"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response

from ..dialects.as_chat import speaking_of
from ..dialects.events import stream, told
from ..dialects.pages import page
from ..dialects.responses.events import ResponseEvents
from ..dialects.responses.items import item_messages
from ..dialects.responses.listed import input_items
from ..dialects.responses.log import EventLog, retold
from ..dialects.responses.request import NAMES, ResponsesRequest
from ..dialects.store import Stored
from ..errors import ApiError, bad_request, shorten
from ..generation.admission import Ticket
from ..generation.answer import Answer
from ..generation.generation import Generation
from ..generation.logprobs import LogprobFormat
from ..http.auth import owner_of
from ..http.disconnect import unless_disconnected
from ..http.event_stream import EventStream
from ..http.request_id import TAG_HEADER, new_id
from ..state import ServerState
from ..wire.requests import ChatRequest
from .answer import answer
from .background import run_in_background
from .dialect import Chatting, Deltas, Head
from .ignored import ignored_headers
from .read import read_request, work_on_body
from .route import new_router
from .tokens import chat_tokens

router = new_router()


@router.post("/v1/responses", response_class=Response)
async def create_response(request: Request) -> Response:
    """An answer to items: text, reasoning and function calls."""
    body = await read_request(ResponsesRequest, request)
    previous = previous_response(request, body.previous_response_id)
    messages, chat = await work_on_body(request, lambda: _chat(body, previous))
    with speaking_of(NAMES):
        return await answer(ResponseToItems(request, body, chat, messages, previous))


class ResponseToItems(Chatting):
    id_prefix = "resp_"

    def __init__(
        self,
        request: Request,
        asked: ResponsesRequest,
        chat: ChatRequest,
        messages: list[dict[str, Any]],
        previous: Stored | None,
    ) -> None:
        """`messages`: the conversation that the answer goes on with, of which the chat may leave out turns; `previous`:
        the response that it goes on from."""
        super().__init__(request, chat)
        # Whoever knows it may read the response: nothing that a client chooses is all of it.
        self.id = f"resp_{new_id(request.headers.get(TAG_HEADER))}"
        self._asked = asked
        self._messages = messages
        self._previous = previous
        self._owner = owner_of(request.scope)
        self.in_background = asked.background is True
        if self.in_background and not self.server.config.response_store_size:
            raise bad_request("'background' needs a store: --response-store-size is 0.", "background")

    async def tokens(self) -> list[list[int]]:
        return [await _fitted(self.request, self.body)] if self._asked.truncation == "auto" else await super().tokens()

    def events(self, generation: Generation, head: Head) -> ResponseEvents:
        events = self._events(generation, head)
        self.server.responses.running[self._owner, self.id] = events
        return events

    def detach(self, generation: Generation, head: Head, deltas: Deltas, ticket: Ticket) -> Response:
        events = self.events(generation, head)
        told = stream(generation, events, None, deltas, self.request.state.request_id)
        answer = msgspec.json.encode({**events.response, "status": "queued"})
        if self.streams:
            events.log = EventLog()

        def ended() -> None:
            self._keep(events.response, b"" if events.log is None else b"".join(events.log.events))

        run_in_background(self.server, events, told, ticket, ended)
        if events.log is None:
            return Response(answer, headers=dict(self.headers), media_type="application/json")
        return _event_stream(self.server, events.log.follow(0), self.headers)

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        return told(self._events(generation, head), answers).response

    def _events(self, generation: Generation, head: Head) -> ResponseEvents:
        response = _response(self._asked, self.body, self.server, self.id, head)
        form = LogprobFormat.of(self.body)
        return ResponseEvents(generation, response, self.server.model.tokenizer, form, self._finished)

    def _finished(self, response: dict[str, Any]) -> None:
        if self._asked.stores and not self.in_background:  # whose stream has not been written yet
            self._keep(response)

    def _keep(self, response: dict[str, Any], events: bytes = b"") -> None:
        said = item_messages(response["output"], "output")
        items = items_of(self._previous)
        items += input_items(self._asked.input, self.id, len(items))
        self.server.responses.put(self.id, self._owner, response, [*self._messages, *said], items, events)

    @property
    def headers(self) -> Mapping[str, str]:
        return ignored_headers(self._asked.ignored)


@router.get("/v1/responses/{response_id}", response_class=Response)
async def get_response(request: Request, response_id: str) -> Response:
    """A stored response, or how far one is that is under way; with `?stream=true` the events of one in background."""
    server, owner = ServerState.of(request), owner_of(request.scope)
    if request.query_params.get("stream", "false") not in ("", "false", "0"):
        return _streamed(request, server, response_id, owner)
    if (running := server.responses.streamed(response_id, owner)) is not None:
        return _json(msgspec.json.encode(running.response))
    if (stored := server.responses.get(response_id, owner)) is None:
        raise _not_found(response_id)
    return _json(stored.answer)


@router.get("/v1/responses/{response_id}/input_items", response_class=Response)
async def list_input_items(request: Request, response_id: str) -> Response:
    """What a stored response was made of, the latest first; the items of those that it goes on from included."""
    server, owner = ServerState.of(request), owner_of(request.scope)
    if (stored := server.responses.get(response_id, owner)) is None:
        raise _not_found(response_id)

    def listed() -> Response:
        return _json(msgspec.json.encode(page(msgspec.json.decode(stored.items), request.query_params, "desc")))

    return await server.tokenise(len(stored.items), listed)


@router.post("/v1/responses/input_tokens", response_class=Response)
async def count_input_tokens(request: Request) -> Response:
    """How many tokens the input of such a request is; nothing is generated."""
    body = await read_request(ResponsesRequest, request)
    server = ServerState.of(request)
    server.model_name(body.model)
    server.engine_info()
    previous = previous_response(request, body.previous_response_id)
    _, chat = await work_on_body(request, lambda: _chat(body, previous))
    with speaking_of(NAMES):
        work = chat_tokens(request, chat, chat.messages, fits=False)
        _, token_ids = await unless_disconnected(request.receive, work)
    content = msgspec.json.encode({"object": "response.input_tokens", "input_tokens": len(token_ids)})
    return Response(content, headers=ignored_headers(body.ignored), media_type="application/json")


def _streamed(request: Request, server: ServerState, id: str, owner: str) -> Response:
    after = request.query_params.get("starting_after", "-1")
    if after != "-1" and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise bad_request(
            f"'starting_after' is {shorten(after)!r}; it must be the sequence number of an event.", "starting_after"
        )
    start = int(after) + 1
    if (running := server.responses.streamed(id, owner)) is not None:
        told = None if running.log is None else running.log.follow(start)
    elif (stored := server.responses.get(id, owner)) is not None:
        told = retold(stored.events, start) if stored.events else None
    else:
        raise _not_found(id)
    if told is None:
        message = f"The response `{shorten(id)}` has no events: 'background' and 'stream' keep them."
        raise bad_request(message, "stream")
    return _event_stream(server, told, {})


@router.delete("/v1/responses/{response_id}", response_class=Response)
async def delete_response(request: Request, response_id: str) -> Response:
    """Forgets a stored response."""
    responses, owner = ServerState.of(request).responses, owner_of(request.scope)
    if responses.streamed(response_id, owner) is not None:
        raise bad_request(f"The response `{shorten(response_id)}` is under way: cancel it first.", "response_id")
    if not responses.delete(response_id, owner):
        raise _not_found(response_id)
    return _json(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))


@router.post("/v1/responses/{response_id}/cancel", response_class=Response)
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a response that is being streamed; to do it twice is no error, to cancel what has been answered is one."""
    server, owner = ServerState.of(request), owner_of(request.scope)
    if (running := server.responses.streamed(response_id, owner)) is not None:
        running.generation.cancel()
        return _json(msgspec.json.encode({**running.response, "status": "cancelled"}))
    if (stored := server.responses.get(response_id, owner)) is None:
        raise _not_found(response_id)
    status = msgspec.json.decode(stored.answer)["status"]
    if status != "cancelled":
        message = f"The response `{shorten(response_id)}` has ended ({status}): there is nothing to cancel."
        raise bad_request(message, "response_id")
    return _json(stored.answer)


def previous_response(request: Request, id: str | None) -> Stored | None:
    """The one that a request goes on from. Raises ApiError (400)."""
    if id is None:
        return None
    if (stored := ServerState.of(request).responses.get(id, owner_of(request.scope))) is None:
        raise bad_request(
            f"There is no stored response `{shorten(id)}`; send the conversation itself as 'input'.",
            "previous_response_id",
            "previous_response_not_found",
        )
    return stored


def items_of(previous: Stored | None) -> list[dict[str, Any]]:
    """Those that a response had, then those that it said."""
    if previous is None:
        return []
    return [*msgspec.json.decode(previous.items), *msgspec.json.decode(previous.answer)["output"]]


def _chat(body: ResponsesRequest, previous: Stored | None) -> tuple[list[dict[str, Any]], ChatRequest]:
    messages = [*([] if previous is None else previous.conversation()), *body.messages()]
    return messages, body.chat(messages)


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
        try:
            _, token_ids = await chat_tokens(request, chat, chat.messages)
        except ApiError as error:
            if error.code != "context_length_exceeded" or drop == len(starts) - 1:
                raise
            token_ids = None
        if token_ids is not None and len(token_ids) + room <= limit:
            most = drop
        else:
            fewest = min(drop + 1, len(starts) - 1)
        if fewest >= most and drop == most and token_ids is not None:
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
        "background": body.background is True,
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


def _event_stream(server: ServerState, told: AsyncIterator[bytes], headers: Mapping[str, str]) -> EventStream:
    """Of a response that goes on without its readers."""
    return EventStream(told, lambda: None, headers, server.config.sse_ping_interval)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
