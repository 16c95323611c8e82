"""`truncation: auto`: as many of the latest turns as the context holds, found by their sizes and a few renderings."""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from itertools import accumulate
from typing import Any

from fastapi import Request

from ..dialects.responses.history import SYSTEM, History
from ..errors import ApiError
from ..state import ServerState
from ..text.encoding import USUAL
from ..wire.requests import ChatRequest
from .read import on_bodies
from .tokens import ChatPrompt, chat_tokens, drop_pictures

OF_MESSAGE = 24  # characters that a template adds, in the time and the tokens that they cost
TRIES = 8  # renderings; most conversations need one, others two or three
BY_SIZE = 4  # of these, then each halves what is left


async def fitted(request: Request, chat: ChatRequest, history: History) -> ChatPrompt:
    """The prompt of the latest turns that leave room for the answer; of the last one in any case. Raises ApiError
    (400)."""
    server = ServerState.of(request)
    limit = server.engine_info().max_model_len
    _, asked = chat.token_limit
    room = asked or max(1, limit // 8)  # a good answer is rarely longer, and nobody said
    first, starts, sizes = await on_bodies(request, request.state.body_size >> 2, lambda: _turns(history.unread(chat)))
    characters = float(USUAL)  # a token, until one rendering has told
    fewest, most = 0, len(starts) - 1  # turns to leave out
    best: ChatPrompt | None = None
    for turn in range(TRIES):
        if turn < BY_SIZE:  # sizes fall
            drop = bisect_left(sizes, -characters * (limit - room), key=lambda size: -size)
            drop = min(max(drop, fewest), most)
        else:
            drop = (fewest + most) // 2 if best is not None or turn < TRIES - 1 else most
        some = partial(history.messages, chat, first, starts[drop])
        is_last, prompt = drop == len(starts) - 1, None
        drop_pictures(request)
        try:
            prompt = await chat_tokens(request, chat, some, size=max(sizes[drop], request.state.body_size))
        except ApiError as error:
            if error.code != "context_length_exceeded" or is_last:
                raise
        if prompt is not None and (len(prompt.token_ids) + room <= limit or is_last):
            best, most = prompt, drop - 1
        else:
            fewest = drop + 1
        if fewest > most:
            break
        # Where the tokens were too many to be counted, there are fewer characters in one than was thought.
        characters = sizes[drop] / len(prompt.token_ids) if prompt is not None and prompt.token_ids else characters / 2
    assert best is not None  # the last turn alone is an answer, or an error
    return best


def _turns(messages: list[dict[str, Any]]) -> tuple[int, list[int], list[int]]:
    """(How many messages come before the first turn, where turns begin, how many characters there are from each on).
    Reasoning does not count: templates leave out most of it."""
    first = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM), 0)
    starts = [first, *(i for i, message in enumerate(messages) if i > first and message["role"] == "user")]
    system = sum(map(_size, messages[:first]))
    behind = [system, *accumulate(map(_size, reversed(messages[first:])), initial=system)][1:]
    return first, starts, [behind[len(messages) - start] for start in starts]


def _size(message: dict[str, Any]) -> int:
    calls = message.get("tool_calls") or ()
    return OF_MESSAGE + len(message.get("content", "")) + sum(len(str(call["function"]["arguments"])) for call in calls)
