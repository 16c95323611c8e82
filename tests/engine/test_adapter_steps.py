"""Steps in which adapters meet what is not theirs: scored prompts, steps that have failed, other threads, waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vserve.engine.adapters.layout import AdapterStore
from vserve.engine.link.messages import AddRequest, LoadAdapter
from vserve.engine.link.plan import StepPlan
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule.kv_events import BlockStored
from vserve.engine.schedule.scheduler import Scheduler
from vserve.engine.start import process
from vserve.engine.start.arrivals import Arrivals
from vserve.engine.step.runner import ModelRunner
from vserve.server.client.engine_client import EngineClient

ADAPTER = 1


def greedy(num_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def base(tiny_model: Any) -> Path:
    folder: Path = tiny_model("llama")
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, adapter_files: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = adapter_files.write_adapter(tmp_path_factory.mktemp("adapter") / "head", base, ["q_proj", "lm_head"])
    return folder


@asynccontextmanager
async def running(base: Path, adapter: Path, **options: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineConfig(
        str(base), device="cpu", engine_in_process=True, cpu_threads=1, enable_lora=True, max_model_len=96,
        max_num_batched_tokens=64, max_num_seqs=8, block_size=4, **options,
    ))  # fmt: skip
    await client.start()
    try:
        assert (await client.load_adapter(LoadAdapter(ADAPTER, str(adapter), "sql"))).error is None
        yield client
    finally:
        await client.close()


async def outcome(mailbox: Any) -> tuple[list[int], list[float]]:
    """(tokens, log-probabilities of the prompt's tokens)"""
    tokens, scores = [], []
    while True:
        output = await mailbox.get()
        assert output.error is None, output.error
        tokens += output.token_ids
        scores += [entry.logprob for entry in output.prompt_logprobs or ()]
        if output.finish_reason is not None:
            return tokens, scores


def test_prompts_are_scored_beside_an_adapter_with_a_head(base: Path, adapter: Path) -> None:
    """Of fewer tokens than the step samples, of more, and of its own adapter's neighbour: as when each is alone."""
    prompts = [[7, 8], list(range(20, 33)), list(range(40, 90))]

    async def main() -> None:
        async with running(base, adapter) as client:
            alone = [await outcome(client.submit(p, greedy(2, prompt_logprobs=0))) for p in prompts]
            long = await outcome(client.submit([5, 6, 7], greedy(24, adapter=ADAPTER)))
            assert [len(scores) for _, scores in alone] == [len(p) - 1 for p in prompts]
            for prompt, (tokens, scores) in zip(prompts, alone, strict=True):
                decoding = client.submit([5, 6, 7], greedy(24, adapter=ADAPTER))
                first = await decoding.get()
                found, beside = await outcome(client.submit(prompt, greedy(2, prompt_logprobs=0)))
                assert found == tokens and beside == pytest.approx(scores, abs=1e-4)
                assert first.error is None and (await outcome(decoding))[0] == long[0][len(first.token_ids) :]

    asyncio.run(main())


def test_a_step_that_fails_leaves_nothing_to_the_next(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, prompt = ModelRunner.forward, [5, 6, 7, 8]

    def fail(runner: ModelRunner, *inputs: Any) -> Tensor:
        monkeypatch.setattr(ModelRunner, "forward", forward)
        raise RuntimeError("planted")

    async def main() -> None:
        async with running(base, adapter) as client:
            alone = await outcome(client.submit(prompt, greedy(3, prompt_logprobs=0)))
            monkeypatch.setattr(ModelRunner, "forward", fail)
            failed = await client.submit(prompt[:2], greedy(3, adapter=ADAPTER)).get()
            assert failed.error is not None and "planted" in failed.error
            tokens, scores = await outcome(client.submit(prompt, greedy(3, prompt_logprobs=0)))
            assert tokens == alone[0] and scores == pytest.approx(alone[1], abs=1e-4)

    asyncio.run(main())


def test_a_step_has_what_was_there_when_it_was_handed_over(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread runs it, and the host may have let go of the adapter by then."""
    execute = ModelRunner.execute

    def late(runner: ModelRunner, plan: StepPlan) -> None:
        assert runner.adapters is not None
        runner.adapters.store.packed.clear()
        execute(runner, plan)

    async def main() -> None:
        async with running(base, adapter) as client:
            monkeypatch.setattr(ModelRunner, "execute", late)
            monkeypatch.setattr(AdapterStore, "read", None)
            tokens, _ = await outcome(client.submit([5, 6, 7, 8], greedy(3, adapter=ADAPTER)))
            assert len(tokens) == 3

    asyncio.run(main())


def test_cache_events_name_the_adapter(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who routes by them must not take its blocks for the base model's."""
    heard: list[Any] = []

    class Recorder:
        def __init__(self, given: dict[str, Any]) -> None: ...

        def publish(self, events: list[Any]) -> None:
            heard.extend(events)

        def close(self) -> None: ...

    async def main() -> None:
        options = json.dumps({"enable_kv_cache_events": True})
        async with running(base, adapter, kv_events_config=options) as client:
            for id in (0, ADAPTER):
                await outcome(client.submit([5, 6, 7, 8, 9], greedy(3, adapter=id)))

    monkeypatch.setattr(process, "Publisher", Recorder)
    asyncio.run(main())
    stored = [event for event in heard if isinstance(event, BlockStored)]
    assert [(event.lora_id, event.lora_name) for event in stored] == [(None, None), (ADAPTER, "sql")]
    assert stored[0].token_ids == stored[1].token_ids and stored[0].block_hashes != stored[1].block_hashes


def test_who_waited_for_a_grammar_hears_that_the_adapter_is_gone() -> None:
    scheduler = Scheduler(SchedulerConfig(max_model_len=64, max_num_batched_tokens=32, max_num_seqs=2, max_loras=1))
    ready: list[Callable[[], None]] = []
    ended: list[Any] = []

    class Loading:
        known, with_head = True, frozenset[int]()

        def knows(self, id: int) -> bool:
            return self.known

    class Slow:
        ready = False

        def when_ready(self, call: Callable[[], None]) -> None:
            ready.append(call)

    async def main() -> None:
        arrivals = Arrivals(scheduler, 300, 0, ended.extend)
        loading = Loading()
        arrivals.adapters = loading  # type: ignore[assignment]
        arrivals._grammars.matcher = lambda key: Slow()  # type: ignore[assignment, method-assign, return-value]
        prompt = np.arange(5, 9, dtype=np.int32).tobytes()
        sampling = greedy(3, adapter=ADAPTER, grammar="g")
        assert not any(arrivals.add(AddRequest(7, prompt, sampling)))
        loading.known = False
        ready[0]()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    (output,) = ended
    assert (output.id, output.error) == (7, "its adapter is not loaded") and not scheduler.has_unfinished()


def test_what_warms_up_misses_no_graph(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with adapters before their graphs are captured; afterwards a missed one counts."""
    dummy_step, runners = ModelRunner.dummy_step, []

    def step(runner: ModelRunner, *arguments: Any, **more: Any) -> Any:
        runners.append(runner)
        return dummy_step(runner, *arguments, **more)

    monkeypatch.setattr(ModelRunner, "dummy_step", step)

    async def run() -> tuple[int, int]:
        async with running(base, adapter):
            runner = runners[0]
            graphs = runner.plan_graphs(8, 64, ())
            dummy_step(runner, 2, 8, greedy(4), adapted=True)
            before, runner.graphs = runner.num_graph_misses, graphs
            dummy_step(runner, 2, 8, greedy(4), adapted=True)
            runner.graphs = runner.adapter_graphs = None
            return before, runner.num_graph_misses

    assert asyncio.run(run()) == (0, 1)


def test_graphs_with_adapters_have_the_pool_of_the_others(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory plan has activations of one pool: of the largest of all."""
    make_rows, runners, pools = ModelRunner.make_rows, [], []
    monkeypatch.setattr(ModelRunner, "make_rows", lambda runner, *a: (runners.append(runner), make_rows(runner, *a)))

    @contextmanager
    def capturing(graph: Any, pool: Any, **_: Any) -> Iterator[None]:
        pools.append(pool)
        yield

    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))

    async def run() -> int:
        async with running(base, adapter):
            runner = runners[0]
            graphs = runner.plan_graphs(8, 32, ())
            assert runner.adapter_graphs is not None
            every = [*graphs.shapes(), *runner.adapter_graphs.shapes()]
            runner.capture_graphs(graphs)
            runner.graphs = runner.adapter_graphs = None
            return len(every)

    assert asyncio.run(run()) == len(pools) and set(pools) == {0}


@pytest.mark.parametrize("max_loras", [1, 3])
def test_what_kernels_read_starts_on_16_bytes(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch, max_loras: int
) -> None:
    """Whatever the place, the number of slots and that of tokens: Triton compiles a kernel again for what does not."""
    dummy_step, runners = ModelRunner.dummy_step, []

    def step(runner: ModelRunner, *arguments: Any, **more: Any) -> Any:
        runners.append(runner)
        return dummy_step(runner, *arguments, **more)

    monkeypatch.setattr(ModelRunner, "dummy_step", step)

    async def run() -> None:
        async with running(base, adapter, max_loras=max_loras):
            tables = runners[0].adapters
            assert tables is not None and len(tables.layout.places) > 2
            read = [tensor for place in tables.layout.places for tensor in tables._matrices(place)]
            for num_tokens in (1, 2, 7, 64):
                read += [*tables._tokens.tiles(num_tokens)[:4], tables._tokens.token_slots(num_tokens)]
            assert all(tensor.storage_offset() * tensor.itemsize % 16 == 0 for tensor in read)
            assert all(len(used) == max_loras for *_, used in map(tables._matrices, tables.layout.places))

    asyncio.run(run())
