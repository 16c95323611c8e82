"""The next step is launched late, so that who arrives during a step is in the one after it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from vserve.engine.link.messages import AddRequest, Shutdown, pack_tokens
from vserve.engine.link.plan import StepPlan, StepResult
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule.pacing import HOST_FACTOR, RELATIVE_SAFETY, SAFETY, Pacer
from vserve.engine.start.loop import EngineLoop


def plan(decodes: int, prompt: int = 0) -> StepPlan:
    rows = decodes + bool(prompt)
    tokens = [1] * decodes + [prompt] * bool(prompt)
    return StepPlan(0, list(range(rows)), tokens, [0] * rows, [], decodes, [], [[]])


def test_a_kind_of_step_that_was_never_seen_is_not_waited_for():
    pacer = Pacer()
    pacer.launched(plan(4), 0.001, True, 10.0)
    assert pacer.slack(10.0) == 0


def test_the_launch_comes_before_the_end_by_what_it_takes_and_a_margin():
    pacer = Pacer()
    pacer.finished(pacer.kind(plan(4)), 0.100, 9.0)
    pacer.launched(plan(4), 0.002, True, 10.0)
    lead = SAFETY + RELATIVE_SAFETY * 0.100 + HOST_FACTOR * 0.002
    assert pacer.slack(10.0) == pytest.approx(0.100 - lead)
    assert pacer.slack(10.05) == pytest.approx(0.050 - lead)
    assert pacer.slack(10.2) == 0


def test_a_step_behind_another_begins_when_that_one_ends():
    pacer = Pacer()
    pacer.finished(pacer.kind(plan(4)), 0.100, 9.0)
    pacer.launched(plan(4), 0.0, True, 10.0)
    pacer.launched(plan(4), 0.0, False, 10.04)
    pacer.finished(pacer.kind(plan(4)), 0.100, 10.1)
    assert pacer.slack(10.1) == pytest.approx(0.100 * (1 - RELATIVE_SAFETY) - SAFETY)


def test_prompts_and_batches_of_other_sizes_are_other_kinds():
    kinds = [Pacer.kind(p) for p in (plan(1), plan(9), plan(0, 100), plan(1, 100), plan(1, 1000))]
    assert len(set(kinds)) == 5


class Device:
    """Stands in for the executor: steps take a fixed time, one after the other."""

    STEP = 0.1

    def __init__(self) -> None:
        self.free_at = 0.0
        self.plans: list[tuple[StepPlan, float]] = []  # with the time at which the device begins
        self.futures: list[asyncio.Future[StepResult]] = []

    def execute(self, plan: StepPlan) -> None:
        begin = max(time.perf_counter(), self.free_at)
        self.free_at = begin + self.STEP
        self.plans.append((plan, begin))
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        result = StepResult(plan.step, [7] * len(plan.sampled), device_seconds=self.STEP)
        loop.call_later(self.free_at - time.perf_counter(), lambda: future.done() or future.set_result(result))
        self.futures.append(future)

    def sample(self, mask: object = None) -> None:
        pass

    async def wait(self, seconds: float) -> bool:
        done, _ = await asyncio.wait([self.futures[0]], timeout=seconds)
        return bool(done)

    async def result(self) -> StepResult:
        return await self.futures.pop(0)


def test_who_arrives_during_a_step_is_in_the_next_one():
    """Where the machine lets the loop run in time: it has several tries. Launched early, no step would be so."""
    tries: list[tuple[int, float]] = []  # steps from the one that runs at the arrival; seconds of it and of idling

    async def run() -> None:
        device = Device()
        config = SchedulerConfig(max_model_len=960, max_num_batched_tokens=32, max_num_seqs=4, num_blocks=64, depth=2)
        engine = EngineLoop(config, device, lambda message: None, vocab_size=100)  # type: ignore[arg-type]
        task = asyncio.create_task(engine.run())
        greedy = SamplingParams(max_tokens=900, temperature=0.0)
        engine.submit(AddRequest(1, pack_tokens([1, 2, 3]), greedy))
        while len(device.plans) < 5:  # the kinds of steps are known by now
            await asyncio.sleep(0.005)
        for id in range(2, 12):
            begun = len(device.plans)
            while len(device.plans) == begun:
                await asyncio.sleep(0.001)
            await asyncio.sleep(max(0.0, device.plans[-1][1] + 0.3 * Device.STEP - time.perf_counter()))
            now = time.perf_counter()
            running = max(i for i, (_, begin) in enumerate(device.plans) if begin <= now)
            engine.submit(AddRequest(id, pack_tokens([4, 5, 6]), SamplingParams(max_tokens=1, temperature=0.0)))
            found: list[int] = []
            while not found:
                await asyncio.sleep(0.001)
                found = [i for i, (plan, _) in enumerate(device.plans) if id in [r.request_id for r in plan.new_rows]]
            tries.append((found[0] - running, device.plans[found[0]][1] - device.plans[found[0] - 1][1]))
            if is_good(*tries[-1]):
                break
        engine.submit(Shutdown())
        await asyncio.wait_for(task, 60)

    def is_good(steps: int, seconds: float) -> bool:
        return steps == 1 and seconds < 1.5 * Device.STEP

    asyncio.run(run())
    assert is_good(*tries[-1]), tries


def test_an_engine_on_the_event_loop_of_others_never_puts_it_to_sleep(monkeypatch):
    """In process, the API's requests are answered on that loop: it may wait, but not block."""
    naps: list[float] = []

    def sleep(seconds: float, thread: int = threading.get_ident()) -> None:
        if threading.get_ident() == thread:
            naps.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)

    async def run(enough: int = 12, **options) -> int:
        device = Device()
        device.STEP = 0.01
        config = SchedulerConfig(max_model_len=960, max_num_batched_tokens=32, max_num_seqs=4, num_blocks=64, depth=2)
        engine = EngineLoop(config, device, lambda message: None, vocab_size=100, **options)  # type: ignore[arg-type]
        task = asyncio.create_task(engine.run())
        engine.submit(AddRequest(1, pack_tokens([1, 2, 3]), SamplingParams(max_tokens=900, temperature=0.0)))
        while len(device.plans) < 12 or (not naps and len(device.plans) < enough):
            await asyncio.sleep(0.005)
        engine.submit(Shutdown())
        await asyncio.wait_for(task, 60)
        return len(naps)

    assert asyncio.run(run(enough=400)) > 0, "the engine's own loop is held back to a fraction of a millisecond"
    naps.clear()
    assert asyncio.run(run(shares_thread=True)) == 0
