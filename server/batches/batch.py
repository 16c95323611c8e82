"""One batch: its lines are judged, then asked, and the answers become files."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import msgspec

from ..errors import ApiError
from ..wire.batch_lines import Line, places, read_line
from .asking import ask
from .files import File, Files

WINDOW = 86_400  # seconds in which a batch has to be answered
MOST_ERRORS = 20  # that are told of a file
ENDED = ("completed", "failed", "expired", "cancelled")
Places = list[tuple[int, int, int]]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Batch:
    id: str
    owner: str
    file: File
    endpoint: str
    metadata: dict[str, str]
    new_id: Callable[[], str]  # for the files of its answers
    status: str = "validating"
    created_at: int = field(default_factory=lambda: int(time.time()))
    times: dict[str, int] = field(default_factory=dict)  # when it got which status
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    output: File | None = None  # of requests that were answered 200
    refused: File | None = None  # of the others
    counts: dict[str, int] = field(default_factory=lambda: {"completed": 0, "failed": 0})
    task: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def answer(self) -> dict[str, Any]:
        """As OpenAI has it."""
        told = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.file.id, "completion_window": "24h", "status": self.status,
            "output_file_id": None if self.output is None else self.output.id,
            "error_file_id": None if self.refused is None else self.refused.id,
            "created_at": self.created_at, "expires_at": self.created_at + WINDOW,
            **{f"{status}_at": self.times.get(status) for status in told},
            "request_counts": {"total": self.total, **self.counts}, "metadata": self.metadata,
        }  # fmt: skip

    def become(self, status: str) -> None:
        self.status = status
        self.times[status] = int(time.time())

    def cancel(self) -> None:
        """What is in work is ended; what was answered stays."""
        done = self.task is not None and self.task.done()
        if not self.has_ended and not done and self.status != "cancelling":
            self.become("cancelling")
            if self.task is not None:
                self.task.cancel()

    async def run(self, work: Work) -> None:
        """To its end. Cancelled by somebody else than `cancel`, as when the server ends, it just stops."""
        try:
            async with asyncio.timeout(WINDOW):
                found = await work.aside(len(self.file.content), partial(self._judge, work.max_requests))
                if not self.errors:
                    self.become("in_progress")
                    await self._ask_all(work, found)
            if not self.errors:
                self.become("finalizing")
        except TimeoutError:
            self.become("expired")

    def settle(self, task: asyncio.Task[None]) -> None:
        """Once its task is done."""
        self.file.num_users -= 1
        for file in filter(None, (self.output, self.refused)):
            file.num_users -= 1
            file.expires_at += int(time.time()) - file.created_at  # its life begins with its end
        if task.cancelled():
            self.become("cancelled")
        elif (error := task.exception()) is not None:
            logger.error("batch %s failed", self.id, exc_info=error)
            self._note("The server failed; its log says at what.", "server_error", None)
        if not self.has_ended:
            self.become("completed" if self.status == "finalizing" else "failed")

    def _judge(self, most: int) -> Places:
        """Where its lines are. Whatever is wrong with them is in `errors` then. May be called on a thread."""
        content = bytes(self.file.content)
        found: Places = []
        seen: set[str | None] = set()
        for place in places(content):
            number, start, end = place
            line = read_line(content[start:end], f"line {number}")
            problem, code = line.problem, "invalid_request"
            if problem is None and line.url != self.endpoint:
                problem = f"line {number} has the url {line.url}, and the batch is for {self.endpoint}"
                code = "mismatched_url"
            elif problem is None and line.custom_id in seen:
                problem = f"line {number} has the custom_id of an earlier line: choose another"
                code = "duplicate_custom_id"
            if problem is not None:
                self._note(problem, code, number)
            if len(self.errors) == MOST_ERRORS:
                break
            seen.add(line.custom_id)
            found.append(place)
            if len(found) > most:
                self._note(f"The file has more than {most} requests (--max-batch-requests): send several.",
                           "too_many_requests", number)  # fmt: skip
                break
        if not found and not self.errors:
            self._note("The file has no requests: each line of it is one.", "empty_file", None)
        self.total = len(found)
        return found

    def _note(self, message: str, code: str, line: int | None) -> None:
        self.errors.append({"code": code, "message": message, "param": None, "line": line})

    async def _ask_all(self, work: Work, found: Places) -> None:
        left = iter(found)

        async def ask_next() -> None:
            for number, start, end in left:
                custom_id = ""

                def read(number: int = number, start: int = start, end: int = end) -> Line:
                    nonlocal custom_id
                    line = read_line(bytes(self.file.content[start:end]), f"line {number}")
                    custom_id = line.custom_id or ""
                    return line

                said = await ask(work.http, read, work.waits, work.turns)
                self._keep(work.files, custom_id, said)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(work.concurrency, len(found))):
                    group.create_task(ask_next())
        except* ApiError as several:  # of the store: its answers find no room
            (first, *_) = several.exceptions
            self._note(str(first), "file_store_full", None)

    def _keep(self, files: Files, custom_id: str, said: httpx.Response | str) -> None:
        """Raises ApiError (400) where there is no room for it."""
        good = isinstance(said, httpx.Response) and said.status_code == 200
        response, error = None, None
        if isinstance(said, str):
            error = {"code": "server_error", "message": said}
        else:
            request_id = said.headers.get("x-request-id", "")
            response = {
                "status_code": said.status_code, "request_id": request_id, "body": msgspec.Raw(said.content),
            }  # fmt: skip
        about = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response}
        data = msgspec.json.encode({**about, "error": error}) + b"\n"
        file = self.output if good else self.refused
        if file is None:
            name = f"{self.id}_{'output' if good else 'error'}.jsonl"
            file = files.add(self.new_id(), self.owner, name, "batch_output", bytearray())
            file.num_users += 1
            if good:
                self.output = file
            else:
                self.refused = file
        files.append(file, data)
        self.counts["completed" if good else "failed"] += 1


@dataclass
class Work:
    """What a batch works with."""

    http: httpx.AsyncClient  # asks the application as its owner
    waits: Callable[[], bool]  # whether an engine is on its way: until it is there nothing is asked
    files: Files
    turns: AbstractAsyncContextManager[Any]  # of all batches: one for each request in work
    concurrency: int
    max_requests: int
    aside: Callable[[int, Callable[[], Places]], Awaitable[Places]]  # has so many bytes read where that delays nobody
