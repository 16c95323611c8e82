"""One engine of two ranks, the second a process, beside one of one: the same answers; and what ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from vserve.engine.describe.divide import check_divides, sizes
from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.grammar.grammar import pack, prepare
from vserve.engine.layers.embedding import LMHead
from vserve.engine.link.connection import OWNER, Connection
from vserve.engine.link.messages import AddGrammar
from vserve.engine.link.plan import BlockWrite, NewRow, StepPlan
from vserve.engine.link.sampling_params import Pooling, SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.ranks import hang
from vserve.engine.ranks.executor import RanksExecutor
from vserve.engine.ranks.messages import Channel, Execute, Follow, Join, Leave, Seat, ToRank
from vserve.engine.ranks.peers import Peers, RankLost, share_of_threads
from vserve.engine.ranks.place import Child
from vserve.engine.start import rank_process as process
from vserve.engine.step import compilations
from vserve.server.client.engine_client import EngineClient
from vserve.server.client.mailbox import EngineDeadError
from vserve.server.client.process import EngineProcess
from vserve.server.client.replicas import engine_environments

from .conftest import Answer, at_rest, collect

PROMPTS = [[(7 * i * i + 3 * j * j + j) % 290 + 5 for j in range(length)] for i, length in enumerate((3, 17, 40, 90))]
BLOCKS = 30  # of 16 tokens: three long requests do not fit at once


def settings(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        str(folder), device="cpu", cpu_threads=2, max_model_len=256, num_gpu_blocks_override=BLOCKS, **options
    )  # fmt: skip


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **options})


@dataclass
class Pair:
    """Engines that differ in the number of their ranks, on one event loop for all tests of this file."""

    runner: asyncio.Runner
    clients: list[EngineClient]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, 120))

    def answers(self, requests: list[tuple[list[int], SamplingParams]]) -> list[list[Answer]]:
        """Of one rank, of two; all requests at once."""

        async def of(client: EngineClient) -> list[Answer]:
            found = await asyncio.gather(*(collect(client, *request) for request in requests))
            while not at_rest(client.stats):
                await asyncio.sleep(0.01)
            return list(found)

        async def main() -> list[list[Answer]]:
            return [await of(client) for client in self.clients]

        found: list[list[Answer]] = self.run(main())
        assert not [answer.error for answers in found for answer in answers if answer.error]
        return found

    def same(self, requests: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
        """The answers of two ranks, which have the tokens of one."""
        one, two = self.answers(requests)
        assert [answer.tokens for answer in two] == [answer.tokens for answer in one]
        assert [answer.finish_reason for answer in two] == [answer.finish_reason for answer in one]
        return two


# Model → its keys of config.json, and what the engine of two ranks has beside them: with drafts, all ranks must keep
# the same tokens; with whole experts, each has other ones.
NGRAMS = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3})
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "qwen3_moe": (
        {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
        {"enable_expert_parallel": True, "speculative_config": NGRAMS},
    ),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tiny_model: Any) -> Iterator[Pair]:
    keys, beside = PAIRS[request.param]
    folder = tiny_model(request.param, **keys)
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hang, "LIMIT", 4.0)  # seconds until a hang is one
        options: dict[str, Any] = {"engine_in_process": True, "max_num_batched_tokens": 64}
        clients = [
            EngineClient(settings(folder, **options)),
            EngineClient(settings(folder, tensor_parallel_size=2, **options, **beside)),
        ]
        made = Pair(runner, clients)
        for client in clients:
            made.run(client.start())
        try:
            yield made
        finally:
            for client in clients:
                made.run(client.close())


def test_greedy_and_in_chunks(pair: Pair) -> None:
    answers = pair.same([(prompt, greedy()) for prompt in PROMPTS] + [(PROMPTS[3] * 2, greedy())])
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)


def test_sampled(pair: Pair) -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"top_k": 20, "top_p": 0.9}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"min_p": 0.02, "logit_bias": {7: 3.0}}, {"bad_words": ((5,), (9, 10))}, {"min_tokens": 5},
    ]  # fmt: skip
    answers = pair.same([(PROMPTS[i % 4], greedy(temperature=0.9, seed=i, **kind)) for i, kind in enumerate(kinds)])
    assert len({tuple(answer.tokens) for answer in answers}) == len(kinds)


@pytest.mark.parametrize(
    ("asked", "gathers"), [({}, False), ({"temperature": 0.9, "seed": 1}, True), ({"logprobs": 1}, True)]
)
def test_logits_are_gathered_only_where_somebody_asks_for_more_than_the_greatest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], gathers: bool
) -> None:
    """As rank 0 sees it, which is this process."""
    called = {"whole": 0, "greatest": 0}

    def counted(name: str) -> Callable[[LMHead, Any], Any]:
        original = getattr(LMHead, name)

        def call(head: LMHead, part: Any) -> Any:
            called[name] += head.group.size > 1
            return original(head, part)

        return call

    for name in called:
        monkeypatch.setattr(LMHead, name, counted(name))
    pair.same([(PROMPTS[1], greedy(**asked)), (PROMPTS[2], greedy(max_tokens=30))])
    assert called["greatest"] and (called["whole"] > 5) == gathers, called


def test_log_probabilities(pair: Pair) -> None:
    one, two = pair.answers([(prompt, greedy(logprobs=3, prompt_logprobs=2)) for prompt in PROMPTS])
    for alone, shared in zip(one, two, strict=True):
        assert shared.tokens == alone.tokens and shared.prompt_logprobs and alone.prompt_logprobs
        pairs = zip(alone.logprobs + alone.prompt_logprobs, shared.logprobs + shared.prompt_logprobs, strict=True)
        for left, right in pairs:
            assert right.top_ids == left.top_ids and right.rank == left.rank
            assert right.top_logprobs == pytest.approx(left.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_embeddings(pair: Pair, kind: str) -> None:
    sampling = SamplingParams(max_tokens=1, pooling=Pooling(kind))
    one, two = pair.answers([(prompt, sampling) for prompt in PROMPTS])
    for alone, shared in zip(one, two, strict=True):
        assert alone.embedding and shared.embedding
        left, right = (np.frombuffer(vector, np.float32) for vector in (alone.embedding, shared.embedding))
        assert np.abs(left).max() > 0.01 and np.allclose(left, right, atol=1e-4)


def test_drafts(pair: Pair) -> None:
    """That hold and that do not, greedy and sampled, in company and alone."""
    two = pair.clients[1]
    repeated = [[*PROMPTS[i] * 2, *PROMPTS[i][:3]] for i in (1, 2)]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.3, "seed": 4, "top_k": 2}]
    pair.same([(prompt, greedy(max_tokens=60, **kind)) for prompt in repeated for kind in kinds])
    pair.same([(repeated[0], greedy(max_tokens=60, logprobs=2))])
    if two.config.speculative_config:
        assert 0 < sum(two.stats.num_accepted_tokens) < two.stats.num_draft_tokens


def test_prefix_hits(pair: Pair) -> None:
    prompt = [token + 1 for token in PROMPTS[3]]
    (cold,) = pair.same([(prompt, greedy())])
    (warm,) = pair.same([(prompt, greedy())])
    assert cold.num_cached_tokens == 0 < warm.num_cached_tokens and warm.tokens == cold.tokens


@pytest.mark.slow
def test_preemption(pair: Pair) -> None:
    before = [client.stats.num_preemptions for client in pair.clients]
    pair.same([([9 + i, *PROMPTS[3]], greedy(max_tokens=100)) for i in range(4)])
    assert all(client.stats.num_preemptions > count for client, count in zip(pair.clients, before, strict=True))


def test_experts_are_counted_whoever_has_them(pair: Pair) -> None:
    """Every rank routes all tokens: rank 0 counts those of experts of others too."""
    one, two = pair.clients
    pair.same([(PROMPTS[1], greedy(max_tokens=80))] * 2)
    if two.config.enable_expert_parallel:
        assert (one.info.experts["ranks"], two.info.experts["ranks"]) == (0, 2)
        assert min(two.stats.expert_tokens) > 0
        assert len(two.stats.expert_tokens) == len(one.stats.expert_tokens)


def test_abort(pair: Pair) -> None:
    """Whoever leaves in the middle of steps takes nobody along, and leaves no block."""
    alone = pair.answers([(PROMPTS[1], greedy(max_tokens=60))])[0][0].tokens

    async def main() -> list[int]:
        client = pair.clients[1]
        leaving = [client.submit(PROMPTS[2], greedy(max_tokens=150)) for _ in range(3)]
        staying = asyncio.create_task(collect(client, PROMPTS[1], greedy(max_tokens=60)))
        for mailbox in leaving:
            await mailbox.get()
            client.abort([mailbox])
        answer = await staying
        while not at_rest(client.stats):
            await asyncio.sleep(0.01)
        return answer.tokens

    assert pair.run(main()) == alone


def test_grammars(pair: Pair) -> None:
    """Masks are made where tokens are drawn; the other rank is told of rows that had to wait for one."""
    vocabulary = prepare(pack([b""] * 10 + [b"%d " % id for id in range(10, 300)], (2,)))
    source = b'%llguidance {"no_forcing": true}\nstart: /((1[0-9]|2[0-7]|83|150) ){6}/'
    for client in pair.clients:
        client.send(vocabulary)
        client.send(AddGrammar("numbers", "llguidance", source))
    bound = [
        (prompt, greedy(max_tokens=20, ignore_eos=False, grammar="numbers", temperature=heat, seed=3))
        for prompt, heat in zip(PROMPTS, (0.0, 1.0, 1.5, 0.0), strict=True)
    ]
    answers = pair.same([*bound, *((prompt, greedy()) for prompt in PROMPTS)])
    for answer in answers[: len(bound)]:
        assert answer.finish_reason == "stop" and len(answer.tokens) == 7
        assert set(answer.tokens[:6]) <= {*range(10, 28), 83, 150} and answer.tokens[6] == 2
    alone = pair.same([bound[0]])  # asks for the greatest logit, but for its mask: rank 0 needs whole rows
    assert alone[0].tokens == answers[0].tokens


# ---- what ends an engine ----


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_its_engine(pair: Pair, awake: Callable[[], float]) -> None:
    """The last of the tests with this pair."""

    async def main() -> str:
        await collect(pair.clients[1], [5, 6, 7], greedy())
        answer = begin(pair.clients[1])
        await asyncio.sleep(0.1)
        os.kill(rank_of(os.getpid()), signal.SIGSTOP)
        begun = awake()
        found = await cause(answer)
        assert awake() - begun < 10
        return found

    found: str = pair.run(main())
    assert found.startswith("rank 1 of 2 (cpu) is stopped (SIGSTOP, a debugger), and has been silent for"), found


def begin(client: EngineClient, tokens: int = 250) -> asyncio.Task[Answer]:
    return asyncio.create_task(collect(client, [5, 6, 7], greedy(max_tokens=tokens)))


async def cause(answer: asyncio.Task[Answer]) -> str:
    with pytest.raises(EngineDeadError) as raised:
        await asyncio.wait_for(answer, 30)
    return str(raised.value)


def ranks_of(engine: int) -> list[int]:
    """The processes of an engine's ranks but the first, which it has itself."""
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return [int(pid) for pid in children if "engine.start.rank_process" in Path(f"/proc/{pid}/cmdline").read_text()]


