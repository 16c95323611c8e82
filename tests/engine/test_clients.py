"""One engine that works for several API processes: who hears what, and what is left of one that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from vserve.engine.clients import FIRST, SHIFT, Clients
from vserve.engine.messages import (
    AbortRequests,
    AddGrammar,
    AddRequest,
    DropGrammars,
    EngineInfo,
    EngineStats,
    Heartbeat,
    Hello,
    LastSteps,
    ReadSteps,
    RequestOutput,
    SetVocabulary,
    Shutdown,
    StepOutputs,
    WatchSteps,
)
from vserve.engine.request import SamplingParams

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
            office.say(client, SetVocabulary([b"a"], (0,)))
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
