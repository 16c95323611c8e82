"""The requests of batches pass through the application itself, without a socket: what a server answers, a batch
answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import httpx

from ..wire.batch_lines import Line

PAUSE = 1.0  # seconds to the next try, where an answer does not say how many
LONGEST = 60.0
JSON = {"content-type": "application/json"}


async def ask(
    http: httpx.AsyncClient, read: Callable[[], Line], turn: AbstractAsyncContextManager[Any] | None = None
) -> httpx.Response | str:
    """The answer, whose body is JSON, or what went wrong. `turn` is held while it is made, not while it waits; `read`
    gives the line for as long."""
    turn = nullcontext() if turn is None else turn
    try:
        while True:
            async with turn:
                line = read()
                response = await http.post(line.url, content=line.body, headers=JSON)
                del line
            if response.status_code != 429:  # else too much is on its way at once: the batch has time
                break
            await asyncio.sleep(min(LONGEST, float(response.headers.get("retry-after", PAUSE))))
        if not response.headers.get("content-type", "").startswith("application/json"):
            return f"the answer is no JSON: {response.status_code}"
        return response
    except Exception as error:
        return f"{type(error).__name__}: {error}"
