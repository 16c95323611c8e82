"""An engine that a signal has stopped is given up; one that a debugger looks at is not."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from vserve.engine.options.config import EngineConfig
from vserve.server.client import watchdog as module
from vserve.server.client.engine_client import EngineClient
from vserve.server.client.process import EngineProcess
from vserve.server.client.watchdog import Watchdog

SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17  # of ptrace


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineClient]:
    """A client whose engine process sleeps, and counts as ready."""
    monkeypatch.setattr(module, "SUSPENDED", 2.0)
    client = EngineClient(EngineConfig("m"))
    process = EngineProcess(lambda message: None, lambda cause: None, lambda: "")
    # Of a group that its parent is not in: SIGTSTP stops nobody in a group without a shell, as a service of CI has.
    process._process = subprocess.Popen(["sleep", "60"], process_group=0)
    client._engine = process
    client.ready = True
    client._started = asyncio.Future(loop=asyncio.new_event_loop())
    client._started.set_result(None)
    yield client
    process._process.kill()
    process._process.wait()


def ticks(client: EngineClient, count: int, hang_timeout: float = 300.0) -> str | None:
    """→ why the engine was given up, if it was"""

    async def main() -> None:
        watchdog = Watchdog(client, stall_timeout=30.0, hang_timeout=hang_timeout)
        for _ in range(count):
            await watchdog.tick()

    asyncio.run(main())
    return client.dead


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP])
def test_one_that_is_stopped_is_given_up(sleeper: EngineClient, number: signal.Signals) -> None:
    assert isinstance(sleeper._engine, EngineProcess)
    pid = sleeper._engine.pid
    os.kill(pid, number)
    until(sleeper.is_suspended)
    assert ticks(sleeper, 20, hang_timeout=0.0) is None, "never means never"
    assert ticks(sleeper, 3) is None
    os.kill(pid, signal.SIGCONT)
    until(lambda: not sleeper.is_suspended())
    assert ticks(sleeper, 20) is None
    os.kill(pid, number)
    until(sleeper.is_suspended)
    assert ticks(sleeper, 4) == "the engine process was stopped by a signal (SIGSTOP) for 2 s"
    until(lambda: sleeper._engine is not None and sleeper._engine.poll() == -signal.SIGKILL)


def test_a_debugger_may_look_at_it(sleeper: EngineClient) -> None:
    assert isinstance(sleeper._engine, EngineProcess)
    pid = sleeper._engine.pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(SEIZE, pid, None, None):
        pytest.skip(f"no process may be traced here: {os.strerror(ctypes.get_errno())}")
    try:
        assert libc.ptrace(INTERRUPT, pid, None, None) == 0
        until(sleeper._engine.is_stopped)
        assert not sleeper.is_suspended()
        assert ticks(sleeper, 20) is None
    finally:
        libc.ptrace(DETACH, pid, None, None)
