"""The requests of batches pass through the application itself, without a socket: what a server answers, a batch
answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import httpx

from ..wire.batch_lines import Line

PAUSE = 1.0  # seconds to the next try, where an answer does not say how many
LONGEST = 60.0
DEATHS = 2  # of engines with one line in work, then it is answered 503
REFUSALS = 20  # other answers 503
JSON = {"content-type": "application/json"}


async def ask(
    http: httpx.AsyncClient,
    read: Callable[[], Line],
    waits: Callable[[], bool],
    turn: AbstractAsyncContextManager[Any] | None = None,
) -> httpx.Response | str:
    """The answer, whose body is JSON, or what went wrong. `turn` is held while it is made, not while it waits; `read`
    gives the line for as long; nothing is asked while `waits` says so."""
    turn = nullcontext() if turn is None else turn
    tries: Counter[str] = Counter()  # by why
    try:
        while True:
            while waits():
                await asyncio.sleep(PAUSE)
            async with turn:
                line = read()
                response = await http.post(line.url, content=line.body, headers=JSON)
                del line
            # Of 429 too much is on its way at once: the batch has time.
            if response.status_code != 429 and not _may_pass(response, tries):
                break
            await asyncio.sleep(min(LONGEST, float(response.headers.get("retry-after", PAUSE))))
        if not response.headers.get("content-type", "").startswith("application/json"):
            return f"the answer is no JSON: {response.status_code}"
        return response
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _may_pass(response: httpx.Response, tries: Counter[str]) -> bool:
    """Whether it is worth another try. An engine that died while it had the request may have died of it."""
    if response.status_code != 503 or response.headers.get("x-should-retry") == "false":
        return False
    code = "engine_dead" if b'"engine_dead"' in response.content else ""
    tries[code] += 1
    return tries[code] < (DEATHS if code else REFUSALS)
