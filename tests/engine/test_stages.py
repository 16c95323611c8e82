"""Engines whose model is cut into stages, beside one that is whole: the same answers; and what ends them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from vserve.engine.errors import ConfigError
from vserve.engine.grammar.grammar import pack, prepare
from vserve.engine.link.messages import AddGrammar
from vserve.engine.link.plan import StepPlan
from vserve.engine.link.sampling_params import Pooling, SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.parallel.pipeline import Ring, Stage
from vserve.engine.ranks.hang import HangWatch
from vserve.engine.ranks.messages import Pulse
from vserve.engine.ranks.peers import share_of_threads
from vserve.engine.step.relay import Awaited, Relay
from vserve.server.client.engine_client import EngineClient
from vserve.server.client.mailbox import EngineDeadError
from vserve.server.client.process import EngineProcess
from vserve.server.client.replicas import engine_environments

from .conftest import Answer, at_rest, collect

PROMPTS = [[(7 * i * i + 3 * j * j + j) % 290 + 5 for j in range(length)] for i, length in enumerate((3, 17, 40, 90))]
BLOCKS = 30  # of 16 tokens: three long requests do not fit at once
NGRAMS = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3})
# Name → (family, keys of config.json, sizes of engines beside the whole one: ranks of a stage × stages, and whether
# they have drafts, of which those between the first and the last must know as well)
MODELS: dict[str, tuple[str, dict[str, Any], list[tuple[int, int, bool]]]] = {
    "tied": ("llama", {"num_hidden_layers": 4, "tie_word_embeddings": True}, [(1, 2, False), (1, 3, True)]),
    "windows and experts": ("gpt_oss", {"num_local_experts": 4}, [(2, 2, False), (1, 2, True)]),
    "plain": ("llama", {"num_hidden_layers": 4}, [(1, 3, False), (2, 2, True)]),
}


def settings(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        str(folder), device="cpu", cpu_threads=1, max_model_len=256, max_num_batched_tokens=64, **options
    )  # fmt: skip


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **options})


@dataclass
class Engines:
    """Of one model, on one event loop: the first is whole."""

    runner: asyncio.Runner
    clients: list[EngineClient]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, 120))

    def answers(self, requests: list[tuple[list[int], SamplingParams]]) -> list[list[Answer]]:
        """Of each engine; all requests at once."""

        async def of(client: EngineClient) -> list[Answer]:
            found = await asyncio.gather(*(collect(client, *request) for request in requests))
            while not at_rest(client.stats):
                await asyncio.sleep(0.01)
            return list(found)

        async def main() -> list[list[Answer]]:
            return list(await asyncio.gather(*map(of, self.clients)))

        found: list[list[Answer]] = self.run(main())
        assert not [answer.error for answers in found for answer in answers if answer.error]
        return found

    def same(self, requests: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
        """The answers, which all engines give."""
        whole, *others = self.answers(requests)
        for answers in others:
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in whole]
            assert [answer.finish_reason for answer in answers] == [answer.finish_reason for answer in whole]
        return others[-1]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("tied", "windows and experts")]
if os.environ.get("VSERVE_TEST_LONG"):  # seven processes: a minute
    SLOW.append(pytest.param("plain", marks=pytest.mark.slow))


@pytest.fixture(scope="module", params=SLOW)
def engines(request: pytest.FixtureRequest, tiny_model: Any) -> Iterator[Engines]:
    family, keys, sizes = MODELS[request.param]
    folder = tiny_model(family, **keys)
    blocks = BLOCKS * (2 if "windows" in request.param else 1)
    with asyncio.Runner() as runner:
        clients = [EngineClient(settings(folder, engine_in_process=True, num_gpu_blocks_override=blocks))]
        for tensor, stages, drafts in sizes:
            size: dict[str, Any] = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
            size |= {"speculative_config": NGRAMS} if drafts else {}
            clients.append(EngineClient(settings(folder, num_gpu_blocks_override=blocks, **size)))
        made = Engines(runner, clients)

        async def start() -> None:
            await asyncio.gather(*(client.start() for client in clients))

        made.run(start())
        try:
            yield made
        finally:
            for client in clients:
                made.run(client.close())


def test_greedy_and_in_chunks(engines: Engines) -> None:
    answers = engines.same([(prompt, greedy()) for prompt in PROMPTS] + [(PROMPTS[3] * 2, greedy())])
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)


def test_alone(engines: Engines) -> None:
    """A plan waits on the device for the token of the one before."""
    engines.same([(PROMPTS[1], greedy(max_tokens=30))])


def test_drafts_hold(engines: Engines) -> None:
    """Over several tokens a plan: what repeats itself comes in fewer of them."""
    drafting = [client for client in engines.clients if client.config.speculative_config]
    before = [(client.stats.num_steps, sum(client.stats.num_accepted_tokens)) for client in drafting]
    engines.same([(prompt, greedy(max_tokens=60, allowed_token_ids=(7, 8))) for prompt in PROMPTS[:2]])
    for client, (steps, accepted) in zip(drafting, before, strict=True):
        assert sum(client.stats.num_accepted_tokens) - accepted > 60
        assert client.stats.num_steps - steps < 100, "plans of two requests that take 60 each without drafts"
    assert drafting


def test_sampled(engines: Engines) -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"top_k": 20, "top_p": 0.9}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"min_p": 0.02, "logit_bias": {7: 3.0}}, {"bad_words": ((5,), (9, 10))}, {"min_tokens": 5},
    ]  # fmt: skip
    engines.same([(PROMPTS[i % 4], greedy(temperature=0.9, seed=i, **kind)) for i, kind in enumerate(kinds * 2)])


def test_stop_tokens(engines: Engines) -> None:
    """Seen by the host some plans late: what was computed beyond them is thrown away."""
    first = engines.same([(prompt, greedy(max_tokens=30)) for prompt in PROMPTS])
    stops = [answer.tokens[7 + i] for i, answer in enumerate(first)]
    answers = engines.same(
        [(p, greedy(max_tokens=30, stop_token_ids=(stop,))) for p, stop in zip(PROMPTS, stops, strict=True)]
    )
    for answer, full, stop in zip(answers, first, stops, strict=True):
        assert answer.tokens == full.tokens[: full.tokens.index(stop) + 1] and answer.finish_reason == "stop"


def test_log_probabilities(engines: Engines) -> None:
    whole, *others = engines.answers([(prompt, greedy(logprobs=3, prompt_logprobs=2)) for prompt in PROMPTS])
    for answers in others:
        for alone, staged in zip(whole, answers, strict=True):
            assert staged.tokens == alone.tokens and staged.prompt_logprobs and alone.prompt_logprobs
            pairs = zip(alone.logprobs + alone.prompt_logprobs, staged.logprobs + staged.prompt_logprobs, strict=True)
            for left, right in pairs:
                assert right.top_ids == left.top_ids and right.rank == left.rank
                assert right.top_logprobs == pytest.approx(left.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_embeddings(engines: Engines, kind: str) -> None:
    sampling = SamplingParams(max_tokens=1, pooling=Pooling(kind))
    whole, *others = engines.answers([(prompt, sampling) for prompt in PROMPTS])
    for answers in others:
        for alone, staged in zip(whole, answers, strict=True):
            assert alone.embedding and staged.embedding
            left, right = (np.frombuffer(vector, np.float32) for vector in (alone.embedding, staged.embedding))
            assert np.abs(left).max() > 0.01 and np.allclose(left, right, atol=1e-4)


def test_prefix_hits(engines: Engines) -> None:
    prompt = [token + 1 for token in PROMPTS[3]]
    (cold,) = engines.same([(prompt, greedy())])
    (warm,) = engines.same([(prompt, greedy())])
    assert cold.num_cached_tokens == 0 < warm.num_cached_tokens and warm.tokens == cold.tokens


def test_preemption(engines: Engines) -> None:
    before = [client.stats.num_preemptions for client in engines.clients]
    engines.same([([9 + i, *PROMPTS[3]], greedy(max_tokens=100)) for i in range(5)])
    assert all(client.stats.num_preemptions > count for client, count in zip(engines.clients, before, strict=True))


def test_abort(engines: Engines) -> None:
    """Whoever leaves in the middle of steps takes nobody along, leaves no block, and no token in the next one's row."""
    alone = engines.answers([(PROMPTS[1], greedy(max_tokens=60))])[0][0].tokens

    async def main(client: EngineClient) -> list[list[int]]:
        staying = asyncio.create_task(collect(client, PROMPTS[1], greedy(max_tokens=60)))
        for _ in range(3):
            leaving = [client.submit(PROMPTS[2], greedy(max_tokens=150)) for _ in range(3)]
            for mailbox in leaving:
                await mailbox.get()
                client.abort([mailbox])
        late = await collect(client, PROMPTS[1], greedy(max_tokens=60))
        found = [(await staying).tokens, late.tokens]
        while not at_rest(client.stats):
            await asyncio.sleep(0.01)
        return found

    for client in engines.clients[1:]:
        assert engines.run(main(client)) == [alone, alone]


