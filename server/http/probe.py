"""Is the server alive, and does it take requests? Without FastAPI: the front door answers this from the first second.

All of it follows the engine's heartbeat, not the mere fact that somebody answers HTTP. /livez is 503 only where a
restart from outside is the cure: the engine is dead for good or stalled. The others are 503 whenever a request would
not be served now: while loading, restarting, stalled, draining or dead.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from ..client.client import Client

PROBES = frozenset({"/livez", "/readyz", "/health", "/ping"})


def trouble(client: Client, draining: bool, serving: bool) -> dict[str, Any] | None:
    """Why the server takes no requests, as a JSON object with a "status"; None when it does.

    `serving`: the application is there, which comes a moment after the engine.
    """
    if client.dead is not None:
        return {"status": "dead", "error": client.dead}
    if not (client.ready and serving):
        phase = client.phase
        progress = phase.done / phase.total if phase and phase.total else None
        loading = {"status": "loading", "phase": phase.phase if phase else None, "progress": progress}
        return loading if client.down is None else loading | {"status": "restarting", "error": client.down}
    if draining:
        return {"status": "draining"}
    if client.stalled is not None:
        return {"status": "stalled", "seconds": client.stalled}
    return None


def probe(path: str, client: Client, draining: bool, serving: bool = True) -> Response:
    """200 and nothing, or 503 and why."""
    found = trouble(client, draining, serving)
    if found is None or (path == "/livez" and found["status"] not in ("dead", "stalled")):
        return Response(status_code=200)
    headers = {}
    if found["status"] in ("loading", "restarting"):
        headers["retry-after"] = str(client.retry_after)
    return Response(msgspec.json.encode(found), 503, headers, media_type="application/json")
