"""What arrives in great numbers: prompts travel and are kept once, frames are small, and steps go on meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import vserve.engine.schedule.kv_cache as kv_cache_module
import vserve.engine.start.loop as loop_module
from vserve.engine.link.connection import LENGTH, MAX_FRAME, Connection
from vserve.engine.link.messages import AbortRequests, AddRequest, FromEngine, Shutdown, ToEngine, pack_tokens
from vserve.engine.link.plan import StepPlan, StepResult
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.start.loop import EngineLoop
from vserve.server.client.engine_client import EngineClient

GREEDY = SamplingParams(max_tokens=900, temperature=0.0)


class Device:
    """Stands in for the executor: a step is over in the next turn of the event loop."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self._futures: list[asyncio.Future[StepResult]] = []

    def execute(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._futures.append(asyncio.get_running_loop().create_future())

    def sample(self, mask: object = None) -> None: ...

    async def wait(self, seconds: float) -> bool:
        return True

    async def result(self) -> StepResult:
        await asyncio.sleep(0)
        plan = self.plans[-len(self._futures)]
        self._futures.pop(0)
        return StepResult(plan.step, [7] * len(plan.sampled))


def new_loop(device: Device, send: Any = lambda message: None, **options: Any) -> EngineLoop:
    settings = {"max_model_len": 4096, "max_num_batched_tokens": 64, "max_num_seqs": 4, "num_blocks": 1024, "depth": 2}
    return EngineLoop(SchedulerConfig(**(settings | options)), device, send, vocab_size=100)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock of the engine's loop takes a quarter of a turn."""
    ticks = itertools.count()
    seconds = SimpleNamespace(
        perf_counter=lambda: next(ticks) * loop_module.TURN / 4,
        monotonic=time.monotonic,
        sleep=time.sleep,
        time=time.time,
    )
    monkeypatch.setattr(loop_module, "time", seconds)


def test_steps_go_on_while_a_flood_is_taken_in(clock: None) -> None:
    """Neither many requests nor many choices of one keep the others from their next tokens; the order stays."""
    added: list[int] = []  # requests known to the scheduler, at each output of the first

    async def run() -> None:
        device = Device()
        engine = new_loop(device, lambda message: added.append(len(engine.scheduler.roster.entries)))
        task = asyncio.create_task(engine.run())
        engine.submit(AddRequest(1, pack_tokens([1, 2, 3]), GREEDY))
        while len(added) < 3:
            await asyncio.sleep(0)
        engine.submit(AddRequest(100, pack_tokens([4, 5]), GREEDY, n=100))
        for id in range(200, 300):
            engine.submit(AddRequest(id, pack_tokens([4, 5, 6]), GREEDY))
        engine.submit(AbortRequests([150, 250]))
        while added[-1] < 199:
            await asyncio.sleep(0)
        assert [entry[3].id for entry in engine.scheduler.roster.waiting] == [
            id for id in range(100, 300) if id not in (150, 250) and id not in engine.scheduler.roster.running
        ]
        engine.submit(Shutdown())
        await asyncio.wait_for(task, 60)

    asyncio.run(run())
    assert max(after - before for before, after in itertools.pairwise(added)) <= 16, added
    assert added[0] == 1 and added[-1] == 199


def test_a_flood_alone_is_taken_in_though_no_step_can_be_launched(clock: None) -> None:
    async def run() -> None:
        device, ended = Device(), []
        engine = new_loop(device, lambda message: ended.extend(message.outputs))
        task = asyncio.create_task(engine.run())
        engine.submit(AddRequest(1, pack_tokens([100]), GREEDY, n=300))  # a token that the model does not have
        while len(ended) < 300:
            await asyncio.sleep(0)
        assert {output.finish_reason for output in ended} == {"error"} and "100" in ended[-1].error
        assert not device.plans
        engine.submit(Shutdown())
        await asyncio.wait_for(task, 60)

    asyncio.run(run())


def test_choices_that_wait_share_the_tokens_and_hashes_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashes = 0
    sha256 = kv_cache_module.sha256

    def counting(content: bytes) -> Any:
        nonlocal num_hashes
        num_hashes += 1
        return sha256(content)

    monkeypatch.setattr(kv_cache_module, "sha256", counting)
    monkeypatch.setattr(loop_module, "TURN", 1e9)

    async def run() -> None:
        engine = new_loop(Device())
        engine.submit(AddRequest(1, pack_tokens([5] * 3200), msgspec.structs.replace(GREEDY, seed=9), n=50))
        assert engine._drain_inbox()
        assert num_hashes == 3200 // 16
        waiting = [entry[3] for entry in engine.scheduler.roster.waiting]
        assert [request.sampling.seed for request in waiting] == list(range(9, 59))
        assert len({id(request.token_ids) for request in waiting}) == 1
        assert len({id(request.block_hashes) for request in waiting}) == 1
        while len(engine.scheduler.roster.running) < 2:
            plan = engine.scheduler.schedule()
            assert plan is not None
            engine.scheduler.update(StepResult(plan.step, [7] * len(plan.sampled)))
        first, second, *_ = engine.scheduler.roster.running.values()
        assert first.token_ids is not second.token_ids and len(first.token_ids) > 3200
        assert len(waiting[-1].token_ids) == 3200 and len(waiting[-1].block_hashes) == 200
        engine.scheduler.check_invariants(thorough=True)

    asyncio.run(run())


def test_a_prompt_travels_once_whatever_the_number_of_its_choices() -> None:
    async def run() -> None:
        sent: list[Any] = []
        client = EngineClient(EngineConfig("none"))
        client.ready, client._send = True, sent.append
        mailboxes = client.submit_choices(500, list(range(32_000)), GREEDY)
        assert len({mailbox.id for mailbox in mailboxes}) == client.num_open == 500
        assert sum(len(msgspec.msgpack.encode(message)) for message in sent) < 150_000
        (later,) = client.submit_choices(1, [1], GREEDY)
        assert later.id not in {mailbox.id for mailbox in mailboxes}
        client.abort(mailboxes)
        assert sent[-1] == AbortRequests([mailbox.id for mailbox in mailboxes]) and client.num_open == 1

    asyncio.run(run())


def test_a_frame_has_a_limit_that_only_a_single_message_exceeds() -> None:
    """Whoever sends something small beside it is not kept waiting by all of it, and no length is too long to say."""

    async def run() -> None:
        left, right = socket.socketpair()
        received: list[Any] = []
        ours = await Connection.open(left, FromEngine, received.append, lambda _: None)
        theirs = await Connection.open(right, ToEngine, received.append, lambda _: None)
        lengths: list[int] = []
        transport = ours._transport
        assert transport is not None
        write = transport.write

        def noting(data: bytes) -> None:
            lengths.append(LENGTH.unpack_from(data)[0])
            write(data)

        ours._transport = SimpleNamespace(write=noting, is_closing=lambda: False, close=transport.close)  # type: ignore
        large = AddRequest(0, bytes(3 * MAX_FRAME), GREEDY)
        messages = [AddRequest(id, bytes(MAX_FRAME // 10), GREEDY) for id in range(1, 51)]
        sent = [AbortRequests([1]), large, *messages, AbortRequests([2])]
        for message in sent:
            ours.send(message)
        while len(received) < len(sent):
            await asyncio.sleep(0.001)
        assert received == sent
        assert 5 <= len(lengths) <= 10
        assert [length > MAX_FRAME + 16 for length in lengths].count(True) == 1
        ours.close()
        theirs.close()

    asyncio.run(run())
    assert LENGTH.unpack(LENGTH.pack(5 << 30)) == (5 << 30,)
