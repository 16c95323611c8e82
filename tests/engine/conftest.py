"""Runs requests through the real engine loop, in this process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import vserve.engine.planning.settings as settings_module
from vserve.engine.link.messages import EngineStats
from vserve.engine.link.plan import TokenLogprobs
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.step.executor import ThreadExecutor
from vserve.server.client.engine_client import EngineClient

RANKS = int(os.environ.get("VSERVE_TEST_RANKS", "1"))  # of each engine: with 2, these tests run over processes


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str
    stop_reason: int | None
    num_cached_tokens: int
    error: str | None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None


async def collect(client: EngineClient, prompt: list[int], sampling: SamplingParams, **options) -> Answer:
    mailbox = client.submit(prompt, sampling, **options)
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    cached = 0
    prompt_logprobs = None
    while True:
        output = await mailbox.get()
        tokens += output.token_ids
        logprobs += output.logprobs or []
        cached = output.num_cached_tokens if output.num_cached_tokens is not None else cached
        prompt_logprobs = output.prompt_logprobs if output.prompt_logprobs is not None else prompt_logprobs
        if output.finish_reason is not None:
            return Answer(
                tokens, logprobs, output.finish_reason, output.stop_reason, cached, output.error, prompt_logprobs,
                output.embedding,
            )  # fmt: skip


def at_rest(stats: EngineStats) -> bool:
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


@dataclass
class Engine:
    """`waves` of requests; those of a wave run at once, each wave after the last."""

    folder: str

    def run(self, *waves: list[tuple[Any, ...]], **options) -> tuple[list[list[Answer]], EngineStats]:
        """A request: its prompt, SamplingParams, and perhaps more arguments of EngineClient.submit, by name."""

        async def main():
            options.setdefault("cpu_threads", 1)
            options.setdefault("tensor_parallel_size", RANKS)
            client = EngineClient(EngineConfig(str(self.folder), device="cpu", engine_in_process=True, **options))
            await client.start()
            try:
                answers = [
                    await asyncio.gather(
                        *(
                            collect(client, prompt, sampling, **(more[0] if more else {}))
                            for prompt, sampling, *more in wave
                        )
                    )
                    for wave in waves
                ]
                # The last answer is seen a moment before the step that brought it has been accounted for.
                end = time.monotonic() + 10
                while not at_rest(client.stats) and time.monotonic() < end:
                    await asyncio.sleep(0.01)
                return answers, client.stats
            finally:
                await client.close()

        answers, stats = asyncio.run(main())
        assert stats.num_free_blocks == stats.num_blocks, "blocks leaked"
        assert stats.num_running == stats.num_waiting == 0
        return answers, stats


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Steps are launched as on a GPU, so many in flight: on the loop's thread, the next before the last is read."""

    def launched(depth: int) -> None:
        make = ThreadExecutor.__init__

        def init(self, *args, **options):
            make(self, *args, **options)
            self.asynchronous = True

        monkeypatch.setattr(ThreadExecutor, "__init__", init)
        monkeypatch.setattr(settings_module, "steps_in_flight", lambda device: depth)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    return launched


@pytest.fixture(scope="session")
def engine(tiny_model) -> Engine:
    """The real engine over a tiny random Llama in float32."""
    return Engine(tiny_model("llama"))


@pytest.fixture(scope="session")
def mixture_engine(tiny_model) -> Engine:
    """The same over a mixture of experts whose first layer is dense."""
    return Engine(tiny_model("qwen3_moe", norm_topk_prob=True, mlp_only_layers=[0], num_hidden_layers=3))


@pytest.fixture(scope="session")
def windowed_engine(tiny_model) -> Engine:
    """The same over a Gemma 3, most of whose layers see eight tokens."""
    return Engine(tiny_model("gemma3", sliding_window=8))
