"""Structured output: compiles what clients ask for, keeps the results, and tells the engine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...engine.grammar.grammar import pack
from ...engine.link.messages import AddGrammar, DropGrammars, EngineInfo, SetVocabulary, ToEngine
from ..client.mailbox import EngineDeadError
from ..errors import ApiError, bad_request
from ..histogram import COMPILE, Histogram
from ..text.model import TextModel
from .constraint import Compiled, Constraint
from .process import CompilerError, CompilerProcess
from .queue import Job

logger = logging.getLogger(__name__)

__all__ = ["Constraint", "GrammarService"]

MAX_SOURCE = 512 * 1024  # characters of what a client sends
MAX_ENTRIES = 256  # results that are kept
MAX_BYTES = 128 << 20  # of results that are kept
MAX_USED_ENTRIES = 2048  # results that open requests hold: these cannot be forgotten
MAX_USED_BYTES = 512 << 20
MAX_WAITING = 256  # compilations that have not ended
FAILURE_SECONDS = 30.0  # for which a refusal is kept
COSTLY_SECONDS = 300.0  # the same, where it took all of the time that there was
PIECE = 1e-3  # seconds of reading the vocabulary, after which other threads have their turn


class Engine(Protocol):
    """What the service needs of EngineClient."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def epoch(self) -> int: ...

    def send(self, message: ToEngine) -> None: ...


@dataclass
class _Entry:
    key: str
    constraint: Constraint
    job: Job
    users: int = 0  # open requests that wait for it or hold its key
    epoch: int = -1  # of the engine that knows it
    size: int = 0  # bytes, once compiled
    expires: float = field(default=float("inf"))  # time.monotonic(); of a refusal

    @property
    def compiling(self) -> asyncio.Future[Compiled]:
        return self.job.result


