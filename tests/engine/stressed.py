"""Engines under stress: each answer is compared with the request's alone, and the books are looked at afterwards."""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vserve.engine.planning.settings as settings_module
from vserve.engine.grammar.grammar import Vocabulary, pack, prepare
from vserve.engine.grammar.guide import Guide
from vserve.engine.link.messages import AddGrammar, LoadAdapter
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.schedule.scheduler import Scheduler
from vserve.engine.start.loop import EngineLoop
from vserve.engine.step.executor import ThreadExecutor
from vserve.engine.step.runner import ModelRunner
from vserve.server.client.engine_client import EngineClient
from vserve.server.client.mailbox import EngineDeadError, Mailbox
from vserve.server.grammar.compile import compile

from .conftest import Answer, at_rest
from .injector import MESSAGE, Injector
from .test_draft_grammars import END, TOKENS, constraints
from .workload import LONGEST, Asked, Sent, Workload

MOST_HELD = 4  # guides of requests that have ended: threads that made masks, and the loop, remember their last ones
DEAD = "dead"
PATIENCE = 300.0  # seconds for a wave: it takes a few


@functools.cache
def grammars() -> list[AddGrammar]:
    vocabulary = Vocabulary(prepare(pack(TOKENS, (END,))))
    return [AddGrammar(name, *compile(constraint, vocabulary)) for name, constraint in constraints().items()]


def tell_grammars(client: EngineClient) -> None:
    client.send(prepare(pack(TOKENS, (END,))))
    for grammar in grammars():
        client.send(grammar)


async def started(client: EngineClient, adapters: dict[int, Path]) -> EngineClient:
    await client.start()
    tell_grammars(client)
    for id, folder in adapters.items():
        answer = await client.load_adapter(LoadAdapter(id, str(folder)))
        assert answer.error is None, answer.error
    return client


async def read(mailbox: Mailbox, client: EngineClient, leaves: int | None = None) -> Answer:
    """All of an answer; what there was of it when it left has the finish reason "abort", and that of an engine that
    died DEAD."""
    answer = Answer([], [], "", None, 0, None)
    while not answer.finish_reason:
        if leaves is not None and len(answer.tokens) >= leaves:
            client.abort([mailbox])
            answer.finish_reason = "abort"
            break
        try:
            output = await mailbox.get()
        except EngineDeadError as error:
            answer.finish_reason, answer.error = DEAD, str(error)
            break
        answer.tokens += output.token_ids
        answer.logprobs += output.logprobs or []
        answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
        answer.embedding = output.embedding
        if output.finish_reason is not None:
            answer.finish_reason, answer.stop_reason, answer.error = (
                output.finish_reason, output.stop_reason, output.error,
            )  # fmt: skip
    return answer


class Alone:
    """A plain engine of one rank that has each request to itself: no drafts, nothing cached, prompts in one piece."""

    def __init__(self, folder: Path, adapters: dict[int, Path]) -> None:
        self._adapters = adapters
        self._client = EngineClient(EngineConfig(
            str(folder), device="cpu", engine_in_process=True, cpu_threads=1, max_model_len=LONGEST, max_num_seqs=1,
            max_num_batched_tokens=LONGEST, enable_prefix_caching=False, enable_lora=True, max_loras=len(adapters),
        ))  # fmt: skip
        self._known: dict[tuple[tuple[int, ...], SamplingParams], Answer] = {}

    async def start(self) -> None:
        await started(self._client, self._adapters)

    async def close(self) -> None:
        await self._client.close()

    async def answer(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Answer:
        key = repr((prompt, sampling))
        if key not in self._known:
            self._known[key] = await read(self._client.submit(prompt, sampling), self._client)
        return self._known[key]


def is_raised(answer: Answer) -> bool:
    """It failed with a step that an Injector has ended."""
    return answer.error is not None and MESSAGE in answer.error


def compare(answer: Answer, alone: Answer) -> None:
    """What has come of it must be the same; all must have come, unless it left or failed on the way."""
    if answer.finish_reason in ("abort", DEAD) or is_raised(answer):
        assert answer.tokens == alone.tokens[: len(answer.tokens)]
        return
    assert answer.error == alone.error
    assert (answer.tokens, answer.finish_reason) == (alone.tokens, alone.finish_reason)
    assert answer.stop_reason == alone.stop_reason
    for ours, theirs in ((answer.logprobs, alone.logprobs), (answer.prompt_logprobs, alone.prompt_logprobs)):
        ours, theirs = ours or [], theirs or []
        assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=5e-4)
        for one, other in zip(ours, theirs, strict=True):
            # Of a step, every row gets as many as the one that asks for most.
            assert one.top_logprobs[: len(other.top_logprobs)] == pytest.approx(other.top_logprobs, abs=5e-4)
    if alone.embedding is not None:
        left, right = (np.frombuffer(vector or b"", np.float32) for vector in (answer.embedding, alone.embedding))
        assert left.shape == right.shape and np.allclose(left, right, atol=1e-4)


