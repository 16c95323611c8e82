"""Who is blamed when an engine ends: the rank that died first, though the others, which fail because of it, may be
heard sooner."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.link.messages import Failure
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.ranks import peers as peers_module
from vserve.engine.ranks.agreement import finding
from vserve.engine.ranks.messages import Channel, Ended, Seat, ToNode
from vserve.engine.ranks.nodes import Node, RemoteRank
from vserve.engine.ranks.peers import Peers
from vserve.engine.ranks.place import Child, RankHandle, end_of, may_follow
from vserve.server.client.engine_client import EngineClient
from vserve.server.client.mailbox import EngineDeadError

from .conftest import collect

BROKEN = "RuntimeError: Connection closed by peer"
LATER = 0.25  # seconds after the others are heard


def process() -> tuple[subprocess.Popen[bytes], Child]:
    """It exits with code 1 when nobody can write to it any more."""
    made = subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE)
    return made, Child(made)


def on_this_host() -> tuple[RankHandle, Callable[[], None]]:
    child = process()[1]
    return child, child.kill


def on_another(explained: str | None = None) -> tuple[RankHandle, Callable[[], None]]:
    """Its end is told in a message of its node; with `explained`, as on Ray, the node hangs up, and the cause is found
    a moment later."""
    ours, theirs = socket.socketpair()
    node = Node(1, "10.0.0.2", ours)

    def explain() -> str | None:
        time.sleep(LATER / 2)
        return explained

    node.explain = explain
    node.watch()
    channel = Channel(theirs, ToNode)

    def end() -> None:
        if explained is None:
            channel.send(Ended(2, end_of(-signal.SIGKILL)))
        else:
            theirs.shutdown(socket.SHUT_RDWR)

    return RemoteRank(node, 2), end


PLACES: dict[str, tuple[Callable[[], tuple[RankHandle, Callable[[], None]]], str]] = {
    "this host": (on_this_host, "rank 2 of 3 (cpu) was killed by signal 9 (SIGKILL)"),
    "a node": (on_another, "rank 2 of 3 (cpu) on node 1 (10.0.0.2) was killed by signal 9 (SIGKILL)"),
    "Ray": (lambda: on_another("is lost: its Ray actor has died"), "rank 2 of 3 (cpu) on node 1 (10.0.0.2) is lost: "),
}


async def blamed(other_rank: RankHandle, happens: Callable[[Peers, subprocess.Popen[bytes]], str | None]) -> str:
    """The engine's last word, of three ranks: rank 1 is a process that `happens` is given, rank 2 is `other_rank`, and
    what it returns is the error of rank 0."""
    peers = Peers(EngineConfig("m", device="cpu", tensor_parallel_size=3, engine_in_process=True))
    other, child = process()
    peers._handles |= {1: child, 2: other_rank}
    for rank in (1, 2):
        threading.Thread(target=peers._await_end, args=(rank,), daemon=True).start()

    async def rank_zero() -> None:
        if (error := happens(peers, other)) is not None:
            raise RuntimeError(error)
        await asyncio.sleep(60)

    try:
        with pytest.raises(RuntimeError) as raised:
            await asyncio.wait_for(peers.beside(rank_zero()), 10)
        return str(raised.value)
    finally:
        peers.close(patience=0.0)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("first", ["failure", "exit", "abort", "rank 0", "network"])
def test_the_death_is_named_though_it_is_told_last(monkeypatch: pytest.MonkeyPatch, where: str, first: str) -> None:
    monkeypatch.setattr(peers_module, "BLAME", 8.0)  # nobody waits for its end, however late a busy machine tells
    make, said = PLACES[where]

    async def main() -> str:
        place, die = make()

        def happens(peers: Peers, other: subprocess.Popen[bytes]) -> str | None:
            asyncio.get_running_loop().call_later(LATER, die)
            if first == "failure":
                peers._receive(1, Failure(BROKEN))
            elif first == "exit":
                assert other.stdin is not None
                other.stdin.close()
            elif first == "abort":
                other.send_signal(signal.SIGABRT)
            elif first == "network":
                with finding(Seat(0, 3, "tcp://10.0.0.1:29500")):
                    raise RuntimeError(BROKEN)
            return BROKEN if first == "rank 0" else None

        return await blamed(place, happens)

    found = asyncio.run(main())
    assert found.startswith(said), found


@pytest.mark.parametrize("own", [None, BROKEN])
def test_who_fails_alone_is_blamed_in_time(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    """Nobody has died: then the first that has failed, and not rank 0, whose collectives break with it."""
    monkeypatch.setattr(peers_module, "BLAME", 0.5)
    begun = 0.0

    def happens(peers: Peers, other: subprocess.Popen[bytes]) -> str | None:
        nonlocal begun
        begun = time.monotonic()
        peers._receive(1, Failure("OutOfMemoryError"))
        peers._receive(2, Failure(BROKEN))
        return own

    assert asyncio.run(blamed(process()[1], happens)) == "rank 1 of 3 (cpu): OutOfMemoryError"
    assert time.monotonic() - begun > 0.45


def test_what_may_be_a_consequence() -> None:
    assert may_follow(end_of(1)) and may_follow(end_of(-signal.SIGABRT))
    assert not may_follow(end_of(-signal.SIGKILL)) and not may_follow(end_of(-signal.SIGSEGV))
    assert not may_follow("is lost: its node has hung up")


@pytest.mark.slow
def test_ranks_that_see_a_death_before_their_engine(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them, and the news is held back: three collectives break meanwhile."""
    monkeypatch.setattr(peers_module, "BLAME", 8.0)
    wait = Child.wait

    def waits(self: Child, seconds: float | None = None) -> str | None:
        how = wait(self, seconds)
        if how is not None and seconds is None:
            time.sleep(1.0)
        return how

    monkeypatch.setattr(Child, "wait", waits)

    async def main() -> str:
        config = EngineConfig(
            str(tiny_model("llama")), device="cpu", cpu_threads=1, max_model_len=256, num_gpu_blocks_override=30,
            tensor_parallel_size=2, pipeline_parallel_size=2, engine_in_process=True,
        )  # fmt: skip
        client = EngineClient(config)
        await client.start()
        try:
            sampling = SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True)
            await collect(client, [5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0))
            victim = rank_process(3)
            answer = asyncio.create_task(collect(client, [5, 6, 7], sampling))
            await asyncio.sleep(0.05)
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(EngineDeadError) as raised:
                await asyncio.wait_for(answer, 30)
            return str(raised.value)
        finally:
            await client.close()

    found = asyncio.run(main())
    assert "rank 3 of 4 (cpu) was killed by signal 9 (SIGKILL)" in found, found


def rank_process(rank: int) -> int:
    """Of an engine in this process."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    wanted = f"--rank\0{rank}\0"
    return next(int(pid) for pid in children if wanted in Path(f"/proc/{pid}/cmdline").read_text())
