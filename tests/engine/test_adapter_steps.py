"""Steps in which adapters meet what is not theirs: prompts that are scored, and steps that have failed before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from vserve.engine.config import EngineConfig
from vserve.engine.messages import LoadAdapter
from vserve.engine.request import SamplingParams
from vserve.engine.runner import ModelRunner
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
async def running(base: Path, adapter: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineConfig(
        str(base), device="cpu", engine_in_process=True, cpu_threads=1, enable_lora=True, max_model_len=96,
        max_num_batched_tokens=64, max_num_seqs=8, block_size=4,
    ))  # fmt: skip
    await client.start()
    try:
        assert (await client.load_adapter(LoadAdapter(ADAPTER, str(adapter)))).error is None
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
