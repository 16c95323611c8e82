"""Offline embeddings: the engine has enough to do, and not everything at once."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from vserve.engine.link.messages import RequestOutput
from vserve.engine.link.sampling_params import SamplingParams
from vserve.server.client.mailbox import Mailbox
from vserve.server.generation.choice import Prompt
from vserve.server.offline.embed_all import embed_all, embedded
from vserve.server.offline.patient import Call

COUNTS: Any = SimpleNamespace(
    generation_tokens=0, first_output=lambda *_: None, more_output=lambda *_: None, finished=lambda *_: None
)


class Engine:
    """Answers one after the other."""

    ready = True

    def __init__(self, num_engines: int = 1) -> None:
        self.engines = [self] * num_engines
        self.info = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64)
        self.waiting: list[tuple[Mailbox, int]] = []
        self.most = self.most_tokens = 0
        self.aborted: list[Mailbox] = []

    def submit_choices(self, n: int, token_ids: list[int], sampling: SamplingParams, **options: Any) -> list[Mailbox]:
        self.waiting.append((Mailbox(token_ids[0], 0.0), len(token_ids)))
        self.most = max(self.most, len(self.waiting))
        self.most_tokens = max(self.most_tokens, sum(length for _, length in self.waiting))
        return [self.waiting[-1][0]]

    def abort(self, mailboxes: Any) -> None:
        self.aborted += mailboxes

    async def run(self, fails: int | None = None) -> None:
        while True:
            await asyncio.sleep(0)
            if self.waiting:
                mailbox, _ = self.waiting.pop(0)
                bad = mailbox.id == fails
                vector = None if bad else struct.pack("<f", mailbox.id)
                mailbox.put(RequestOutput(mailbox.id, [], "error" if bad else "stop", embedding=vector, error="NaN"))


def embed(engine: Engine, lengths: list[int], fails: int | None = None) -> list[float]:
    async def main() -> list[float]:
        running = asyncio.create_task(engine.run(fails))
        prompts = [Prompt([i] * length, SamplingParams(max_tokens=1)) for i, length in enumerate(lengths)]
        progress: Any = SimpleNamespace(finished=lambda num_prompt, num_output: None)
        try:
            call: Any = Call(engine, None, COUNTS, None)  # type: ignore[arg-type]
            outputs = await embed_all(call, prompts, [*map(str, range(len(lengths)))], progress, embedded)
        finally:
            running.cancel()
        return [output.outputs.embedding[0] for output in outputs]

    return asyncio.run(main())


@pytest.mark.parametrize("length, most", [(1, 32), (7, 32), (100, 3), (5000, 1)])
def test_a_few_steps_are_with_the_engine_and_no_more(length: int, most: int) -> None:
    engine = Engine()
    assert embed(engine, [length] * 200) == list(range(200))
    assert engine.most == most and engine.most_tokens < 4 * 64 + length


def test_several_engines_have_enough_to_do() -> None:
    engine = Engine(num_engines=2)
    assert embed(engine, [1] * 200) == list(range(200))
    assert engine.most == 2 * 32


def test_one_that_fails_ends_the_others() -> None:
    engine = Engine()
    with pytest.raises(RuntimeError, match="request 50 failed: NaN"):
        embed(engine, [1] * 200, fails=50)
    assert 0 < len(engine.aborted) <= 32