def test_grammars(engines: Engines) -> None:
    """Masks are made where tokens are drawn; the other stages are told of rows that had to wait for one."""
    vocabulary = prepare(pack([b""] * 10 + [b"%d " % id for id in range(10, 300)], (2,)))
    source = b'%llguidance {"no_forcing": true}\nstart: /((1[0-9]|2[0-7]|83|150) ){6}/'
    for client in engines.clients:
        client.send(vocabulary)
        client.send(AddGrammar("numbers", "llguidance", source))
    bound = [
        (prompt, greedy(max_tokens=20, ignore_eos=False, grammar="numbers", temperature=heat, seed=3))
        for prompt, heat in zip(PROMPTS, (0.0, 1.0, 1.5, 0.0), strict=True)
    ]
    answers = engines.same([*bound, *((prompt, greedy()) for prompt in PROMPTS)])
    for answer in answers[: len(bound)]:
        assert answer.finish_reason == "stop" and len(answer.tokens) == 7
        assert set(answer.tokens[:6]) <= {*range(10, 28), 83, 150} and answer.tokens[6] == 2


def test_nothing_is_left_on_its_way(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At rest, the first stage has taken the tokens that no plan needs: what is sent and not received for minutes, NCCL
    takes for a hang."""
    rings: list[Ring] = []
    send = Ring.send

    def sends(self: Ring, *args: Any, **options: Any) -> None:
        rings.append(self)
        send(self, *args, **options)

    monkeypatch.setattr(Ring, "send", sends)

    async def main() -> None:
        client = EngineClient(settings(tiny_model("llama"), engine_in_process=True, pipeline_parallel_size=2))
        await client.start()
        try:
            await collect(client, PROMPTS[0], greedy())
            assert rings[-1]._sends
            for work, _ in rings[-1]._sends:
                await asyncio.to_thread(work.wait, timedelta(seconds=20))  # raises where nobody receives it
        finally:
            await client.close()

    asyncio.run(main())


# ---- what ends an engine ----


def test_a_stage_that_is_lost_ends_its_engine(engines: Engines, awake: Callable[[], float]) -> None:
    """Killed, and of the next engine, stopped; the last of the tests with these."""
    ends = [(signal.SIGKILL, "was killed by signal 9 (SIGKILL)"), (signal.SIGSTOP, "is stopped (SIGSTOP, a debugger)")]

    async def lose(client: EngineClient, end: signal.Signals) -> str:
        await collect(client, [5, 6, 7], greedy())
        assert isinstance(client._engine, EngineProcess)
        victim = rank_of(client._engine.pid, client.config.world_size - 1)
        answer = asyncio.create_task(collect(client, [5, 6, 7], greedy(max_tokens=250)))
        await asyncio.sleep(0.05)
        begun = awake()
        os.kill(victim, end)
        with pytest.raises(EngineDeadError) as raised:
            await asyncio.wait_for(answer, 30)
        assert awake() - begun < 12
        return str(raised.value)

    async def main() -> list[str]:
        return await asyncio.gather(
            *(lose(client, end) for client, (end, _) in zip(engines.clients[1:], ends, strict=False))
        )

    for client, (_, words), found in zip(engines.clients[1:], ends, engines.run(main()), strict=False):
        size = client.config.world_size
        assert f"rank {size - 1} of {size} (cpu) {words}" in found, found


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_stage_that_hangs_is_named(rank: int) -> None:
    """Of two ranks each: those behind it wait for the same step, those before it are ahead, or wait for tokens. The
    first stage has fewer layers, and so fewer sums."""
    stages = [(other // 2 - 1) % 2 for other in range(4)]
    watch = HangWatch(4, 2)
    pulses = [Pulse(9000 if stage else 5000, 1.0, 20 if stage >= stages[rank] else 23) for stage in stages]
    pulses[rank] = Pulse(pulses[rank].collectives - 1, 1.0, 20)  # who shares its stage waits in a sum
    found = None
    for _ in range(12):
        for other in range(1, 4):
            watch.heard(other, pulses[other])
        found = found or watch.tick(pulses[0], True, 5, 5.0)
    assert found is not None and found[0] == rank


class Nowhere:
    """A ring whose transfers are over at once."""

    def send(self, x: torch.Tensor) -> None:
        pass

    def receive(self, x: torch.Tensor) -> None:
        x.zero_()


@pytest.mark.parametrize("drafts", [False, True])
def test_all_stages_count_the_same_steps(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a step samples or not, and whoever is sent its tokens: who has counted less is behind."""
    counted = []
    for index in range(3):
        monkeypatch.setattr(Ring, "half_steps", 0)
        relay = Relay(Stage(index, 3, None, cast(Ring, Nowhere())), 8, torch.float32, torch.device("cpu"), drafts)
        for step in range(6):
            sampled = [0] if step % 2 else []  # the others are chunks of a prompt
            plan = StepPlan(step, [0], [4], [0], sampled, 0, [], [])
            list(relay.arrived(plan))
            relay.take_in(4)
            if index == 2:
                relay.hand_round(torch.zeros(len(sampled), dtype=torch.int32))
                continue
            relay.hand_over(4)
            if relay.awaits and sampled:
                relay.expect(Awaited(plan.of_samples(), (), ()))
        counted.append(Ring.half_steps)
    assert counted == [12, 12, 12]


def rank_of(engine: int, rank: int) -> int:
    """The process of a rank of an engine's."""
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    wanted = f"--rank\0{rank}\0"
    return next(int(pid) for pid in children if wanted in Path(f"/proc/{pid}/cmdline").read_text())


# ---- options ----


def test_options_that_do_not_go_together_are_refused() -> None:
    for options, words in (
        ({"pipeline_layer_partition": "3,x"}, "--pipeline-layer-partition is '3,x': it must be the number of layers"),
        ({"pipeline_layer_partition": "3,0"}, "--pipeline-layer-partition is '3,0': it must be the number of layers"),
        ({"pipeline_layer_partition": "3,1"}, "is of 2 stages, and --pipeline-parallel-size is 1"),
    ):
        with pytest.raises(ConfigError) as refused:
            EngineConfig("m", **options)  # type: ignore[arg-type]
        assert words in str(refused.value) and "\n" not in str(refused.value)


def test_ranks_are_those_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = EngineConfig(
        "m", device="cuda", cpu_threads=8, data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2
    )
    assert config.num_ranks == 8 and share_of_threads(config).cpu_threads == 2
    assert engine_environments(config) == [{"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ConfigError, match=r"4 ranks \(--tensor-parallel-size 2 --pipeline-parallel-size 2\) needs 4"):
        engine_environments(config)
