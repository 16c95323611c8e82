"""Files for batches: POST and GET /v1/files, GET and DELETE /v1/files/{file_id}, GET /v1/files/{file_id}/content"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from ..batches.files import File, Files
from ..dialects.pages import newest
from ..errors import ApiError, bad_request, shorten, unsupported
from ..http.auth import owner_of
from ..http.form import check_form, read_form
from ..http.request_id import TAG_HEADER, new_id
from ..state import ServerState
from .read import check_ignored
from .route import new_router
from .tokens import json_answer

router = new_router()
_PATH = "/v1/files/{file_id}"
_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
LONGEST_NAME = 255  # characters
PIECE = 64 << 10  # bytes of an answer


@router.post("/v1/files", response_class=Response)
async def upload_file(request: Request) -> Response:
    """Keeps a file of requests for a batch."""
    store = files(request)
    boundary = check_form(request.headers.get("content-type", ""))
    raw = b"".join([piece async for piece in request.stream()])
    form = await ServerState.of(request).tokenise(len(raw) >> 6, lambda: read_form(raw, boundary))
    ignored = [name for name in form if name not in _FIELDS]
    check_ignored(request, ignored)
    file, purpose = form.get("file"), form.get("purpose")
    for name, part in (("file", file), ("purpose", purpose)):
        if part is None:
            raise bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    assert file is not None and purpose is not None
    if purpose.content != b"batch":
        what = shorten(purpose.content.decode(errors="replace"))
        raise unsupported("purpose", f"'purpose' {what!r} (files here are for batches: choose batch)")
    name = (file.filename or "file")[:LONGEST_NAME]
    id = f"file-{new_id(request.headers.get(TAG_HEADER))}"
    lifetime = form.get("expires_after[seconds]")
    seconds = None if lifetime is None else _seconds(lifetime.content)
    kept = store.add(id, owner_of(request.scope), name, "batch", file.content, seconds)
    return json_answer(ignored, kept.answer())


def _seconds(given: bytes) -> float:
    if not (given.isdigit() and len(given) < 10 and int(given)):
        raise bad_request("'expires_after[seconds]' must be a number of seconds.", "expires_after")
    return float(given)


@router.get("/v1/files", response_class=Response)
async def list_files(request: Request) -> Response:
    """Those of the key that asks, the newest first; of a `purpose`."""
    purpose = request.query_params.get("purpose")
    found = [file for file in files(request).of(owner_of(request.scope)) if purpose in (None, file.purpose)]
    return json_answer([], newest(found, request.query_params))


@router.get(_PATH, response_class=Response)
async def get_file(request: Request, file_id: str) -> Response:
    """What is known of a file."""
    return json_answer([], _found(request, file_id).answer())


@router.get(_PATH + "/content", response_class=Response)
async def get_content(request: Request, file_id: str) -> Response:
    """What is in a file."""
    file = _found(request, file_id)
    size = len(file.content)

    async def pieces() -> AsyncIterator[bytes]:  # who reads slowly holds no copy; one that is forgotten breaks off
        for at in range(0, size, PIECE):
            yield bytes(file.content[at : min(at + PIECE, size)])

    headers = {
        "content-disposition": "attachment", "x-content-type-options": "nosniff", "content-length": str(size),
    }  # fmt: skip
    return StreamingResponse(pieces(), headers=headers, media_type="application/octet-stream")


@router.delete(_PATH, response_class=Response)
async def delete_file(request: Request, file_id: str) -> Response:
    """Forgets a file."""
    files(request).delete(_found(request, file_id))
    gone: dict[str, Any] = {"id": file_id, "object": "file", "deleted": True}
    return json_answer([], gone)


def files(request: Request) -> Files:
    """Raises ApiError (400) where there are none."""
    server = ServerState.of(request)
    if not server.config.file_store_bytes:
        raise ApiError(400, "This server keeps no files: --file-store-bytes is 0.", code="files_off")
    return server.batches.files


def _found(request: Request, id: str) -> File:
    return files(request).get(id, owner_of(request.scope))
