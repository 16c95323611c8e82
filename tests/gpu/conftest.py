"""The engine in the test process, again and again: nothing of one, on the card or off it, is left for the next."""

from __future__ import annotations

import asyncio
import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.engine.link.media import MediaItem
from vserve.engine.link.messages import EngineStats, LoadAdapter, RequestOutput
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.server.client.engine_client import EngineClient

GIB = 1 << 30
Requests = Sequence[tuple[Any, ...]]  # prompt, how to go on, and perhaps the prompt's pictures
Generate = Callable[..., tuple[list[list[RequestOutput]], EngineStats]]


def collect() -> None:
    """The engine's objects form cycles, as do those of a transformers model, and both hold gigabytes of the card."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def empty_card() -> Iterator[None]:
    """After each test: a server that the next one starts plans with the memory that it finds."""
    yield
    collect()


async def _answer(
    client: EngineClient, prompt: list[int], sampling: SamplingParams, media: tuple[MediaItem, ...] = ()
) -> list[RequestOutput]:
    """No closure: the frame of one keeps, even when it is cleared, what it closes over."""
    mailbox = client.submit(prompt, sampling, media=media)
    outputs = [await mailbox.get()]
    while outputs[-1].finish_reason is None:
        outputs.append(await mailbox.get())
    return outputs


async def _generate(
    config: EngineConfig, requests: Requests, adapters: Sequence[Path]
) -> tuple[list[list[RequestOutput]], EngineStats]:
    client = EngineClient(config)
    try:
        await client.start()
        for id, folder in enumerate(adapters, 1):
            loaded = await client.load_adapter(LoadAdapter(id, str(folder)))
            assert loaded.error is None, loaded.error
        # All are waited for: asyncio logs exceptions that nobody has seen, and pytest keeps what is logged.
        answers = await asyncio.gather(*(_answer(client, *request) for request in requests), return_exceptions=True)
        completed = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            completed.append(answer)
        return completed, client.stats
    finally:
        await client.close()


@pytest.fixture(scope="session")
def generate() -> Generate:
    """generate(folder, requests, **EngineConfig options) → (the outputs of each request, the engine's statistics).

    All requests at once, through the real engine loop in this process. The cache has a size of its own: as a share of
    the card it would depend on what others hold there, an engine that is not gone yet included. `adapters`: folders,
    whose ids are 1 and so on.
    """

    def run(
        folder: Path, requests: Requests, adapters: Sequence[Path] = (), **options: Any
    ) -> tuple[list[list[RequestOutput]], EngineStats]:
        collect()  # what this test itself has used, as a model to compare with
        config = EngineConfig(str(folder), engine_in_process=True, kv_cache_memory_bytes=GIB, **options)
        try:
            return asyncio.run(_generate(config, requests, adapters))
        except BaseException as error:
            # pytest keeps the traceback for its report: its frames must not keep the engine.
            seen: BaseException | None = error
            while seen is not None:
                traceback.clear_frames(seen.__traceback__)
                seen = seen.__context__
            raise
        finally:
            collect()

    return run


@pytest.fixture(scope="session")
def model_folder(load_module: Callable[[Path], Any]) -> Any:
    return load_module(Path(__file__).parents[2] / "tools" / "gpu" / "model_folder.py")
