"""One engine that works for several API processes: who hears what, and what is left of one that is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.link import clients as clients_module
from vserve.engine.link.clients import FIRST, SHIFT, Clients
from vserve.engine.link.connection import Connection
from vserve.engine.link.messages import (
    AbortRequests,
    AddGrammar,
    AddRequest,
    BlockMap,
    DropGrammars,
    EngineInfo,
    EngineStats,
    Failure,
    FromEngine,
    Heartbeat,
    Hello,
    LastSteps,
    ReadSteps,
    RequestOutput,
    SetVocabulary,
    Shutdown,
    StepOutputs,
    StepRecord,
    StepReport,
    StepReports,
    WatchSteps,
)
from vserve.engine.link.sampling_params import SamplingParams

INFO = EngineInfo(
    max_model_len=1, vocab_size=1, max_num_seqs=1, max_num_batched_tokens=1, block_size=1, num_blocks=1,
    num_kv_tokens=1, enable_prefix_caching=True, scheduling_policy="fcfs", max_logprobs=1, dtype="", device="",
)  # fmt: skip


class Office:
    """Clients, with what the engine gets in `wanted` and what each client hears in `heard`."""

    def __init__(self) -> None:
        self.wanted: list[Any] = []
        self.heard: dict[int, list[Any]] = {FIRST: []}
        self.clients = Clients(self.heard[FIRST].append, self.wanted.append)
        self.guests: dict[int, Any] = {}

    def join(self, number: int) -> None:
        guest = self.guests[number] = self.clients.accept()
        self.heard[number] = []
        guest.send = self.heard[number].append  # type: ignore[method-assign]
        guest._on_message(Shutdown())  # before it has said who it is, nothing is heard of it
        guest._on_message(Hello(number))

    def say(self, number: int, message: Any) -> None:
        if number == FIRST:
            self.clients.take(FIRST, message)
        else:
            self.guests[number]._on_message(message)

    def leave(self, number: int) -> None:
        self.guests.pop(number)._on_lost(None)


@pytest.fixture
def within() -> Callable[[Callable[[Office], None]], None]:
    def run(test: Callable[[Office], None]) -> None:
        async def main() -> None:
            test(Office())

        asyncio.run(main())

    return run


def request(client: int, number: int, n: int = 1) -> AddRequest:
    return AddRequest((client << SHIFT) + number, b"", SamplingParams(max_tokens=1), n=n)


def test_each_hears_of_its_own_requests_and_all_hear_how_the_engine_is(within: Any) -> None:
    def test(office: Office) -> None:
        office.clients.send(INFO)
        office.join(1)
        office.join(2)
        assert [office.heard[client].pop() for client in (FIRST, 1, 2)] == [INFO] * 3
        mine, first, second = 5, (1 << SHIFT) + 5, (2 << SHIFT) + 5
        begun = [RequestOutput(id, [1], num_cached_tokens=0) for id in (mine, first, second)]
        office.clients.send(StepOutputs(begun, EngineStats(num_running=3, step_tokens=10), [first]))
        heard = {client: messages.pop() for client, messages in office.heard.items()}
        assert {client: [output.id for output in message.outputs] for client, message in heard.items()} == {
            FIRST: [mine], 1: [first], 2: [second]}  # fmt: skip
        assert [heard[client].preempted for client in (FIRST, 1, 2)] == [[], [first], []]
        assert {message.stats.num_running for message in heard.values()} == {3}
        assert [heard[client].stats.step_tokens for client in (FIRST, 1, 2)] == [12, 0, 0], "a step is counted once"
        office.clients.send(LastSteps(second, []))
        assert [len(office.heard[client]) for client in (FIRST, 1, 2)] == [0, 0, 1]
        office.clients.send(Heartbeat())
        assert all(isinstance(messages[-1], Heartbeat) for messages in office.heard.values())

    within(test)


def test_what_one_asked_for_is_aborted_when_it_is_gone(within: Any) -> None:
    def test(office: Office) -> None:
        office.join(1)
        office.join(2)
        for message in (request(1, 1, n=3), request(2, 1)):
            office.say(message.id >> SHIFT, message)
        office.say(FIRST, request(FIRST, 1))
        done = (1 << SHIFT) + 2
        office.clients.send(StepOutputs([RequestOutput(done, [], "stop")], EngineStats()))
        office.wanted.clear()
        office.leave(1)
        assert office.wanted == [AbortRequests([done - 1, done + 1])]
        office.clients.send(StepOutputs([RequestOutput(done - 1, [], "abort")], EngineStats()))
        assert office.heard[2][-1].outputs == [] == office.heard[FIRST][-1].outputs
        office.say(2, Shutdown())
        assert not any(isinstance(message, Shutdown) for message in office.wanted), "who has started it ends it"
        office.say(FIRST, Shutdown())
        assert isinstance(office.wanted[-1], Shutdown)

    within(test)


def test_grammars_stay_as_long_as_somebody_wants_them(within: Any) -> None:
    def test(office: Office) -> None:
        office.join(1)
        office.join(2)
        for client in (FIRST, 1, 2):
            office.say(client, SetVocabulary(b"", b"a", (0,)))
            office.say(client, AddGrammar("k", "llguidance", b""))
        assert [type(message) for message in office.wanted] == [SetVocabulary, AddGrammar]
        office.wanted.clear()
        office.say(FIRST, DropGrammars(["k", "unknown"]))
        office.leave(1)
        assert office.wanted == []
        office.leave(2)
        assert office.wanted == [DropGrammars(["k"])]
        office.say(FIRST, AddGrammar("k", "llguidance", b""))
        assert isinstance(office.wanted[-1], AddGrammar)

    within(test)


def test_steps_are_reported_as_long_as_somebody_watches(within: Any) -> None:
    def test(office: Office) -> None:
        office.join(1)
        office.say(1, WatchSteps(True))
        office.say(FIRST, WatchSteps(True))
        office.say(FIRST, WatchSteps(False))
        office.say(1, ReadSteps((1 << SHIFT) + 1, 5))
        assert [getattr(message, "on", None) for message in office.wanted] == [True, True, None]
        office.leave(1)
        assert office.wanted[-1] == WatchSteps(False)

    within(test)


def test_the_map_of_all_blocks_is_for_who_has_just_come(within: Any) -> None:
    def test(office: Office) -> None:
        for number in (1, 2):
            office.join(number)
        whole, step = BlockMap(1, 1, 0, [0], [0]), StepReport(StepRecord(1, 0.0, 1, 1, 1), [])
        for number in (FIRST, 1):
            office.say(number, WatchSteps(True))
            office.clients.send(StepReports([], whole))
        office.clients.send(StepReports([step], whole))
        assert [len(office.heard[number]) for number in (FIRST, 1, 2)] == [2, 2, 0]

    within(test)


def test_who_reads_nothing_is_dropped_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Over sockets: one reads, one does not, and what the engine keeps for it is bounded."""
    monkeypatch.setattr(clients_module, "MOST_UNREAD", 4 << 20)
    wanted: list[Any] = []

    async def test() -> None:
        clients = Clients(lambda message: None, wanted.append)
        server = await asyncio.get_running_loop().create_unix_server(clients.accept, path=str(tmp_path / "engine"))
        heard: list[StepOutputs] = []
        connections = []
        for number, hear in ((1, heard.append), (2, lambda message: None)):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, str(tmp_path / "engine"))
            connections.append(await Connection.open(sock, FromEngine, hear, lambda error: None))
            connections[-1].send(Hello(number))
            connections[-1].send(request(number, 1))
        while len(wanted) < 2:
            await asyncio.sleep(0.001)
        lost, kept = ((number << SHIFT) + 1 for number in (2, 1))
        connections[1]._transport.pause_reading()  # type: ignore[union-attr]
        most = 0
        for sent in range(1, 2001):
            outputs = [RequestOutput(id, list(range(2000))) for id in (kept, lost)]
            clients.send(StepOutputs(outputs, EngineStats()))
            while len(heard) < sent:
                await asyncio.sleep(0)
            if (guest := clients._guests.get(2)) is not None:
                most = max(most, guest.connection.unread)
        assert [message.outputs[0].id for message in heard] == [kept] * 2000
        assert (4 << 20) < most < (5 << 20)
        assert wanted[2:] == [AbortRequests([lost])] and 2 not in clients._guests
        for connection in connections:
            connection.close()
        server.close()

    asyncio.run(test())


