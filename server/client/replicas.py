"""Several engines with the same model behind the interface of one.

Each has a card (or a share of the cores) and a cache of its own. Requests go where their first token is expected
soonest; an engine that dies takes only those of its requests that had begun to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from ...engine.config import ConfigError, EngineConfig, default_cpu_threads
from ...engine.messages import (
    AddGrammar,
    DropGrammars,
    EngineInfo,
    EngineStats,
    Progress,
    SetVocabulary,
    StepRecord,
    StepReports,
    ToEngine,
    pack_tokens,
    sum_of,
)
from ...engine.request import SamplingParams, unknown_token_problem
from .engine_client import EngineClient
from .mailbox import EngineDeadError, Mailbox, refused
from .routing import ANYWHERE, Load, Route, Router, prefix_keys

logger = logging.getLogger(__name__)


def make_client(config: EngineConfig, *, restarts: int = 0) -> EngineClient | Replicas:
    """Of as many engines as the options name. Raises ConfigError."""
    size = config.data_parallel_size
    return EngineClient(config, restarts=restarts) if size == 1 else Replicas(config, restarts=restarts)


def engine_environments(config: EngineConfig) -> list[dict[str, str]]:
    """Of each engine's process: which card it sees. Raises ConfigError where CUDA_VISIBLE_DEVICES names too few."""
    size, visible = config.data_parallel_size, os.environ.get("CUDA_VISIBLE_DEVICES")
    if config.device == "cpu":
        return [{} for _ in range(size)]
    cards = [str(index) for index in range(size)] if visible is None else [c for c in visible.split(",") if c.strip()]
    if visible is not None and cards and len(cards) < size:
        raise ConfigError(
            f"--data-parallel-size {size}: CUDA_VISIBLE_DEVICES={visible} names {len(cards)} cards, and each engine "
            "needs one: name more, or lower it"
        )
    return [{"CUDA_VISIBLE_DEVICES": card} for card in cards[:size]] if cards else [{} for _ in range(size)]


class _Told:
    """Which of the grammars' messages an engine has been sent: those of one epoch."""

    def __init__(self) -> None:
        self.epoch = -1
        self.vocabulary = False
        self.keys: set[str] = set()