def rank_of(engine: int) -> int:
    """The process of rank 1 of an engine's."""
    return ranks_of(engine)[0]


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_its_engine_which_starts_again(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, awake: Callable[[], float]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    left = tmp_path / "vserve-ranks-left"  # of an engine that was killed
    left.mkdir()
    (left / OWNER).write_text("1\n")

    async def main() -> None:
        client = EngineClient(settings(tiny_model("llama"), tensor_parallel_size=2), restarts=1)
        await client.start()
        try:
            expected = (await collect(client, [5, 6, 7], greedy())).tokens
            assert isinstance(client._engine, EngineProcess)
            first = client._engine.pid
            other = rank_of(first)
            answer = begin(client)
            await asyncio.sleep(0.1)
            os.kill(other, signal.SIGKILL)
            begun = awake()
            found = await cause(answer)
            assert awake() - begun < 10
            assert found.startswith("rank 1 of 2 (cpu) was killed by signal 9 (SIGKILL)"), found
            while not client.ready:
                await asyncio.sleep(0.05)
            assert client._engine.pid != first and not Path(f"/proc/{other}").exists()
            assert (await collect(client, [5, 6, 7], greedy())).tokens == expected
            last = rank_of(client._engine.pid)
            assert not left.exists() and len(list(tmp_path.glob("vserve-ranks-*"))) == 1
        finally:
            await client.close()
        assert not list(tmp_path.glob("vserve-ranks-*"))
        end = time.monotonic() + 30
        while Path(f"/proc/{last}").exists():  # the rank leaves with its engine; killed with it, a moment later
            assert time.monotonic() < end
            await asyncio.sleep(0.05)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("step:20:hang:1", "rank 1 of 2 (cpu) has not gone on for"),
        ("schedule:20:hang", "the engine process exited with code 1;"),
    ],
)
def test_a_rank_that_hangs_while_clients_go_on_asking(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, fault: str, said: str, awake: Callable[[], float]
) -> None:
    """What they send keeps rank 0's process busy, not the thread that waits for the other rank. And rank 0's loop
    itself, which nobody can ask."""
    monkeypatch.setenv("VSERVE_FAULT", fault)
    monkeypatch.setenv("VSERVE_ALLOW_FAULTS", "1")

    async def main() -> tuple[str, float]:
        client = EngineClient(settings(tiny_model("llama"), tensor_parallel_size=2))
        await client.start()
        stepped = awake()

        def hear(_: object) -> None:
            nonlocal stepped
            stepped = awake()

        client.stats_listeners.append(hear)

        async def ask() -> str:
            while True:
                try:
                    begin(client, tokens=8).add_done_callback(lambda answer: answer.exception())
                except EngineDeadError as error:
                    return str(error)
                if client.down is not None:
                    return client.down
                await asyncio.sleep(0.005)

        try:
            return await asyncio.wait_for(ask(), 60), awake() - stepped
        finally:
            await client.close()

    found, seconds = asyncio.run(main())
    assert found.startswith(said), found
    assert seconds < 10


