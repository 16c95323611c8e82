"""Several engines with the same model behind the interface of one.

Each has a card (or a share of the cores) and a cache of its own. Requests go where their first token is expected
soonest; an engine that dies takes only those of its requests that had begun to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from ...engine.link.media import MediaItem
from ...engine.link.messages import (
    AdapterLoaded,
    EngineInfo,
    EngineStats,
    LoadAdapter,
    Progress,
    StepOutputs,
    StepRecord,
    StepReports,
    ToEngine,
    pack_tokens,
    sum_of,
)
from ...engine.link.sampling_params import SamplingParams, unknown_token_problem
from ...engine.options.config import EngineConfig, default_cpu_threads
from ...engine.options.kv_events_settings import of_rank
from .cards import engine_environments
from .dispatch import Dispatch, cached_apart
from .engine_client import EngineClient
from .mailbox import EngineDeadError, Mailbox, refused
from .meeting import Meeting
from .routing import ANYWHERE, Route, Router

logger = logging.getLogger(__name__)


def make_client(
    config: EngineConfig, *, restarts: int = 0, scalable: bool = False, meeting: Meeting | None = None,
    environment: Mapping[str, str] = {},
) -> EngineClient | Replicas:  # fmt: skip
    """Of as many engines as the options name; `scalable`: there may be more of them later; `meeting`: of several API
    processes; `environment`: of one engine alone. Raises ConfigError."""
    one = config.data_parallel_size == 1 and (config.engine_in_process or not scalable)
    if one:
        return EngineClient(config, restarts=restarts, environment=environment)
    return Replicas(config, restarts=restarts, meeting=meeting)


class Replicas:
    """A Client. What one engine says of itself is in `engines`; what is here holds for all of them together."""

    def __init__(self, config: EngineConfig, *, restarts: int = 0, meeting: Meeting | None = None) -> None:
        self.config = config
        self._meeting = meeting
        self.engines: list[EngineClient] = []
        self.leaving: set[EngineClient] = set()  # those of them that get no requests any more, or none yet
        self.stats_listeners: list[Callable[[Any], None]] = []
        self.progress_listeners: list[Callable[[Progress], None]] = []
        self.death_listeners: list[Callable[[str], None]] = []
        self.scaling = asyncio.Lock()  # see scaling.py
        self._restarts = restarts
        self._dispatch = Dispatch(self.engines, self.leaving, None if meeting is None else meeting.board)
        self._epoch = 0
        self._known_epochs: dict[EngineClient, int] = {}
        self._alone = config.data_parallel_size == 1  # at the start: its lines in the log need no number
        self.add(config.data_parallel_size)
        self.engines[0].progress_listeners.append(self._progress)

    def add(self, count: int) -> list[EngineClient]:
        """So many engines more, which are not started yet. Raises ConfigError where there are too few cards."""
        first = len(self.engines)
        config = dataclasses.replace(self.config, data_parallel_size=first + count)
        environments = engine_environments(config)
        self.config = config
        threads = max(1, (config.cpu_threads or default_cpu_threads()) // config.data_parallel_size)
        each = dataclasses.replace(config, cpu_threads=threads)
        for index in range(first, first + count):
            engine = EngineClient(
                dataclasses.replace(each, kv_events_config=of_rank(config.kv_events_config, index)),
                restarts=self._restarts,
                name="" if index == 0 and self._alone else f"engine {index}",
                environment=environments[index],
                index=index,
                meeting=self._meeting,
            )
            if self.engines:
                engine.adapters.update(self.engines[0].adapters)
            engine.stats_listeners.append(partial(self._step, index))
            engine.rescue = self._dispatch.rescuer(index)
            engine.death_listeners.append(self._died)
            self.engines.append(engine)
            if self._dispatch.router is not None:
                self._dispatch.router.add()
        return self.engines[first:]

    def remove_last(self) -> EngineClient:
        """It has nothing to do any more; whoever calls this closes it."""
        engine = self.engines.pop()
        self.leaving.discard(engine)
        self._dispatch.news.pop(engine, None)
        self._known_epochs.pop(engine, None)
        if self._dispatch.router is not None:
            self._dispatch.router.remove_last()
        self.config = dataclasses.replace(self.config, data_parallel_size=len(self.engines))
        self._move_watchers(engine)
        return engine

    def hand_over(self, index: int) -> None:
        """The requests that this engine has said nothing of go on elsewhere, where others serve."""
        self.engines[index].requests.hand_over(self.engines[index].rescue)

    # ---- what they are together ----

    @property
    def serving(self) -> list[EngineClient]:
        return [engine for engine in self.engines if engine.ready]

    @property
    def info(self) -> EngineInfo:
        """As of one engine, but for what they have together: requests at once, and blocks of their caches."""
        if len(self.engines) == 1:  # asked a dozen times a request
            return self.engines[0].info
        known = [engine.info for engine in self.serving or self.engines if hasattr(engine, "info")]
        if not known:
            raise AttributeError("no engine has been ready yet")
        return msgspec.structs.replace(
            known[0], max_num_seqs=sum(info.max_num_seqs for info in known),
            num_blocks=sum(info.num_blocks for info in known), num_kv_tokens=sum(info.num_kv_tokens for info in known),
        )  # fmt: skip

    @property
    def ready(self) -> bool:
        return self._dispatch.router is not None and any(engine.ready for engine in self.engines)

    @property
    def phase(self) -> Progress | None:
        return self.engines[0].phase

    @property
    def down(self) -> str | None:
        """Why none of them serves."""
        return self._dispatch.down

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
        for engine in self.engines:
            if engine.ready and self._known_epochs.get(engine) != engine.epoch:
                self._known_epochs[engine] = engine.epoch
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
        tenant: int = 0,
        route: Route = ANYWHERE,
        media: tuple[MediaItem, ...] = (),
    ) -> Sequence[Mailbox]:
        """As EngineClient has it: all choices go to one engine, where they share the prompt."""
        try:
            prompt = pack_tokens(token_ids)
        except OverflowError:
            return refused(n, unknown_token_problem(token_ids, self.info.vocab_size))
        index, num_cached = self._dispatch.choose(prompt, cached_apart(cache_salt, sampling), route)
        engine = self.engines[index]
        mailboxes = engine.submit_packed(
            n, prompt, sampling, priority=priority, cache_salt=cache_salt, tenant=tenant, num_cached=num_cached,
            media=media,
        )  # fmt: skip
        self._dispatch.publish_load(index)
        return mailboxes

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
        for engine in self.engines:
            if engine.ready and self._dispatch.news[engine].note(engine.epoch, message):
                engine.send(message)

    # ---- adapters ----

    async def load_adapter(self, message: LoadAdapter) -> AdapterLoaded:
        """By every engine; one that is down loads it when it is back. The first answer that says what is wrong, else
        the first."""
        for engine in self.engines:  # one that dies meanwhile is back, perhaps, before the others have read it
            engine.adapters[message.id] = message
        loads = (engine.load_adapter(message) for engine in self.serving)
        results = await asyncio.gather(*loads, return_exceptions=True)
        answers = [result for result in results if isinstance(result, AdapterLoaded)]
        failed = next((answer for answer in answers if answer.error is not None), None)
        if failed is None and len({answer.version for answer in answers}) > 1:
            what = f"the engines have read different versions of {message.path}: give all hosts the same files"
            failed = AdapterLoaded(message.id, error=f"{what}, and load it again")
        if failed is not None or not answers:
            self.drop_adapter(message.id)
        if failed is not None:
            return failed
        if not answers:
            raise EngineDeadError(self.down or "the engines are not ready")
        self.know_adapter(msgspec.structs.replace(message, version=answers[0].version))
        return answers[0]

    def know_adapter(self, message: LoadAdapter) -> None:
        for engine in self.engines:
            engine.know_adapter(message)

    def drop_adapter(self, id: int) -> None:
        for engine in self.engines:
            engine.drop_adapter(id)

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

    def _step(self, index: int, message: StepOutputs) -> None:
        self._dispatch.publish_load(index)
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
            for engine in self.engines:
                if engine.dead is not None:
                    self._move_watchers(engine)

    def _move_watchers(self, engine: EngineClient) -> None:
        while engine.step_listeners and self.serving:
            self.serving[0].watch_steps(engine.step_listeners.pop())

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
        self.check_devices()
        infos = [engine.info for engine in self.engines]
        self._dispatch.router = Router(
            len(infos), min(info.num_blocks * info.block_size // info.num_kv_groups for info in infos)
        )

    def check_devices(self) -> None:
        """Raises EngineDeadError unless all run on the same kind."""
        first = self.engines[0].info.device
        for index, engine in enumerate(self.engines):
            if hasattr(engine, "info") and engine.info.device != first:
                raise EngineDeadError(
                    f"--data-parallel-size {len(self.engines)}: engine 0 runs on {first}, but engine {index} on "
                    f"{engine.info.device}: each needs a card of its own, lower it"
                )

    def kill(self) -> None:
        for engine in self.engines:
            engine.kill()

    async def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*(engine.close() for engine in self.engines))
