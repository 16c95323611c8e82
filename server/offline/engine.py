"""vLLM's engines for programs: `AsyncLLM` gives answers as they grow, `LLMEngine` goes on a step at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import queue
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from ..client.mailbox import EngineDeadError
from .absent import absent
from .adapters import AdapterChoice
from .engine_args import EngineArgs
from .generate_all import generate_growing
from .llm import LLM
from .outputs import RequestOutput
from .prompt_like import PromptLike
from .sampling_params import RequestOutputKind, SamplingParams

Tell = Callable[[str, RequestOutput | BaseException], None]  # hears the request's id, too


class _Growing:
    """Requests by their ids, on an LLM's engine."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._stops: dict[str, Callable[[], object]] = {}
        self._numbers = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> Any:
        """Keywords of vLLM's, such as `usage_context`, change nothing."""
        return cls(LLM.from_engine_args(engine_args))

    def __getattr__(self, name: str) -> Any:
        raise absent(type(self).__name__, name)

    def get_tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    def shutdown(self) -> None:
        self.llm.close()

    def _begin(
        self, tell: Tell, prompt: PromptLike, params: SamplingParams | None, request_id: str | None,
        lora_request: AdapterChoice, priority: int,
    ) -> str:  # fmt: skip
        """The request's id. `tell`: on whatever thread, hears each output, and in the end what it failed of:
        CancelledError where it was aborted.

        Raises ValueError."""
        llm = self.llm
        request_id = request_id or f"request-{next(self._numbers)}"
        if request_id in self._stops:
            raise ValueError(f"request_id is {request_id!r}, which is being answered: take another")
        params = params or llm.get_default_sampling_params()
        kind = params.output_kind
        params = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        given, media = llm._given(prompt)
        job = llm._job(given, params, lora_request, [priority], media, [request_id])
        call = llm._call()

        def grown(output: RequestOutput) -> None:
            if output.finished or kind is not RequestOutputKind.FINAL_ONLY:
                tell(request_id, output)

        def ended(work: Future[None]) -> None:
            self._stops.pop(request_id, None)
            if (error := asyncio.CancelledError() if work.cancelled() else work.exception()) is not None:
                tell(request_id, error)

        work = llm._engine.start(
            llm._prepared(
                job, lambda ready: generate_growing(call, ready, grown, deltas=kind is RequestOutputKind.DELTA)
            )
        )
        self._stops[request_id] = work.cancel
        work.add_done_callback(ended)  # at once where it has ended already
        return request_id


class AsyncLLM(_Growing):
    """For programs that have an event loop of their own."""

    async def generate(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        lora_request: AdapterChoice = None, priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:  # fmt: skip
        """The answer so far with each step, until one is finished; with the output kind DELTA what was added, with
        FINAL_ONLY the whole alone. Whoever leaves early aborts it. Raises ValueError, EngineDeadError."""
        loop, told = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | BaseException]()

        def tell(_: str, output: RequestOutput | BaseException) -> None:
            loop.call_soon_threadsafe(told.put_nowait, output)

        id = self._begin(tell, prompt, sampling_params, request_id, lora_request, priority)
        try:
            finished = False
            while not finished:
                output = await told.get()
                if isinstance(output, asyncio.CancelledError):
                    return  # aborted
                if isinstance(output, BaseException):
                    raise output
                finished = output.finished
                yield output
        finally:
            await self.abort(id)

    async def abort(self, request_id: str) -> None:
        """Its iteration ends; what nobody answers is left alone."""
        if stop := self._stops.get(request_id):
            stop()

    async def check_health(self) -> None:
        """Raises EngineDeadError where the engine is gone for good, RuntimeError where this is shut down."""
        self.llm._check_open()
        if (cause := self.llm._engine.client.dead) is not None:
            raise EngineDeadError(cause)


class LLMEngine(_Growing):
    """For programs that add requests and go on step by step."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self._told: queue.Queue[tuple[str, RequestOutput | BaseException]] = queue.Queue()
        self._open: set[str] = set()

    def add_request(
        self, request_id: str, prompt: PromptLike, params: SamplingParams | None = None, *,
        lora_request: AdapterChoice = None, priority: int = 0,
    ) -> str:  # fmt: skip
        """Raises ValueError."""
        id = self._begin(self._tell, prompt, params, request_id, lora_request, priority)
        self._open.add(id)
        return id

    def _tell(self, id: str, output: RequestOutput | BaseException) -> None:
        self._told.put((id, output))

    def step(self) -> list[RequestOutput]:
        """What has come since the last step, of all requests; waits until there is something. [] where no request is
        open. Raises EngineDeadError, and ValueError for a request that cannot be; the others go on."""
        outputs: list[RequestOutput] = []
        while self._open and not (outputs and self._told.empty()):
            id, output = self._told.get()
            if isinstance(output, asyncio.CancelledError) or id not in self._open:
                continue  # aborted
            if isinstance(output, BaseException):
                if outputs:
                    self._told.put((id, output))  # for the next step
                    break
                self._open.discard(id)
                raise output
            if output.finished:
                self._open.discard(id)
            outputs.append(output)
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._open)

    def get_num_unfinished_requests(self) -> int:
        return len(self._open)

    def abort_request(self, request_id: str | list[str]) -> None:
        for id in [request_id] if isinstance(request_id, str) else request_id:
            self._open.discard(id)
            if stop := self._stops.get(id):
                stop()