@pytest.mark.slow
def test_a_rank_that_is_lost_while_it_starts(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSERVE_FAULT", "phase:memory:exit:1")
    monkeypatch.setenv("VSERVE_ALLOW_FAULTS", "1")

    async def main() -> str:
        client = EngineClient(settings(tiny_model("llama"), tensor_parallel_size=2))
        try:
            with pytest.raises(EngineDeadError) as raised:
                await asyncio.wait_for(client.start(), 60)
            return str(raised.value)
        finally:
            await client.close()

    assert asyncio.run(main()) == "rank 1 of 2 (cpu) exited with code 3; its last words are above"


def ticks(watch: hang.HangWatch, pulses: list[list[hang.Pulse | None]], **options: Any) -> tuple[int, str] | None:
    """One tick for each list of pulses of all ranks, None where one is silent."""
    found = None
    for beat in pulses:
        for rank, pulse in enumerate(beat[1:], 1):
            if pulse is not None:
                watch.heard(rank, pulse)
        assert found is None
        mine = beat[0]
        assert mine is not None
        found = watch.tick(mine, **({"busy": True, "done": 5, "limit": 5.0} | options))
    return found


def test_a_hang_is_told_from_a_long_step() -> None:
    pulse = hang.Pulse
    assert ticks(hang.HangWatch(2), [[pulse(9, 1.0), pulse(8, 3.0)]] * 6) == (1, "has not gone on for 5 s")
    assert ticks(hang.HangWatch(2), [[pulse(8, 1.0), pulse(9, 3.0)]] * 6) == (0, "has not gone on for 5 s")
    before: list[list[hang.Pulse | None]] = [[pulse(9, 1.0), pulse(8, 3.0 + min(i, 1))] for i in range(6)]
    assert ticks(hang.HangWatch(2), before) == (1, "has not gone on for 5 s"), "it was for the last step that ended"
    idle_first: list[list[hang.Pulse | None]] = [[pulse(9, 1.0), pulse(9, 1.0 + min(i, 3))] for i in range(9)]
    assert ticks(hang.HangWatch(2), idle_first) == (0, "has not gone on for 5 s"), "as soon as nobody computes"
    silent: list[list[hang.Pulse | None]] = [[pulse(9, 1.0 + i), None] for i in range(6)]
    assert ticks(hang.HangWatch(2), silent) == (1, "has been silent for 6 s"), "though rank 0 is busy"
    computes: list[list[hang.Pulse | None]] = [[pulse(9, 1.0), pulse(9, 3.0 + i)] for i in range(60)]
    assert ticks(hang.HangWatch(2), computes) is None, "rank 1 computes"
    assert ticks(hang.HangWatch(2), [[pulse(9, 1.0), None]] * 60, busy=False) is None, "nobody waits for it"
    assert (hang.step_limit(0.5), hang.step_limit(5.0)) == (hang.LIMIT, 20.0), "on slow cards steps are long"


def test_a_long_step_may_take_as_much_longer_as_it_has_more_work() -> None:
    """The first chunk behind a long prefix that another engine's lifetime has cached, after short prompts."""

    def planned(decodes: int, *prompts: tuple[int, int]) -> StepPlan:
        tokens, computed = [1] * decodes + [n for n, _ in prompts], [500_000] * decodes + [n for _, n in prompts]
        return StepPlan(1, list(range(len(tokens))), tokens, computed, [], decodes, [], [[]])

    limit = hang.StepLimit(0.3, 2048)  # as the warm-up has measured
    ordinary = limit.begin(planned(256, (1000, 0), (700, 4000)))
    assert limit() == hang.LIMIT, "nobody waits longer for an ordinary step, nor for decodes"
    long = limit.begin(planned(1, (2048, 900_000)))
    seconds = 0.3 * 900_000 / 16_384  # where a token's layers take as long as it does to attend to so many keys
    assert hang.LIMIT < seconds < limit() < 400
    limit.end(ordinary, 0.2)
    assert seconds < limit()
    limit.end(long, seconds)
    assert limit() == hang.LONGEST * seconds, "of the longest step that was seen"
    again = limit.begin(planned(1, (2048, 900_000)))
    assert limit() == hang.LONGEST * seconds
    limit.end(again, None)
    failed = limit.begin(planned(1, (2048, 1_900_000)))
    grown = limit()
    limit.end(failed, None)
    assert limit() < grown


def test_ranks_on_cards_are_given_that_time() -> None:
    async def main() -> None:
        limits: list[Any] = []
        peers: Any = SimpleNamespace(watch_steps=lambda *watched: limits.append(watched[2]), send=lambda _: None)
        futures: list[asyncio.Future[Any]] = []
        mine: Any = SimpleNamespace(asynchronous=True, execute=lambda _: None)

        def sample(mask: Any) -> None:
            futures.append(asyncio.get_running_loop().create_future())
            mine.newest = futures[-1]

        mine.sample = sample
        executor = RanksExecutor(mine, peers, lambda: 0.0, hang.StepLimit(0.3, 2048))
        found = []
        for computed in (0, 900_000):
            executor.execute(StepPlan(1, [0], [2048], [computed], [0], 0, [], [[]]))
            executor.sample()
            found.append(limits[0]())
        futures[0].set_result(SimpleNamespace(device_seconds=0.3))
        futures[1].set_result(SimpleNamespace(device_seconds=2.5))
        await asyncio.sleep(0)
        found.append(limits[0]())
        mine.asynchronous = False
        RanksExecutor(mine, peers, lambda: 0.0, hang.StepLimit(300.0, 2048))
        assert found[0] == hang.LIMIT and 20 < found[1] < 400 and found[2] == 10.0
        assert limits[1]() == hang.LIMIT, "on the CPU others' effort tells"

    asyncio.run(main())


def test_only_the_thread_that_computes_shows_that_a_rank_does() -> None:
    """A process that serves many clients is busy while its step hangs."""
    over = threading.Event()
    waits = threading.Thread(target=over.wait)
    spins = threading.Thread(target=lambda: [None for _ in iter(over.is_set, True)])
    for thread in (waits, spins):
        thread.start()
    try:
        efforts = [hang.Computing(thread) for thread in (waits, spins)]
        before = [each() for each in efforts]
        time.sleep(0.5)
        idle, busy = (each() - first for each, first in zip(efforts, before, strict=True))
        assert idle < hang.IDLE * 0.5 < busy
    finally:
        over.set()
        for thread in (waits, spins):
            thread.join()
    assert efforts[1]() >= before[1], "of a thread that has ended too"


def test_kernels_that_are_compiled_late_are_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """On a card nothing else shows that the host has something to do."""
    hooks = SimpleNamespace()
    monkeypatch.setattr(compilations, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=hooks)))
    late = compilations.LateCompilations()
    late.count()
    assert late.seconds == 0.0
    assert not hooks.jit_cache_hook(key="k", fn=None), "or Triton would compile nothing"
    time.sleep(0.05)
    assert late.seconds >= 0.05 and len(late) == 0, "while it is compiled"
    hooks.jit_post_compile_hook(key="k", fn=SimpleNamespace(name="kernel_k"))
    assert "kernel_k was not ready" in caplog.text
    after = late.seconds
    time.sleep(0.02)
    assert late.seconds == after and len(late) == 1


