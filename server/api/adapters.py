"""POST /v1/load_lora_adapter, /v1/unload_lora_adapter: adapters while the server runs, for administrators"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import Request, Response

from ..state import ServerState
from ..wire.adapters import LoadAdapterRequest, UnloadAdapterRequest
from .read import read_request
from .route import new_router

router = new_router()


@router.post("/v1/load_lora_adapter", response_class=Response)
async def load_adapter(request: Request) -> Response:
    """Requests may name it from now on."""
    server = ServerState.of(request)
    body = await read_request(LoadAdapterRequest, request)
    await _to_its_end(
        server, server.adapters.load(body.lora_name, body.lora_path, body.load_inplace, body.base_model_name)
    )
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")


@router.post("/v1/unload_lora_adapter", response_class=Response)
async def unload_adapter(request: Request) -> Response:
    """New requests no longer find it; answers when those that use it are done."""
    server = ServerState.of(request)
    body = await read_request(UnloadAdapterRequest, request)
    await _to_its_end(server, server.adapters.unload(body.lora_name))
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")


async def _to_its_end(server: ServerState, work: Coroutine[Any, Any, None]) -> None:
    """Also where nobody waits for the answer any more: half a change would be none."""
    server.engine_info()
    task = asyncio.create_task(work)
    server.tasks.add(task)
    task.add_done_callback(server.tasks.discard)
    await asyncio.shield(task)