class GrammarService:
    """Everything in it runs on the event loop; compiling happens in another process."""

    def __init__(
        self,
        client: Engine,
        model: TextModel,
        *,
        timeout: float = 5.0,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
        max_used_entries: int = MAX_USED_ENTRIES,
        max_used_bytes: int = MAX_USED_BYTES,
    ) -> None:
        """`timeout`: seconds for compiling one grammar; `max_entries`, `max_bytes`: of the cache; `max_used_entries`,
        `max_used_bytes`: of what open requests hold, whatever the cache's limits."""
        self.compile_seconds = Histogram(COMPILE)  # of those that were compiled, refused ones included
        self.num_hits = 0
        self.num_misses = 0
        self.num_failures = 0
        self._client = client
        self._model = model
        self._timeout = timeout
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_used_entries = max_used_entries
        self._max_used_bytes = max_used_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by key, least recently used first
        self._bytes = 0
        self._reading: asyncio.Task[SetVocabulary] | None = None
        self._vocabulary: SetVocabulary | None = None  # as engines get it, once the compiler has prepared it
        self._compiler = CompilerProcess(self._read, timeout, self._prepared)
        self._epoch = -1  # of the engine that knows the vocabulary

    async def acquire(self, constraint: Constraint, param: str = "response_format", owner: Hashable = "") -> str:
        """The key for SamplingParams.grammar, of a grammar that the engine knows by then. Whoever gets it must release
        it. Raises ApiError, with `param`: 400 for what cannot be compiled, 503 when too much waits or is in use.

        `owner`: who asks, as far as it is known; different ones are compiled for in turn."""
        constraint = replace(
            constraint,
            any_whitespace=constraint.any_whitespace and self._model.any_whitespace,
            additional_properties=constraint.additional_properties and self._model.additional_properties,
        )
        if len(constraint.text) > MAX_SOURCE:
            size = f"{len(constraint.text)} characters: at most {MAX_SOURCE} are allowed"
            raise bad_request(f"'{param}' has {size}; simplify it.", param)
        key = hashlib.sha256(repr(constraint).encode(errors="surrogatepass")).hexdigest()[:32]
        entry = self._entries.get(key)
        if entry is not None and (entry.compiling.cancelled() or time.monotonic() >= entry.expires):
            self._forget(entry)
            entry = None
        if entry is None:
            self._check_room(param, None)
            entry = self._begin(key, constraint, param, owner)
        else:
            self.num_hits += 1
            self._entries.move_to_end(key)
            self._compiler.set_wanted(entry.job, True)
        entry.users += 1
        try:
            compiled = await asyncio.shield(entry.compiling)
            if compiled.error is not None:
                raise bad_request(f"Invalid '{param}': {compiled.error}", param)
            self._check_room(param, entry)
            await self._tell(entry, compiled)
        except BaseException as error:
            self._leave(entry)
            if isinstance(error, CompilerError):
                what = f"Structured output is unavailable: {error}."
                raise ApiError(503, what, type="service_unavailable_error") from None
            raise
        return key

    def release(self, key: str) -> None:
        """The request is over."""
        if (entry := self._entries.get(key)) is not None:
            self._leave(entry)

    def _leave(self, entry: _Entry) -> None:
        entry.users -= 1
        if not entry.users:
            self._compiler.set_wanted(entry.job, False)
        self._evict()

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._compiler.close()

    def _check_room(self, param: str, mine: _Entry | None) -> None:
        """Raises ApiError (503) when other open requests hold so many grammars that this one, or any, is too many."""
        others = [e.size for e in self._entries.values() if e.users and e.compiling.done() and e is not mine]
        size = 0 if mine is None else mine.size
        if len(others) < self._max_used_entries and sum(others) + size <= self._max_used_bytes:
            return
        what = f"{len(others)} different grammars of {sum(others)} bytes in all are in use"
        limits = f"at most {self._max_used_entries} and {self._max_used_bytes} bytes are allowed at once"
        raise ApiError(
            503, f"{what}: {limits}; try again later, or use one schema for several requests.", param=param,
            type="service_unavailable_error", headers={"retry-after": "1"},
        )  # fmt: skip

    # ---- compiling ----

    def _begin(self, key: str, constraint: Constraint, param: str, owner: Hashable) -> _Entry:
        if not self._stop_token_ids:
            what = "this model has no end-of-text token, with which a structured output ends."
            raise bad_request(f"Invalid '{param}': {what}", param)
        if self._compiler.num_waiting >= MAX_WAITING:
            if (greediest := self._compiler.give_way(owner)) is None:
                raise _full(param)
            greediest.result.set_exception(_full(None))
        self.num_misses += 1
        entry = self._entries[key] = _Entry(key, constraint, self._compiler.submit(constraint, owner))
        entry.compiling.add_done_callback(lambda _: self._compiled(entry))
        return entry

    async def warm(self) -> None:
        """Has the libraries loaded in the compiler and in the engine, before anybody waits for them."""
        if self._stop_token_ids:
            with contextlib.suppress(CompilerError):  # who asks for a grammar hears of it
                await self._compiler.submit(Constraint("json_object", "{}"), "").result
                logger.info("structured outputs no longer wait for the grammar compiler")

    @property
    def _stop_token_ids(self) -> list[int]:
        """Those that the engine's vocabulary has; without any, no structured output can end."""
        return [id for id in self._model.eos_token_ids if id < self._client.info.vocab_size]

    async def _read(self) -> SetVocabulary:
        if self._reading is None:
            size = self._client.info.vocab_size
            self._reading = asyncio.create_task(asyncio.to_thread(vocabulary, self._model, size))
        return await asyncio.shield(self._reading)

    def _prepared(self, words: SetVocabulary) -> None:
        """The engine takes it in meanwhile: before the first grammar needs it."""
        self._vocabulary = words
        with contextlib.suppress(EngineDeadError):
            self._tell_vocabulary()

    def _compiled(self, entry: _Entry) -> None:
        if entry.compiling.cancelled() or entry.compiling.exception() is not None:
            self._forget(entry)  # who waits for it hears of it; who asks later gets another
            return
        result = entry.compiling.result()
        self.compile_seconds.observe(result.seconds)
        if result.error is not None:
            self.num_failures += 1
            entry.expires = time.monotonic() + (COSTLY_SECONDS if result.is_costly else FAILURE_SECONDS)
        if self._entries.get(entry.key) is entry:
            entry.size = len(result.payload) + len(entry.constraint.text)
            self._bytes += entry.size
            self._evict()

    def _evict(self) -> None:
        """Forgets the least recently used results that nobody holds, as far as the limits ask for it."""
        if len(self._entries) <= self._max_entries and self._bytes <= self._max_bytes:
            return
        for entry in list(self._entries.values()):
            if entry.users == 0 and entry.compiling.done():
                self._forget(entry)
                if len(self._entries) <= self._max_entries and self._bytes <= self._max_bytes:
                    return

    def _forget(self, entry: _Entry) -> None:
        if self._entries.get(entry.key) is not entry:
            return
        del self._entries[entry.key]
        self._bytes -= entry.size
        if entry.epoch >= 0:
            with contextlib.suppress(EngineDeadError):  # then it has forgotten everything
                self._client.send(DropGrammars([entry.key]))

    # ---- the engine ----

    async def _tell(self, entry: _Entry, compiled: Compiled) -> None:
        """Sends what this engine does not know yet. Raises EngineDeadError."""
        self._tell_vocabulary()
        if entry.epoch != self._client.epoch:
            self._client.send(AddGrammar(entry.key, compiled.backend, compiled.payload, entry.constraint.markers))
            entry.epoch = self._client.epoch

    def _tell_vocabulary(self) -> None:
        assert self._vocabulary is not None  # it came before the first compiled grammar
        if self._epoch != self._client.epoch:
            self._client.send(self._vocabulary)
            self._epoch = self._client.epoch


def _full(param: str | None) -> ApiError:
    return ApiError(
        503, f"Too many grammars wait to be compiled (at most {MAX_WAITING}); try again later.", param=param,
        type="service_unavailable_error", headers={"retry-after": "1"},
    )  # fmt: skip


def vocabulary(model: TextModel, size: int) -> SetVocabulary:
    """The bytes of each of the model's tokens. Special tokens are none: no grammar may produce them. Those that the
    model writes tool calls with are named: the grammars of tool calls may.

    Runs on a thread for most of a second, in pieces: it is Python's work, which would delay each token of a stream.
    """
    tokenizer = model.tokenizer
    special = {*tokenizer.special, *model.eos_token_ids}
    markers = tuple(
        id for id, name in tokenizer.special.items()
        if name in model.formats.markers and id not in model.eos_token_ids and id < size
    )  # fmt: skip
    special.difference_update(markers)

    def tokens() -> Iterator[bytes]:
        until = time.perf_counter() + PIECE
        for token_id in range(size):
            yield b"" if token_id in special else tokenizer.token_bytes(token_id)
            if time.perf_counter() > until:
                time.sleep(PIECE)
                until = time.perf_counter() + PIECE

    return pack(tokens(), [token_id for token_id in model.eos_token_ids if token_id < size], markers)