class Replicas:
    """A Client. What one engine says of itself is in `engines`; what is here holds for all of them together."""

    def __init__(self, config: EngineConfig, *, restarts: int = 0) -> None:
        self.config = config
        threads = max(1, (config.cpu_threads or default_cpu_threads()) // config.data_parallel_size)
        each = dataclasses.replace(config, cpu_threads=threads)
        self.engines: list[EngineClient] = [
            EngineClient(each, restarts=restarts, name=f"engine {index}", environment=environment)
            for index, environment in enumerate(engine_environments(config))
        ]
        self.stats_listeners: list[Callable[[Any], None]] = []
        self.progress_listeners: list[Callable[[Progress], None]] = []
        self.death_listeners: list[Callable[[str], None]] = []
        self._router: Router | None = None
        self._told = [_Told() for _ in self.engines]
        self._epoch = 0
        self._known_epochs = [-1] * len(self.engines)
        self._started = False
        for index, engine in enumerate(self.engines):
            engine.stats_listeners.append(self._step)
            engine.rescue = self._rescuer(index)
            engine.death_listeners.append(self._died)
        self.engines[0].progress_listeners.append(self._progress)

    # ---- what they are together ----

    @property
    def serving(self) -> list[EngineClient]:
        return [engine for engine in self.engines if engine.ready]

    @property
    def info(self) -> EngineInfo:
        """As of one engine, but for what they have together: requests at once, and blocks of their caches."""
        known = [engine.info for engine in self.serving or self.engines if hasattr(engine, "info")]
        if not known:
            raise AttributeError("no engine has been ready yet")
        return msgspec.structs.replace(
            known[0], max_num_seqs=sum(info.max_num_seqs for info in known),
            num_blocks=sum(info.num_blocks for info in known), num_kv_tokens=sum(info.num_kv_tokens for info in known),
        )  # fmt: skip

    @property
    def ready(self) -> bool:
        return self._started and any(engine.ready for engine in self.engines)

    @property
    def phase(self) -> Progress | None:
        return self.engines[0].phase

    @property
    def down(self) -> str | None:
        """Why none of them serves."""
        return None if self.serving else next((engine.down for engine in self.engines if engine.down), None)

    @property
    def dead(self) -> str | None:
        causes = [engine.dead for engine in self.engines]
        return causes[0] if all(causes) else None

    @property
    def stalled(self) -> float | None:
        """Seconds, where none of those that serve goes on."""
        stalls = [engine.stalled for engine in self.serving]
        return min((seconds for seconds in stalls if seconds is not None), default=None) if None not in stalls else None

    @property
    def epoch(self) -> int:
        """Another one, never had before, whenever an engine has become ready that knows nothing yet."""
        for index, engine in enumerate(self.engines):
            if engine.ready and self._known_epochs[index] != engine.epoch:
                self._known_epochs[index] = engine.epoch
                self._epoch += 1
        return self._epoch

    @property
    def num_restarts(self) -> int:
        return sum(engine.num_restarts for engine in self.engines)

    @property
    def num_stalls(self) -> int:
        return sum(engine.num_stalls for engine in self.engines)

    @property
    def stats(self) -> EngineStats:
        """Sums."""
        return sum_of(*(engine.stats for engine in self.serving))

    @property
    def retry_after(self) -> int:
        return min(engine.retry_after for engine in self.engines)

    # ---- requests ----

    def submit_choices(
        self,
        n: int,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        route: Route = ANYWHERE,
    ) -> Sequence[Mailbox]:
        """As EngineClient has it: all choices go to one engine, where they share the prompt."""
        try:
            prompt = pack_tokens(token_ids)
        except OverflowError:
            return refused(n, unknown_token_problem(token_ids, self.info.vocab_size))
        index, num_cached = self._choose(prompt, cache_salt, route)
        return self.engines[index].submit_packed(
            n, prompt, sampling, priority=priority, cache_salt=cache_salt, num_cached=num_cached
        )

    def _choose(self, prompt: bytes, salt: str | None, route: Route, grammar: str | None = None) -> tuple[int, int]:
        """→ (engine, tokens that it probably has cached). `grammar`: one that it must know already. Raises
        EngineDeadError where there is none."""
        router = self._router
        if router is None or not self.ready:
            raise EngineDeadError(self.down or "the engines are not ready")
        if route.engine is not None:
            engine = self.engines[route.engine]
            if not engine.ready:
                raise EngineDeadError(f"engine {route.engine}, which was asked for, is down: {engine.down}")
        fit = [
            engine.ready and route.engine in (None, index) and (grammar is None or self._knows(index, grammar))
            for index, engine in enumerate(self.engines)
        ]
        if not any(fit):
            raise EngineDeadError("no engine that serves knows the grammar of this request")
        loads = [
            Load(engine.waiting_tokens, engine.num_open) if fits and engine.stalled is None else None
            for engine, fits in zip(self.engines, fit, strict=True)
        ]
        if not any(loads):  # all that serve are stalled: one that may go on is better than none
            loads = [
                Load(engine.waiting_tokens, engine.num_open) if fits else None
                for engine, fits in zip(self.engines, fit, strict=True)
            ]
        return router.choose(prefix_keys(prompt, salt), len(prompt) // 4, loads, route.session)

    def _rescuer(self, index: int) -> Callable[[list[Mailbox]], list[Mailbox]]:
        def rescue(mailboxes: list[Mailbox]) -> list[Mailbox]:
            if self._router is not None:
                self._router.forget(index)
            left = []
            for mailbox in mailboxes:
                sent = mailbox.request
                assert sent is not None
                try:
                    chosen, _ = self._choose(sent.prompt, sent.cache_salt, ANYWHERE, sent.sampling.grammar)
                    self.engines[chosen].adopt(mailbox)
                except EngineDeadError:
                    left.append(mailbox)
            if mailboxes:
                logger.warning(
                    "engine %d: %d of %d requests without a token go on elsewhere",
                    index, len(mailboxes) - len(left), len(mailboxes),
                )  # fmt: skip
            return left

        return rescue

    def abort(self, mailboxes: Iterable[Mailbox]) -> None:
        wanted = list(mailboxes)
        for engine in self.engines:
            engine.abort(wanted)

    def expire(self, mailboxes: Iterable[Mailbox]) -> None:
        """All of them are one engine's: the prompts of a request stay together."""
        wanted = list(mailboxes)
        for engine in self.engines:
            engine.expire(wanted)

    def fail_all(self, error: EngineDeadError) -> None:
        for engine in self.engines:
            engine.fail_all(error)

    def send(self, message: ToEngine) -> None:
        """To every engine that serves, once: grammars and the vocabulary. Raises EngineDeadError."""
        if not self.ready:
            raise EngineDeadError(self.down or "the engines are not ready")
        for engine, told in zip(self.engines, self._told, strict=True):
            if engine.ready and self._is_news(message, engine, told):
                engine.send(message)

    def _knows(self, index: int, grammar: str) -> bool:
        told = self._told[index]
        return told.epoch == self.engines[index].epoch and grammar in told.keys

    @staticmethod
    def _is_news(message: ToEngine, engine: EngineClient, told: _Told) -> bool:
        if told.epoch != engine.epoch:
            told.__init__()  # type: ignore[misc]
            told.epoch = engine.epoch
        if isinstance(message, SetVocabulary):
            known, told.vocabulary = told.vocabulary, True
            return not known
        if isinstance(message, AddGrammar):
            known = message.key in told.keys
            told.keys.add(message.key)
            return not known
        if isinstance(message, DropGrammars):
            known = not told.keys.isdisjoint(message.keys)
            told.keys.difference_update(message.keys)
            return known
        return True

    # ---- watching ----

    def watch_steps(self, listener: Callable[[StepReports], None]) -> None:
        """Of the first engine that serves: a page shows one cache."""
        (self.serving or self.engines)[0].watch_steps(listener)

    def unwatch_steps(self, listener: Callable[[StepReports], None]) -> None:
        for engine in self.engines:
            if listener in engine.step_listeners:
                engine.unwatch_steps(listener)

    async def last_steps(self, count: int) -> list[StepRecord]:
        """Of all engines, in the order of time."""
        found = await asyncio.gather(*(engine.last_steps(count) for engine in self.serving))
        if not found:
            raise EngineDeadError(self.down or "the engines are not ready")
        return sorted((step for steps in found for step in steps), key=lambda step: step.time)[-count:]

    def _step(self, message: Any) -> None:
        for listener in self.stats_listeners:
            listener(message)

    def _progress(self, progress: Progress) -> None:
        for listener in self.progress_listeners:
            listener(progress)

    def _died(self, cause: str) -> None:
        if self.dead is not None:
            for listener in self.death_listeners:
                listener(cause)
        else:
            logger.error("an engine will not come back (%s); %d others serve", cause, len(self.serving))
            for dead in self.engines:
                while dead.dead is not None and dead.step_listeners and self.serving:
                    self.serving[0].watch_steps(dead.step_listeners.pop())

    # ---- life and death ----

    async def start(self) -> None:
        """All of them, at the same time. Raises EngineDeadError where one cannot start."""
        starting = [asyncio.create_task(engine.start()) for engine in self.engines]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            raise
        infos = [engine.info for engine in self.engines]
        for index, info in enumerate(infos):
            if info.device != infos[0].device:
                raise EngineDeadError(
                    f"--data-parallel-size {len(infos)}: engine 0 runs on {infos[0].device}, but engine {index} on "
                    f"{info.device}: each needs a card of its own, lower it"
                )
        self._router = Router(
            len(infos), min(info.num_blocks * info.block_size // info.num_kv_groups for info in infos)
        )
        self._started = True

    def kill(self) -> None:
        for engine in self.engines:
            engine.kill()

    async def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*(engine.close() for engine in self.engines))