class Stressed:
    """The engine of a workload. In this process, whom a failed step may end is noted, and the books are looked at; one
    in a process of its own starts again, once, after its death."""

    def __init__(
        self, folder: Path, workload: Workload, adapters: dict[int, Path], environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """environment: of its process, and not of the one that replaces it; None: it is in this one."""
        self.workload, self._environment = workload, environment
        self._adapters = adapters if workload.has_adapters else {}
        config = EngineConfig(
            str(folder), device="cpu", engine_in_process=environment is None, cpu_threads=1, **workload.options,
            **options,
        )  # fmt: skip
        self.client = EngineClient(config, restarts=1, environment={} if environment is None else environment)
        self.loop: EngineLoop | None = None  # of one in this process
        self.failed: set[int] = set()  # ids of the requests of steps that failed
        self._may_fail: set[int] = set()  # of those whose adapter these steps were to copy into its slot
        self._unbalanced: list[Exception] = []
        self._guides: weakref.WeakSet[Guide] = weakref.WeakSet()
        self._is_asked = False  # it, and not Alone
        self._left = AsyncExitStack()

    async def __aenter__(self) -> Stressed:
        patch = self._left.enter_context(pytest.MonkeyPatch.context())
        self._watch(patch)
        self._left.push_async_callback(self.client.close)
        await started(self.client, self._adapters)
        if self._environment is not None:
            self._environment.clear()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._left.aclose()

    def overlap(self, depth: int) -> None:
        """Before it starts: steps are launched as on a card, so many in flight."""
        patch = self._left.enter_context(pytest.MonkeyPatch.context())
        make = ThreadExecutor.__init__

        def init(executor: ThreadExecutor, *arguments: Any, **options: Any) -> None:
            make(executor, *arguments, **options)
            executor.asynchronous = True

        patch.setattr(ThreadExecutor, "__init__", init)
        patch.setattr(settings_module, "steps_in_flight", lambda device: depth)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)

    async def run(self, wave: list[Sent], alone: Alone, injector: Injector | None = None) -> int:
        """Returns how many answers were whole."""
        if injector is not None:
            injector.arm(self.workload.rng)
        self.failed.clear(), self._may_fail.clear()
        self._is_asked = True
        answers = await asyncio.wait_for(asyncio.gather(*map(self._ask, wave)), PATIENCE)
        self._is_asked = False
        if injector is not None:
            injector.disarm()
        if any(answer.finish_reason == DEAD for found in answers for _, _, answer in found):
            await self._start_again()
        await self._rest()
        num_whole = 0
        for sent, found in zip(wave, answers, strict=True):
            for sampling, id, answer in found:
                wanted = await alone.answer(sent.asked.prompt, sampling)
                try:
                    self._check_failure(id, answer)
                    compare(answer, wanted)
                except AssertionError as error:
                    error.add_note(f"request {id}: {sent.asked}\nits answer: {answer}\nalone: {wanted}")
                    raise
                num_whole += answer.finish_reason in ("stop", "length")
        self.check_books()
        return num_whole

    async def _ask(self, sent: Sent) -> list[tuple[SamplingParams, int, Answer]]:
        """Who fails with a step asks once more, at once: what that step has left behind must not be found."""
        await asyncio.sleep(sent.delay)
        asked: Asked = sent.asked
        answers = await self._read(asked, sent.leaves)
        if any(is_raised(answer) for _, _, answer in answers):
            answers += await self._read(asked, None)
        return answers

    async def _read(self, asked: Asked, leaves: int | None) -> list[tuple[SamplingParams, int, Answer]]:
        samplings = asked.choices()
        try:
            boxes = self.client.submit_choices(
                asked.n, asked.prompt, asked.sampling, priority=asked.priority, cache_salt=asked.salt
            )
        except EngineDeadError as error:
            return [(sampling, 0, Answer([], [], DEAD, None, 0, str(error))) for sampling in samplings]
        limits = [leaves, *[None] * (asked.n - 1)]  # the others stay
        answers = await asyncio.gather(*map(read, boxes, [self.client] * asked.n, limits))
        return list(zip(samplings, [box.id for box in boxes], answers, strict=True))

    async def _rest(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while not self._is_idle():
                await asyncio.sleep(0.005)

    def _is_idle(self) -> bool:
        if self.loop is None:
            return at_rest(self.client.stats)
        scheduler = self.loop.scheduler
        return not scheduler.has_unfinished() and not scheduler.in_flight and not self.loop._inbox

    async def _start_again(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while not self.client.ready:
                assert self.client.dead is None, self.client.dead
                await asyncio.sleep(0.02)
        tell_grammars(self.client)

    def _check_failure(self, id: int, answer: Answer) -> None:
        if is_raised(answer):
            assert id in self.failed | self._may_fail, "it failed with a step that it was not in"
        elif id in self.failed:
            assert answer.finish_reason == "abort", "it was in a step that failed"

    def check_books(self) -> None:
        """At rest: nobody holds anything."""
        assert self.client.stats.num_invariant_violations == 0
        if self.loop is None:
            return
        assert not self._unbalanced, self._unbalanced[0]
        scheduler = self.loop.scheduler
        scheduler.check_invariants(thorough=True)
        assert scheduler.kv.num_free_blocks == scheduler.config.num_blocks - 1
        roster = scheduler.roster
        assert not roster.entries and not roster.running and not roster.waiting and not roster.num_constrained
        assert not self.loop._arrivals._held and not scheduler.in_flight
        if scheduler.adapters is not None:
            assert not scheduler.adapters.running and not scheduler.adapters.coming
        gc.collect()
        held = len(self._guides)
        assert held <= MOST_HELD, "the way of an answer through its grammar is kept after its end"
        self._check_tables(self.loop)

    def _check_tables(self, loop: EngineLoop) -> None:
        """Between two steps: who drafts reads the requests' own blocks, not those that drafts are written to."""
        executor: Any = loop.executor
        runner: ModelRunner = getattr(executor, "_mine", executor).runner
        for layer in () if runner.model_drafter is None else runner.model_drafter.layers:
            assert layer.cache is not None
            own = runner.tables.block_tables[layer.group]
            assert layer.cache.block_table is own, "a layer that drafts is left on the block table of its drafts"

    def _watch(self, patch: pytest.MonkeyPatch) -> None:
        """Of this engine alone: patched while it starts, its methods as long as it lives."""
        make, guide = EngineLoop.__init__, Guide.__init__

        def init(loop: EngineLoop, *arguments: Any, **options: Any) -> None:
            make(loop, *arguments, **options)
            self.loop = loop
            self._watch_scheduler(loop, loop.scheduler)

        def begin(made: Guide, *arguments: Any, **options: Any) -> None:
            guide(made, *arguments, **options)
            if self._is_asked:
                self._guides.add(made)

        patch.setattr(EngineLoop, "__init__", init)
        patch.setattr(Guide, "__init__", begin)

    def _watch_scheduler(self, loop: EngineLoop, scheduler: Scheduler) -> None:
        fail, update = scheduler.fail, scheduler.update

        def checked(failed: bool) -> None:
            try:
                scheduler.check_invariants(thorough=True)
                if failed:
                    self._check_tables(loop)
            except Exception as error:
                self._unbalanced.append(error)

        def failing(step: int, message: str) -> Any:
            for planned in scheduler.in_flight:
                if planned.index == step:
                    self.failed |= {request.id for request in planned.scheduled if not request.finished}
                    lost = {copy.id for copy in planned.adapters}
                    having = [entry[3] for entry in scheduler.roster.entries.values()]
                    self._may_fail |= {request.id for request in having if request.adapter in lost}
            outputs = fail(step, message)
            checked(True)
            return outputs

        def updating(result: Any) -> Any:
            outputs = update(result)
            checked(False)
            return outputs

        scheduler.fail, scheduler.update = failing, updating  # type: ignore[method-assign]