def test_who_reads_and_writes_while_it_starts_does_not_hang(tmp_path: Path) -> None:
    """A disk or a network that is slow takes no time of a core."""
    starting = hang.Starting()
    starting()
    (tmp_path / "download").write_bytes(bytes(hang.MOVED))
    first = starting()
    assert first - time.process_time() > 0.9, "a second that it has waited"
    assert starting() - first < 0.5


def looks(each: hang.Effort, count: int) -> int:
    """How many of so many looks in a row have shown hang."""
    before, shown = each(), 0
    for _ in range(count):
        shown += (now := each()) - before > hang.IDLE * hang.INTERVAL
        before = now
    return shown


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the system says of this one; `computes`: seconds more at every look."""
    told = SimpleNamespace(computes=0.0, seconds=0.0, moved=0, waits=False)

    def seconds(*_: Any) -> float:
        told.seconds += told.computes
        return float(told.seconds)

    clock = SimpleNamespace(process_time=seconds, clock_gettime=seconds, pthread_getcpuclockid=lambda _: 0)
    monkeypatch.setattr(hang, "time", clock)
    monkeypatch.setattr(hang, "_bytes_moved", lambda: told.moved)
    monkeypatch.setattr(hang, "_waits_for_disk", lambda _: told.waits)
    monkeypatch.setattr(hang, "STUCK", 30.0)
    monkeypatch.setattr(hang, "ALONE", 60.0)
    return told


@pytest.mark.parametrize("make", [hang.Starting, lambda: hang.Computing(threading.current_thread())])
def test_a_disk_that_never_answers_is_no_effort_for_ever(system: SimpleNamespace, make: Any) -> None:
    each = make()
    system.waits = True
    assert 28 <= looks(each, 100) <= 30
    system.waits = False
    assert looks(each, 5) == 0
    system.waits = True
    assert looks(each, 20) == 20, "another one"


def test_who_waits_for_a_card_in_a_loop_is_not_busy_for_ever(system: SimpleNamespace) -> None:
    starting = hang.Starting()
    system.computes = 1.0
    assert 58 <= looks(starting, 200) <= 60
    system.moved += hang.MOVED
    assert 60 <= looks(starting, 100) <= 62, "it has come further"
    computing = hang.Computing(threading.current_thread())
    assert looks(computing, 200) == 200, "a step on the CPU takes what it takes"


def test_who_computes_and_reads_in_turns_is_busy(system: SimpleNamespace) -> None:
    starting = hang.Starting()
    system.computes = 1.0
    for _ in range(10):
        assert looks(starting, 50) == 50
        system.moved += hang.MOVED


def test_the_time_of_the_start_is_not_counted_in_steps() -> None:
    async def main() -> None:
        peers = Peers(EngineConfig("m", device="cpu", tensor_parallel_size=2, engine_in_process=True))
        for _ in range(100):
            assert peers._hangs.tick(hang.Pulse(), True, 0, hang.START_LIMIT) is None
        peers.watch_steps(lambda: (True, 0), lambda: 0.0, lambda: hang.LIMIT)
        assert peers._hangs.tick(hang.Pulse(), True, 0, hang.LIMIT) is None
        peers.close()

    asyncio.run(main())


def test_work_ends_with_the_rank_that_it_needs() -> None:
    """And where nobody waits for it any more."""

    async def main() -> None:
        peers = Peers(EngineConfig("m", device="cpu", tensor_parallel_size=2, engine_in_process=True))
        peers._handles[1] = Child(subprocess.Popen(["sleep", "60"]))
        ended = []

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        left = asyncio.create_task(peers.beside(work()))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert len(ended) == 1
        waiting = asyncio.create_task(peers.beside(work()))
        await asyncio.sleep(0.01)
        peers.lose("rank 1 is gone")
        with pytest.raises(RankLost, match="rank 1 is gone"):
            await waiting
        assert len(ended) == 2
        peers.close()
        assert "killed by signal 9" in str(peers._handles[1].wait(0.0))

    asyncio.run(main())


@pytest.mark.parametrize("place", ["vserve.engine.start.process.Prefetch", "vserve.engine.start.process.faults"])
def test_whatever_raises_no_rank_is_left(tiny_model: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """While the ranks start, and when they are ready."""

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr(f"{place}.{'start' if place.endswith('Prefetch') else 'arm_engine'}", fail)

    async def main() -> None:
        client = EngineClient(settings(tiny_model("llama"), tensor_parallel_size=2, engine_in_process=True))
        with pytest.raises(EngineDeadError, match="unforeseen"):
            await client.start()
        assert ranks_of(os.getpid()) == others
        await client.close()

    others = ranks_of(os.getpid())  # the pair's, unless a test has ended them
    asyncio.run(main())


# ---- options ----


def test_every_engine_sees_the_cards_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = EngineConfig("m", data_parallel_size=2, tensor_parallel_size=2)
    assert engine_environments(config) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,2,4,1")
    assert engine_environments(config) == [{"CUDA_VISIBLE_DEVICES": "7,5"}, {"CUDA_VISIBLE_DEVICES": "2,4"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ConfigError, match=r"names 3 cards, and each engine of 2 ranks .* needs 2: name more"):
        engine_environments(config)


def test_what_reads_both_ways_is_not_divided(tiny_model: Any) -> None:
    config = dataclasses.replace(read_folder(tiny_model("llama")), causal=False)
    with pytest.raises(ModelError, match="--tensor-parallel-size 2: LlamaForCausalLM reads texts both ways"):
        check_divides(config, 2)
    assert sizes(config) == [1]


def test_ranks_share_the_threads_and_the_memory() -> None:
    asked = EngineConfig("m", device="cpu", cpu_threads=9, tensor_parallel_size=4, data_parallel_size=2)
    assert share_of_threads(asked).cpu_threads == 2 and asked.num_ranks == 8
    assert share_of_threads(EngineConfig("m", tensor_parallel_size=8, cpu_threads=2)).cpu_threads == 1
    alone = EngineConfig("m")
    assert share_of_threads(alone) is alone


@pytest.mark.parametrize(("own", "expected"), [(3, 3), (0, 8)])
def test_a_rank_of_another_host_has_that_hosts_threads(
    monkeypatch: pytest.MonkeyPatch, own: int, expected: int
) -> None:
    found = []

    def make(config: EngineConfig, *_: Any, **__: Any) -> None:
        found.append(config.cpu_threads)
        raise RuntimeError("seen")

    monkeypatch.setattr("vserve.engine.start.rank.Rank", make)
    monkeypatch.setattr(process, "STAY", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(ours, ToRank).send(Join(dataclasses.asdict(EngineConfig("m", cpu_threads=8)), Seat(1, 2)))
        assert process.run(Channel(theirs, ToRank), own) == 1
    assert found == [expected]


def test_plans_arrive_in_their_order_whatever_the_socket_takes() -> None:
    """Long ones, of which it takes a part, and short ones after them; nobody waits for the reader."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    sent = [bytes([i]) * size for i, size in enumerate((5, 1 << 20, 7, 3 << 20, 1, 9))]

    async def main() -> list[bytes]:
        connection = await Connection.open(ours, bytes, lambda _: None, lambda _: None)
        connection.send(b"first")
        for message in sent:
            connection.send_now(msgspec.msgpack.encode(message))
        channel = Channel(theirs, bytes)
        found = await asyncio.to_thread(lambda: [channel.receive() for _ in range(len(sent) + 1)])
        connection.close()
        with pytest.raises(EOFError):
            await asyncio.to_thread(channel.receive)
        return found

    assert asyncio.run(main()) == [b"first", *sent]
    theirs.close()


def test_prompts_travel_as_they_are() -> None:
    """A plan of the scheduler is what the ranks are sent: nothing of it is lost, and nothing is pickled."""
    row = NewRow(3, 17, array("i", [5, 6]).tobytes(), 2, 0, greedy(logit_bias={5: 1.5}, bad_words=((4, 5),)))
    plan = StepPlan(1, [3], [2], [0], [0], 0, [row], [[BlockWrite(3, 0, [1, 2])]], scored=[0])
    sent = [Join({"model": "m"}, Seat(1, 2, "file:///x")), Execute(plan), Follow((1, 4), ((2, 1),), True), Leave()]
    for message in sent:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToRank) == message