def test_who_comes_again_before_its_loss_was_noticed_is_heard(within: Any) -> None:
    def test(office: Office) -> None:
        office.join(1)
        before = office.guests[1]
        office.say(1, request(1, 1))
        office.join(1)
        office.say(1, request(1, 2))
        assert AbortRequests([(1 << SHIFT) + 1]) in office.wanted
        before._on_lost(None)
        office.clients.send(Heartbeat())
        assert isinstance(office.heard[1][-1], Heartbeat)
        assert AbortRequests([(1 << SHIFT) + 2]) not in office.wanted

    within(test)


def test_who_comes_again_to_an_engine_that_ends_waits_for_the_next_one(tmp_path: Path) -> None:
    """It hears why, and comes again at once; this one would take its requests and answer none."""

    async def main() -> None:
        path, wanted = str(tmp_path / "engine"), []
        clients = Clients(lambda message: None, wanted.append)
        loop = asyncio.get_running_loop()
        clients.server = await loop.create_unix_server(clients.accept, path)
        clients.send(INFO)

        async def guest() -> tuple[Connection, list[Any], asyncio.Event]:
            heard: list[Any] = []
            gone = asyncio.Event()
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(path)
            sock.setblocking(False)
            connection = await Connection.open(sock, FromEngine, heard.append, lambda error: gone.set())
            connection.send(Hello(1))
            return connection, heard, gone

        _, heard, gone = await guest()
        while not heard:
            await asyncio.sleep(0.01)
        clients.send(Failure("why"))
        ending = asyncio.create_task(clients.finish(60))
        await gone.wait()
        assert heard == [INFO, Failure("why")]
        again, heard, _ = await guest()
        again.send(request(1, 1))
        await ending
        await asyncio.sleep(0.2)
        assert not heard and not wanted
        again.close()
        clients.server.close()

    asyncio.run(asyncio.wait_for(main(), 60))
