"""Who watches the API processes beside the first one, with processes that do what the test says."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from vserve.engine.config import EngineConfig
from vserve.server import api_processes as module
from vserve.server.api_processes import ApiProcesses
from vserve.server.client.board import Board
from vserve.server.client.mailbox import EngineDeadError
from vserve.server.client.meeting import FIRST, Meeting
from vserve.server.options.config import ServerConfig


class Process:
    """It runs until the test gives it a code."""

    def __init__(self, stdin: Any = None) -> None:
        self.code: int | None = None
        self.stdin = stdin or io.BytesIO()

    def poll(self) -> int | None:
        return self.code


class NobodyReads(io.BytesIO):
    def write(self, data: Any) -> int:
        raise BrokenPipeError


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """(One process beside the first, which starts as the arguments say; why the server gives up.)"""
    board = Board(None, 2, FIRST)

    def make(*starts: Process | OSError, restarts: int = 3) -> tuple[ApiProcesses, list[str]]:
        left = list(starts)

        def start(*_: Any, **__: Any) -> Process:
            if isinstance(found := left.pop(0), OSError):
                raise found
            return found

        monkeypatch.setattr(module.subprocess, "Popen", start)
        monkeypatch.setattr(module, "LOOK_UP", 0.001)
        monkeypatch.setattr(module, "RETRY", 0.001, raising=False)
        meeting = Meeting(str(tmp_path), FIRST, FIRST, board)
        config = ServerConfig(engine_restarts=restarts)
        causes: list[str] = []
        return ApiProcesses(meeting, lambda: EngineConfig("m"), config, {}, 0, causes.append), causes

    yield make
    os.close(board.descriptor)


async def watched(processes: ApiProcesses, until: Callable[[], bool]) -> None:
    watching = asyncio.create_task(processes.watch())
    async with asyncio.timeout(5):
        while not until():
            assert not watching.done() or watching.exception() is None, watching.exception()
            await asyncio.sleep(0.001)
    processes._ending = True
    await watching


def test_a_start_that_fails_is_a_death_and_tried_again(beside: Any) -> None:
    async def test() -> None:
        first, unread, last = Process(), Process(NobodyReads()), Process()
        processes, causes = beside(first, OSError(12, "no memory"), unread, last)
        processes.start()
        first.code = 1
        unread.code = -9
        await watched(processes, lambda: processes._processes[1] is last)
        assert not causes and len(processes._deaths) == 3

    asyncio.run(test())


def test_too_many_starts_that_fail_end_the_server(beside: Any) -> None:
    async def test() -> None:
        first = Process()
        processes, causes = beside(first, *[OSError(12, "no memory")] * 5, restarts=2)
        processes.start()
        first.code = 1
        await watched(processes, lambda: bool(causes))
        assert "could not be started" in causes[0] and "no memory" in causes[0]

    asyncio.run(test())


def test_the_first_start_that_fails_is_told(beside: Any) -> None:
    processes, _ = beside(OSError(12, "no memory"))
    processes.start()
    with pytest.raises(EngineDeadError, match=r"API process 1 could not be started: .*no memory"):
        asyncio.run(processes.ready())


def test_a_process_that_starts_is_asked_with_one_client(beside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificates of a TLS context, which a Unix socket does not need, take longer than a look."""
    looks, made = [503, 503, 503, 200], []

    def transport(**options: Any) -> httpx.MockTransport:
        made.append(options)
        return httpx.MockTransport(lambda _: httpx.Response(looks.pop(0)))

    monkeypatch.setattr(module.httpx, "AsyncHTTPTransport", transport)
    processes, _ = beside(Process())
    processes.start()
    asyncio.run(processes.ready())
    assert not looks and [options["verify"] for options in made] == [False]
