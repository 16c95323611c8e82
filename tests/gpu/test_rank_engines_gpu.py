"""One model on two cards: as right as on one, the same bits every time, and cards that are usable after a rank died."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.engine.link.messages import EngineStats, RequestOutput
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.server.client.engine_client import EngineClient
from vserve.server.client.mailbox import EngineDeadError
from vserve.server.client.process import EngineProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

PROMPTS = [[(7 * i * i + 3 * j * j + j) % 290 + 5 for j in range(length)] for i, length in enumerate((3, 17, 90, 400))]
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
CACHE = 1 << 28


def settings(folder: Path, size: int, **options: Any) -> EngineConfig:
    return EngineConfig(str(folder), tensor_parallel_size=size, kv_cache_memory_bytes=CACHE, **options)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logprobs": 2, **options})


async def answer(client: EngineClient, prompt: list[int], sampling: SamplingParams) -> RequestOutput:
    """All of it in one."""
    mailbox = client.submit(prompt, sampling)
    tokens: list[int] = []
    logprobs: list[Any] = []
    while True:
        output = await mailbox.get()
        tokens += output.token_ids
        logprobs += output.logprobs or []
        if output.finish_reason is not None:
            assert output.error is None
            return RequestOutput(output.id, tokens, output.finish_reason, logprobs=logprobs)


def requests() -> list[tuple[list[int], SamplingParams]]:
    sampled = [(prompt, greedy(temperature=0.8, top_p=0.95, seed=i)) for i, prompt in enumerate(PROMPTS)]
    return [*((prompt, greedy()) for prompt in PROMPTS), *sampled, (PROMPTS[0], greedy(repetition_penalty=1.2))]


def run(config: EngineConfig, times: int = 1) -> tuple[list[list[RequestOutput]], EngineStats]:
    """One request after the other, and then all at once, `times` over; in processes, as it is served."""

    async def main() -> tuple[list[list[RequestOutput]], EngineStats]:
        client = EngineClient(config)
        try:
            await client.start()
            found = []
            for _ in range(times):
                found.append([await answer(client, *request) for request in requests()])
            await asyncio.gather(*(answer(client, *request) for request in requests() * 8))
            return found, client.stats
        finally:
            await client.close()

    return asyncio.run(main())


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "launched"])
def test_two_cards_answer_as_one_does(tiny_model: Any, eager: bool) -> None:
    """In float32: what the order of sums changes decides nothing."""
    folder = tiny_model("llama", **SHAPE)
    (one,), _ = run(settings(folder, 1, dtype="float32", enforce_eager=eager))
    (two,), stats = run(settings(folder, 2, dtype="float32", enforce_eager=eager))
    assert [output.token_ids for output in two] == [output.token_ids for output in one]
    assert stats.num_graph_misses == stats.num_late_compilations == 0


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "launched"])
def test_two_stages_answer_as_one_card_does(tiny_model: Any, eager: bool) -> None:
    folder = tiny_model("llama", **SHAPE)
    (one,), _ = run(settings(folder, 1, dtype="float32", enforce_eager=eager))
    (two,), stats = run(settings(folder, 1, pipeline_parallel_size=2, dtype="float32", enforce_eager=eager))
    assert [output.token_ids for output in two] == [output.token_ids for output in one]
    assert stats.num_graph_misses == stats.num_late_compilations == 0


def test_a_mixture_on_two_cards(tiny_model: Any) -> None:
    folder = tiny_model("qwen3_moe", norm_topk_prob=True, mlp_only_layers=[0], num_hidden_layers=3, num_experts=6)
    (one,), _ = run(settings(folder, 1, dtype="float32"))
    for options in ({}, {"enable_expert_parallel": True}):
        (two,), _ = run(settings(folder, 2, dtype="float32", **options))
        assert [output.token_ids for output in two] == [output.token_ids for output in one]


def test_the_same_bits_every_time(tiny_model: Any) -> None:
    """Of one start and of another, in bfloat16. The second time a prompt is read from the cache: the third is alike."""
    folder = tiny_model("llama", **SHAPE)
    config = settings(folder, 2, dtype="bfloat16", enable_prefix_caching=False)
    (first, again), _ = run(config, times=2)
    (other,), _ = run(config)
    for left, *others in zip(first, again, other, strict=True):
        for right in others:
            assert (right.token_ids, right.logprobs) == (left.token_ids, left.logprobs)


def ranks_of(engine: int) -> list[int]:
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return [int(pid) for pid in children if "engine.start.rank_process" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_leaves_the_cards_usable(tiny_model: Any, number: signal.Signals) -> None:
    """In the middle of graphs, whose other half waits on its card for what never comes."""
    folder = tiny_model("llama", **SHAPE)
    free = [torch.cuda.mem_get_info(card)[0] for card in (0, 1)]

    async def main() -> None:
        client = EngineClient(settings(folder, 2), restarts=1)
        await client.start()
        try:
            expected = await answer(client, PROMPTS[1], greedy())
            long = [asyncio.create_task(answer(client, PROMPTS[0], greedy(max_tokens=400))) for _ in range(64)]
            await asyncio.sleep(0.2)
            assert isinstance(client._engine, EngineProcess)
            (other,) = ranks_of(client._engine.pid)
            os.kill(other, number)
            begun = time.monotonic()
            found = await asyncio.gather(*long, return_exceptions=True)
            assert time.monotonic() - begun < 10
            causes = {str(error) for error in found}
            assert all(isinstance(error, EngineDeadError) for error in found) and len(causes) == 1
            print(causes, f"{time.monotonic() - begun:.1f} s")
            assert "rank 1 of 2 (cuda:1)" in causes.pop()
            while not client.ready:
                await asyncio.sleep(0.05)
            print(f"ready again after {time.monotonic() - begun:.1f} s")
            assert (await answer(client, PROMPTS[1], greedy())).token_ids == expected.token_ids
        finally:
            await client.close()

    asyncio.run(main())
    assert [torch.cuda.mem_get_info(card)[0] for card in (0, 1)] == pytest.approx(free, rel=0.02)
