"""POST /v1/responses, and what becomes of stored ones: GET, DELETE, cancel, input_items"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import Request, Response

from ..dialects.as_chat import MAX_ITEMS, speaking_of
from ..dialects.events import stream, told
from ..dialects.pages import page
from ..dialects.pieces import NONE, Pieces
from ..dialects.responses.beginning import beginning, repeated
from ..dialects.responses.events import ResponseEvents
from ..dialects.responses.history import History, has_turns, newest
from ..dialects.responses.items import item_messages
from ..dialects.responses.listed import input_items
from ..dialects.responses.log import EventLog
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
from ..wire.encoded import encode
from .answer import answer
from .background import run_in_background
from .dialect import Chatting, Deltas, Head
from .ignored import ignored_headers
from .read import check_ignored, on_bodies, read_request, work_on_body
from .route import new_router
from .tokens import chat_tokens
from .truncation import fitted

router = new_router()


@router.post("/v1/responses", response_class=Response)
async def create_response(request: Request) -> Response:
    """An answer to items: text, reasoning and function calls."""
    body = await read_request(ResponsesRequest, request)
    previous = previous_response(request, body.previous_response_id, body.truncation == "auto")
    body.see(ServerState.of(request).sees(body.model))
    asked = await work_on_body(request, lambda: _Asked(body, previous, request.headers.get(TAG_HEADER)))
    check_ignored(request, body.ignored)
    with speaking_of(NAMES):
        return await answer(ResponseToItems(request, body, asked))


class _Asked:
    """What becomes of a body at once, as long as that takes: its chat, and bytes of what is stored in the end."""

    def __init__(self, body: ResponsesRequest, previous: Stored | None, tag: str | None) -> None:
        """`tag`: see new_id. Raises ApiError (400).

        Nothing of `previous` is decoded but its last message, where the body has none."""
        # Whoever knows it may read the response: nothing that a client chooses is all of it.
        self.id = f"resp_{new_id(tag)}"
        before, self.items = (NONE, NONE) if previous is None else (previous.messages, previous.all_items)
        messages = body.messages()
        self.chat = body.chat(messages or list(before.last()))
        self.history = History.of(before, body.instructions, bool(messages))
        self.said = NONE
        if body.stores:
            self.said = Pieces.of(messages)
            self.items += Pieces.of(input_items(body.input, self.id, len(self.items)))
        body.input = []  # it is not kept for as long as the answer takes
        self.repeated = repeated(body)


class ResponseToItems(Chatting):
    id_prefix = "resp_"

    def __init__(self, request: Request, body: ResponsesRequest, asked: _Asked) -> None:
        super().__init__(request, asked.chat)
        self.id = asked.id
        self._body = body
        self._asked = asked
        self._history = asked.history
        self._owner = owner_of(request.scope)
        self.in_background = body.background is True
        if self.in_background and not self.server.config.response_store_size:
            raise bad_request("'background' needs a store: --response-store-size is 0.", "background")

    @property
    def keeps_answer(self) -> bool:
        return True  # the last event of a stream has all of it once more

    async def tokens(self) -> list[list[int]]:
        if self._body.truncation != "auto":
            return await super().tokens()
        most, pieces = self.server.max_body_size(), self._history.pieces
        shorter = partial(newest, pieces, most, MAX_ITEMS)
        pieces, before = await on_bodies(self.request, pieces.num_bytes >> 2, shorter), pieces
        if pieces is not before and not has_turns(pieces) and not any(m["role"] == "user" for m in self.body.messages):
            raise bad_request(
                f"No user message is within the latest {most} bytes (--max-body-size) in {MAX_ITEMS} messages of the "
                "conversation that this response goes on from, and 'input' brings none: send one, or the latest part "
                "of the conversation, as 'input'.",
                "previous_response_id",
                "context_length_exceeded",
            )
        self._history = replace(self._history, pieces=pieces)
        self._asked.items = self._asked.items.latest(most, MAX_ITEMS)
        prompt = await fitted(self.request, self.body, self._history)
        return self._taken(prompt)

    def conversation(self) -> list[dict[str, Any]]:
        return self._history.messages(self.body)

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
        run_in_background(self.server, events, told, ticket, lambda: self._keep(events.response, events.log))
        if events.log is None:
            return Response(answer, headers=dict(self.headers), media_type="application/json")
        return _event_stream(self.server, events.log.follow(0), self.headers)

    def whole(self, generation: Generation, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        return told(self._events(generation, head), answers).response

    def _events(self, generation: Generation, head: Head) -> ResponseEvents:
        about = {"id": self.id, "created_at": head.created, "model": head.model}
        response = beginning(self._body, self.body, self.server.model.defaults, about | self._asked.repeated)
        form = LogprobFormat.of(self.body)
        return ResponseEvents(
            generation, response, self.server.model.tokenizer, form, self._body.offer.called, self._finished
        )

    def _finished(self, response: dict[str, Any]) -> None:
        if self._body.stores and not self.in_background:  # whose stream has not been written yet
            self._keep(response)

    def _keep(self, response: dict[str, Any], log: EventLog | None = None) -> None:
        answered = Pieces.of(item_messages(response["output"], "output", self._body.leave_out))
        messages = self._history.pieces + self._asked.said + answered
        self.server.responses.put(self.id, self._owner, Stored.of(response, messages, self._asked.items, log))

    @property
    def headers(self) -> Mapping[str, str]:
        return ignored_headers(self._body.ignored)


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
        return _json(encode(page(stored.items.ids(), request.query_params, "desc", stored.items.read)))

    return await server.tokenise(stored.items.num_bytes >> 4, listed)


@router.post("/v1/responses/input_tokens", response_class=Response)
async def count_input_tokens(request: Request) -> Response:
    """How many tokens the input of such a request is; nothing is generated."""
    body = await read_request(ResponsesRequest, request)
    server = ServerState.of(request)
    server.model_name(body.model)
    server.engine_info()
    previous = previous_response(request, body.previous_response_id)
    body.see(server.sees(body.model))
    asked = await work_on_body(request, lambda: _Asked(body, previous, request.headers.get(TAG_HEADER)))
    check_ignored(request, body.ignored)
    with speaking_of(NAMES):
        work = chat_tokens(request, asked.chat, lambda: asked.history.messages(asked.chat), fits=False)
        prompt = await unless_disconnected(request.receive, work)
    content = msgspec.json.encode({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})
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
        told = None if stored.log is None else stored.log.follow(start)
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
    if stored.status != "cancelled":
        message = f"The response `{shorten(response_id)}` has ended ({stored.status}): there is nothing to cancel."
        raise bad_request(message, "response_id")
    return _json(stored.answer)


def previous_response(request: Request, id: str | None, is_cut: bool = False) -> Stored | None:
    """The one that a request goes on from, whose conversation counts as brought by the request from then on. Raises
    ApiError (400), also for a conversation that no body could hold, unless it `is_cut` before it is rendered."""
    if id is None:
        return None
    server = ServerState.of(request)
    if (stored := server.responses.get(id, owner_of(request.scope))) is None:
        raise bad_request(
            f"There is no stored response `{shorten(id)}`; send the conversation itself as 'input'.",
            "previous_response_id",
            "previous_response_not_found",
        )
    most, num_bytes, num_messages = server.max_body_size(), stored.messages.num_bytes, len(stored.messages)
    if not is_cut and (num_bytes > most or num_messages > MAX_ITEMS):
        raise bad_request(
            f"The conversation of `{shorten(id)}` has {num_bytes} bytes in {num_messages} messages; one that goes on "
            f"may have {most} (--max-body-size) in {MAX_ITEMS}. Send its latest part as 'input', or a response with "
            "'truncation': 'auto', which leaves out the oldest turns.",
            "previous_response_id",
            "context_length_exceeded",
        )
    request.state.body_size += min(num_bytes, most)
    return stored


def _not_found(id: str) -> ApiError:
    return ApiError(404, f"There is no stored response `{shorten(id)}`.", param="response_id", code="not_found")


def _event_stream(server: ServerState, told: AsyncIterator[bytes], headers: Mapping[str, str]) -> EventStream:
    """Of a response that goes on without its readers."""
    return EventStream(told, lambda: None, headers, server.config.sse_ping_interval)


def _json(content: bytes | memoryview) -> Response:
    return Response(content, media_type="application/json")
