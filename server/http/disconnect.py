"""A client that leaves while its request is worked on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from ..errors import ClientDisconnected

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientDisconnected as soon as the client is gone; `work` is cancelled then.

    A server cancels only handlers that send; one that is still thinking has to watch the connection itself.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            if not working.cancelled():
                working.exception()  # nobody is left to hear it
