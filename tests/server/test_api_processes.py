"""Who watches the API processes beside the first one, with processes that do what the test says."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.options.config import EngineConfig
from vserve.server import api_processes as module
from vserve.server.api_processes import ApiProcesses
from vserve.server.client.board import BEATS, SERVES, Board
from vserve.server.client.engine import make_engine
from vserve.server.client.engine_client import EngineClient
from vserve.server.client.hearts import Pulse
from vserve.server.client.mailbox import EngineDeadError, Mailbox
from vserve.server.client.meeting import FIRST, EngineLink, Meeting
from vserve.server.client.watchdog import Watchdog
from vserve.server.options.config import ServerConfig


class Process:
    """It runs until the test gives it a code."""

    def __init__(self, stdin: Any = None) -> None:
        self.code: int | None = None
        self.stdin = stdin or io.BytesIO()

        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)
        self.code = -signal.SIGKILL

    def wait(self, timeout: float | None = None) -> int | None:
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
        meeting = Meeting(str(tmp_path), FIRST, FIRST, board, "secret")
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


def test_a_process_that_starts_is_awaited_on_the_board(beside: Any) -> None:
    """Asking it over HTTP, twenty times a second, would cost what it needs for its start."""

    async def test() -> None:
        processes, _ = beside(Process())
        processes.start()
        ready = asyncio.create_task(processes.ready())
        await asyncio.sleep(0.05)
        assert not ready.done()
        colleague(processes).set(SERVES, 1)
        await asyncio.wait_for(ready, 5)

    asyncio.run(test())


def colleague(processes: ApiProcesses) -> Board:
    """The board as the process beside the first one has it."""
    return Board(processes._meeting.board.descriptor, 2, 1)


@pytest.mark.parametrize("serves", [True, False])
def test_who_hangs_is_killed_and_started_again(beside: Any, monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    """A heart that stands still ends a process, and one that beats does not, however long this one looks."""
    monkeypatch.setattr(module, "PATIENCE", 0.2 if serves else 1e9)
    monkeypatch.setattr(module, "START_PATIENCE", 1e9 if serves else 0.2)
    monkeypatch.setattr("vserve.server.client.hearts.LONGEST_LOOK", 0.025)  # an eighth of the patience, as it is

    async def test() -> None:
        first, second = Process(), Process()
        processes, causes = beside(first, second)
        processes.start()
        board = colleague(processes)
        board.set(SERVES, int(serves))
        watching = asyncio.create_task(processes.watch())
        for _ in range(50):
            await asyncio.sleep(0.01)
            board.add(BEATS, 1)
        assert not first.signals and processes._processes[1] is first
        async with asyncio.timeout(5):
            while processes._processes[1] is first:
                await asyncio.sleep(0.01)
        assert first.signals == [signal.SIGUSR1, signal.SIGKILL] and not causes
        assert len(processes._deaths) == (0 if serves else 1) and not board.get(1, SERVES)
        processes._ending = True
        await watching

    asyncio.run(test())


def test_while_who_looks_is_stopped_nobody_is_silent(beside: Any) -> None:
    processes, _ = beside(Process())
    pulse = Pulse(processes._meeting.board, 1)
    now = time.monotonic()
    assert pulse.look(now + 3600) <= 1.0
    assert pulse.look(now + 3600.5) > pulse.look(now + 3600.6) - 0.2 > 0.3
    colleague(processes).add(BEATS, 1)
    assert pulse.look(now + 3601) == 0.0


def test_an_engine_of_another_process_is_not_said_to_be_stopped(beside: Any, caplog: pytest.LogCaptureFixture) -> None:
    processes, _ = beside()
    meeting = processes._meeting
    engine = EngineClient(EngineConfig("m"), meeting=Meeting(meeting.folder, 1, 1, meeting.board, "secret"))
    engine._engine = make_engine(
        engine.config, engine._meeting, 0, lambda message: None, lambda cause: None, lambda: ""
    )
    assert isinstance(engine._engine, EngineLink)
    engine.ready = True
    engine.requests._mailboxes[1] = Mailbox(1, 0.0)
    watchdog = Watchdog(engine, stall_timeout=0.1, hang_timeout=0.0)

    async def test() -> None:
        for _ in range(20):
            await watchdog.tick()

    asyncio.run(test())
    assert "the engine has been silent" in caplog.text and "is stopped" not in caplog.text
