"""What the engine tells whoever watches: each step, who computed what in it, and the state of the cache."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from vserve.engine.link.messages import HISTORY, StepRecord, StepReport, StepReports
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule.kv_cache import KVCacheManager
from vserve.engine.schedule.request import Request
from vserve.engine.schedule.step import Step
from vserve.engine.schedule.watch import MAX_REQUESTS, PARTS, StepWatch
from vserve.server.client import engine_client
from vserve.server.client.engine_client import EngineClient, EngineDeadError

PROMPT, OUTPUT, REQUESTS = 40, 12, 3
TOKENS = REQUESTS * (PROMPT + OUTPUT - 1)  # that are computed: the last one of an answer is only sampled


def test_every_token_of_every_request_is_in_the_reports(tiny_model):
    """Chunks of 16: a prompt of 40 tokens takes several steps, of which none may be called a decode."""
    seen: list[StepReports] = []

    async def main() -> None:
        config = EngineConfig(
            str(tiny_model("llama")), device="cpu", cpu_threads=1, engine_in_process=True, max_num_batched_tokens=16,
            max_num_seqs=4,
        )  # fmt: skip
        client = EngineClient(config)
        await client.start()

        async def ask(first: int) -> None:
            sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
            mailbox = client.submit([first] * PROMPT, sampling)
            while (await mailbox.get()).finish_reason is None:
                pass

        try:
            await ask(5)
            client.watch_steps(seen.append)
            await asyncio.gather(*(ask(10 + i) for i in range(REQUESTS)))
            async with asyncio.timeout(60):
                while sum(step.record.num_tokens for reports in seen for step in reports.steps) < TOKENS:
                    await asyncio.sleep(0.01)
            client.unwatch_steps(seen.append)
            await ask(6)
            num_seen = len(seen)
            await ask(7)
            assert len(seen) == num_seen, "reported though nobody watches"
        finally:
            await client.close()

    asyncio.run(main())
    steps = [step for reports in seen for step in reports.steps]
    assert all(isinstance(step, StepReport) and step.record.device_seconds > 0 for step in steps)
    assert [step.record.step for step in steps] == sorted({step.record.step for step in steps})
    prefill: dict[int, int] = {}
    decode: dict[int, int] = {}
    for step in steps:
        assert sum(tokens for _, tokens, _ in step.rows) == step.record.num_tokens
        assert len(step.rows) == step.record.num_requests
        for id, tokens, is_prefill in step.rows:
            counts = prefill if is_prefill else decode
            counts[id] = counts.get(id, 0) + tokens
    assert set(prefill.values()) == {PROMPT} and len(prefill) == REQUESTS
    assert decode.keys() == prefill.keys() and set(decode.values()) == {OUTPUT - 1}
    first = seen[0].blocks
    assert len(first.used) == len(first.cached) == first.num_cells, "a newcomer gets the whole map"


def test_the_last_steps_are_told_to_whoever_asks(tiny_model, monkeypatch):
    """Also where nobody watches; and whoever asks an engine that dies, or says nothing, does not wait for ever."""

    async def main() -> None:
        config = EngineConfig(str(tiny_model("llama")), device="cpu", cpu_threads=1, engine_in_process=True)
        client = EngineClient(config)
        with pytest.raises(EngineDeadError):
            await client.last_steps(1)
        await client.start()
        try:
            assert await client.last_steps(5) == []
            began = time.time()
            mailbox = client.submit([5] * PROMPT, SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True))
            while (await mailbox.get()).finish_reason is None:
                pass
            steps = await client.last_steps(HISTORY)
            assert [step.num_tokens for step in steps[:OUTPUT]] == [PROMPT] + [1] * (OUTPUT - 1)
            assert [step.num_decodes for step in steps[:OUTPUT]] == [0] + [1] * (OUTPUT - 1)
            assert [step.step for step in steps] == sorted({step.step for step in steps})
            assert all(step.host_seconds > 0 and step.device_seconds > 0 and step.num_requests == 1 for step in steps)
            times = [began, *(step.time for step in steps), time.time()]
            assert times == sorted(times)
            assert await client.last_steps(3) == steps[-3:]

            client._send = lambda message: None  # it hears nothing
            monkeypatch.setattr(engine_client, "PATIENCE", 0.2)
            with pytest.raises(TimeoutError):
                await client.last_steps(1)
            asked = asyncio.ensure_future(client.last_steps(1))
            await asyncio.sleep(0)
            client._down("out of luck")
            with pytest.raises(EngineDeadError, match="out of luck"):
                await asked
        finally:
            await client.close()

    asyncio.run(main())


def test_the_map_counts_every_block_once():
    kv = KVCacheManager(SchedulerConfig(4096, 512, 8, num_blocks=2001))
    blocks = [kv.pool.take_many(1)[0] for _ in range(300)]
    for number, block in enumerate(blocks):
        if number % 2:
            kv.pool.register(block, bytes([number % 256, number // 256]))
    kv.pool.release(blocks[:100])
    sent: list[StepReports] = []
    watch = StepWatch(kv, sent.append)
    (whole,) = sent
    assert sum(whole.blocks.used) == 200 and sum(whole.blocks.cached) == 50
    assert whole.blocks.num_cells * whole.blocks.blocks_per_cell >= 2000 and whole.blocks.num_cells <= 512
    watch.greet()
    assert sent.pop() == whole, "whoever comes gets the same, and steps that wait stay"
    now = time.monotonic()
    for second in range(1, PARTS + 2):
        watch.add(StepReport(StepRecord(second, 0.0, 1, 1, 1), []), now + second)
    parts = [reports.blocks for reports in sent[1:]]
    assert len({part.start for part in parts[:-1]}) == PARTS and parts[-1].start == 0, "the parts go round"
    assert sum(sum(part.used) for part in parts[:-1]) == 200 and sum(sum(part.cached) for part in parts[:-1]) == 50


def test_of_many_requests_the_first_and_the_last_are_named():
    step = Step(0, 8192)
    for id in range(1000):
        request = Request(id, [1] * 4, SamplingParams(max_tokens=5))
        request.num_computed_tokens = 4 if id > 990 else 5
        step.scheduled[request] = 4 if id > 990 else 1
    rows = StepWatch.rows(step)
    assert len(rows) == MAX_REQUESTS
    assert rows[0] == (0, 1, False) and (999, 4, True) in rows


def test_watching_a_step_costs_two_percent_of_a_quick_one(slowness: float):
    """As on a GPU: 256 requests, 240 steps a second, 100,000 blocks; the messages, and their encoding, are in it."""
    kv = KVCacheManager(SchedulerConfig(4096, 8192, 256, num_blocks=100_001))
    kv.pool.release([kv.pool.take_many(1)[0] for _ in range(50_000)][::2])
    step = Step(0, 8192)
    for id in range(256):
        step.scheduled[Request(id, [1] * 4, SamplingParams(max_tokens=5))] = 1
    encoder, sent = msgspec.msgpack.Encoder(), []
    watch = StepWatch(kv, lambda reports: sent.append(encoder.encode(reports)))
    seconds_a_step, num_steps = 1 / 240, 480
    now, best = time.monotonic(), float("inf")
    for _ in range(5):
        sent.clear()
        started = time.thread_time()
        for number in range(num_steps):
            now += seconds_a_step
            record = StepRecord(number, 0.0, 256, 256, 256, 9e-4, 4e-3)
            watch.add(StepReport(record, StepWatch.rows(step)), now)
        best = min(best, (time.thread_time() - started) / num_steps)
        assert len(sent) >= num_steps * seconds_a_step / 0.11
    print(f"{1e6 * best:.0f} us a step")
    assert best < 0.02 * seconds_a_step * slowness
