"""A response that runs without its client: read by GET while it runs, from the store when it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from ..dialects.responses.events import ResponseEvents
from ..generation.admission import Ticket
from ..state import ServerState


def run_in_background(
    server: ServerState, events: ResponseEvents, told: AsyncIterator[bytes], ticket: Ticket, ended: Callable[[], None]
) -> None:
    """Reads `told`, the stream of `events`, to its end, then calls `ended`; holds the place in the queue until then."""
    task = asyncio.create_task(_run(server, events, told, ticket, ended))
    server.tasks.add(task)  # the event loop itself holds tasks weakly
    task.add_done_callback(server.tasks.discard)


async def _run(
    server: ServerState, events: ResponseEvents, told: AsyncIterator[bytes], ticket: Ticket, ended: Callable[[], None]
) -> None:
    log, store = events.log, server.responses
    try:
        async for data in told:
            if log is not None:
                log.add(data)
                store.num_log_bytes += len(data)
                if store.num_log_bytes > store.max_bytes:  # all logs together may take as much as what is stored
                    (store.largest_log() or events).generation.cancel()
        ended()
    finally:
        events.generation.close()
        ticket.release()
        if log is not None:
            store.num_log_bytes -= log.num_bytes
            log.end()
