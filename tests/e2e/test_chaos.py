"""Everything at once: mixed load, nonsense, clients that leave, and processes that are killed and stopped under it.

VSERVE_CHAOS_SECONDS=600 makes it ten minutes. What was accepted ends right or with a documented error, and the server's
counters are the clients'.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import sys
from pathlib import Path
from types import ModuleType

import httpx
import pytest

SECONDS = float(os.environ.get("VSERVE_CHAOS_SECONDS", "30"))
PAUSE = 5.0  # seconds between two disasters, on average
ENOUGH = 30  # choices that finish, on the slowest machine


@pytest.fixture(scope="module")
def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vserve_load", Path(__file__).with_name("load.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules["vserve_load"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def children(server) -> dict[int, str]:
    kinds = ((b"engine.start.process", "engine"), (b"server.api_process", "API process"))
    return {
        pid: next((kind for name, kind in kinds if name in command), "grammar compiler")
        for pid, command in server.children().items()
    }


class Disasters:
    def __init__(self, server, seed: int) -> None:
        self.server = server
        self.killed: list[str] = []
        self.num_stops = 0
        self.pids: set[int] = set()  # of all processes that have ever been
        self._random = random.Random(seed)

    async def run(self) -> None:
        """One after the other, each when the engine serves again, until cancelled."""
        for turn in range(10**9):
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * PAUSE)
            processes = children(self.server)
            self.pids |= processes.keys()
            assert "engine" in processes.values()
            stop = turn % 2 == 1
            if stop:
                processes[self.server.process.pid] = "server"
            pid, name = self._random.choice(list(processes.items()))
            if stop:
                self._signal(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(self._random.choice((0.3, 3.0)))
                finally:
                    self._signal(pid, signal.SIGCONT)
                self.num_stops += 1
            elif self._signal(pid, signal.SIGKILL):
                self.killed.append(name)
            if name == "engine":
                await self.healthy()

    def _signal(self, pid: int, number: signal.Signals) -> bool:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    async def healthy(self) -> None:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=240) as http:
            for _ in range(1200):
                if (await http.get("/health")).status_code == 200:
                    return
                await asyncio.sleep(0.05)
        raise AssertionError("not healthy within a minute")


def has_seen_everything(totals, disasters: Disasters) -> bool:
    finished = sum(totals.finished.values()) > ENOUGH
    return bool(finished and totals.refused and totals.left and totals.failed and "engine" in disasters.killed)


async def under_load(clients, disasters: Disasters, is_enough) -> None:
    spoiling = asyncio.create_task(disasters.run())
    await clients.run(SECONDS, clients=4)
    for _ in range(24):  # a slow machine needs longer until everything has occurred
        if is_enough() or spoiling.done():
            break
        await clients.run(5, clients=4)
    spoiling.cancel()
    await asyncio.gather(spoiling, return_exceptions=True)
    if not spoiling.cancelled():
        spoiling.result()
    await disasters.healthy()


@pytest.mark.skipif(not os.environ.get("VSERVE_TEST_LONG"), reason="a minute: VSERVE_TEST_LONG=1 runs it")
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_with_three_api_processes_too(serve, attacks, load, until, is_gone):
    """One that is killed breaks the connections that it has, at most one of each client, and nothing else breaks.
    What it had counted since it was last asked is lost: the counters of /metrics are not the clients', but they never
    fall."""
    options = ("--api-server-count", "3", "--engine-restarts", "1000", "--stall-timeout", "1")
    with serve(*options, "--served-model-name", "demo") as server:
        clients = load.Load(server.url, seed=int(SECONDS))
        clients.learn()
        disasters = Disasters(server, seed=3)
        clients.may_break = lambda: "API process" in disasters.killed
        seen: list[float] = []

        def is_enough() -> bool:
            killed = set(disasters.killed)
            return sum(clients.totals.finished.values()) > ENOUGH and {"engine", "API process"} <= killed

        async def look() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=240) as http:
                while True:
                    await asyncio.sleep(0.5)
                    with contextlib.suppress(httpx.TransportError):
                        page = (await http.get("/metrics")).text
                        seen.append(attacks.sum_of(page, "vllm:generation_tokens_total"))

        async def chaos() -> None:
            looking = asyncio.create_task(look())
            await under_load(clients, disasters, is_enough)
            looking.cancel()

        asyncio.run(chaos())
        totals = clients.totals
        print(f"\n{SECONDS:g} s: killed {disasters.killed}, stopped {disasters.num_stops}; {totals}")
        assert not totals.wrong, "\n".join(totals.wrong[:10])
        assert totals.broken <= 4 * disasters.killed.count("API process") and is_enough()
        assert seen == sorted(seen) and seen[-1] > seen[0]
        until(lambda: list(children(server).values()).count("API process") == 2, 60)
        attacks.is_at_rest(server)
        now = children(server)
        assert all(is_gone(pid) for pid in disasters.pids - now.keys())
        clients.learn()  # the same answers as before all this
    assert all(is_gone(pid) for pid in now)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_whatever_happens_who_was_let_in_gets_an_answer(serve, attacks, load, until, is_gone):
    with serve("--engine-restarts", "1000", "--stall-timeout", "1", "--served-model-name", "demo") as server:
        clients = load.Load(server.url, seed=int(SECONDS))
        clients.learn()
        before = attacks.Invariants(server)
        clients.totals.sent += 1  # its canary
        clients.totals.statuses["2xx"] += 1
        disasters = Disasters(server, seed=int(SECONDS))

        asyncio.run(under_load(clients, disasters, lambda: has_seen_everything(clients.totals, disasters)))
        totals = clients.totals
        print(f"\n{SECONDS:g} s: killed {disasters.killed}, stopped {disasters.num_stops}; {totals}")
        assert not totals.wrong, "\n".join(totals.wrong[:10])

        until(lambda: not load.reconcile(totals, httpx.get(f"{server.url}/metrics").text, attacks.sum_of, canaries=1))
        restarts = before.metric("vllm:engine_restarts_total")
        assert restarts == disasters.killed.count("engine")
        assert has_seen_everything(totals, disasters)
        now = children(server)
        assert sorted(now.values()).count("engine") == 1 and len(now) <= 2, now
        assert all(is_gone(pid) for pid in disasters.pids - now.keys())
        before.children = set(now)  # others than at first, and no more of them
        before.server_errors = totals.statuses["5xx"] + totals.left
        before.check()
        clients.learn()  # the same answers as before all this
    assert all(is_gone(pid) for pid in now)
