"""What chat and completions share: prompts become engine requests, outputs become text, whoever leaves is aborted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from starlette.types import Receive

from ..engine.config import EngineConfig
from ..engine.messages import EngineInfo, EngineStats, Progress, RequestOutput, StepReports, ToEngine
from ..engine.plan import TokenLogprobs
from ..engine.request import SamplingParams
from .choice import Choice, Delta, MailboxLike, Prompt, TextOptions
from .errors import ApiError, ClientDisconnected
from .logprobs import PromptReport
from .metrics import Metrics
from .tokenizer import Tokenizer

T = TypeVar("T")
Describe = Callable[[Prompt, list[TokenLogprobs]], Awaitable[PromptReport]]
PLAIN = TextOptions()


class Client(Protocol):
    """What the server needs of EngineClient."""

    config: EngineConfig
    info: EngineInfo
    ready: bool
    phase: Progress | None
    down: str | None
    dead: str | None
    stalled: float | None
    epoch: int
    num_restarts: int
    num_stalls: int
    stats: EngineStats
    stats_listeners: list[Any]

    def submit(
        self, token_ids: list[int], sampling: SamplingParams, *, priority: int = 0, cache_salt: str | None = None
    ) -> MailboxLike: ...

    def abort(self, mailboxes: Iterable[Any]) -> None: ...

    def send(self, message: ToEngine) -> None: ...

    def expire(self, mailboxes: Iterable[Any]) -> None: ...

    def watch_steps(self, listener: Callable[[StepReports], None]) -> None: ...

    def unwatch_steps(self, listener: Callable[[StepReports], None]) -> None: ...

    @property
    def retry_after(self) -> int: ...


class Generation:
    """All choices of one HTTP request. Whoever makes one must close it: that aborts what is unfinished."""

    def __init__(
        self,
        client: Client,
        metrics: Metrics,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        *,
        arrival: float,
        n: int = 1,
        text: TextOptions = PLAIN,
        priority: int = 0,
        cache_salt: str | None = None,
        describe: Describe | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Submits prompts × n requests; choice i of prompt p has index p · n + i. Raises EngineDeadError.

        `describe`: what to make of the log-probabilities of a prompt, where they were asked for; `on_close` is called
        when nothing of this is open any more, also when this raises.
        """
        self.prompts = prompts
        self.n = n
        self.arrival = arrival
        self.choices: list[Choice] = []
        self.reports: list[PromptReport | None] = [None] * len(prompts)
        self.is_read = text.read is not None  # deltas have parts
        self._client = client
        self._metrics = metrics
        self._describe = describe
        self._described = [asyncio.Event() for _ in prompts] if describe is not None else []
        self._on_close = on_close
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._cancelled = False
        self._unfinished = [n] * len(prompts)  # choices of each prompt
        self.abort_reason = "disconnect"  # why close() would abort what is unfinished
        self.on_abort: Callable[[], ApiError] | None = None  # what to answer when the engine aborts a choice
        try:
            for prompt in prompts:
                for i in range(n):
                    mailbox = client.submit(
                        prompt.token_ids, prompt.sampling_of(i), priority=priority, cache_salt=cache_salt
                    )
                    self.choices.append(text.choice(len(self.choices), prompt, mailbox, tokenizer))
        except BaseException:
            self.close()
            raise

    @property
    def describes(self) -> bool:
        """Whether `reports` get filled, each before the first delta of its choices comes out."""
        return self._describe is not None

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What the engine says, as it comes, until every choice is finished. Raises ApiError and EngineDeadError."""
        if len(self.choices) == 1:
            (choice,) = self.choices
            if self._describe is not None:
                yield choice, await self._opening(choice)
            while choice.finish_reason is None:
                yield choice, self._feed(choice, await choice.mailbox.get())
            return
        # A full queue stops the pumps, and then the mailboxes merge: a slow reader costs no memory.
        queue: asyncio.Queue[tuple[Choice, Delta] | Exception] = asyncio.Queue(len(self.choices))
        self._tasks = [asyncio.create_task(self._pump(choice, queue)) for choice in self.choices]
        unfinished = len(self.choices)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            unfinished -= item[1].finish_reason is not None

    async def _pump(self, choice: Choice, queue: asyncio.Queue[Any]) -> None:
        try:
            if self._describe is not None:
                await queue.put((choice, await self._opening(choice)))
            while choice.finish_reason is None:
                await queue.put((choice, self._feed(choice, await choice.mailbox.get())))
        except Exception as error:
            await queue.put(error)

    async def _opening(self, choice: Choice) -> Delta:
        """What a choice says first, once its prompt is described: the first choice of a prompt brings what it takes."""
        assert self._describe is not None
        prompt = choice.index // self.n
        if choice.index % self.n:
            await self._described[prompt].wait()
            return self._feed(choice, await choice.mailbox.get())
        output = await choice.mailbox.get()
        if output.prompt_logprobs is not None:
            self.reports[prompt] = await self._describe(choice.prompt, output.prompt_logprobs)
        delta = self._feed(choice, output)
        self._described[prompt].set()
        return delta

    def _feed(self, choice: Choice, output: RequestOutput) -> Delta:
        if output.finish_reason == "error":
            self.abort_reason = "error"  # of one choice; the others have no reader any more
            self._finish(choice, "error")
            raise ApiError(500, f"The engine failed on this request: {output.error}.", type="server_error")
        if output.finish_reason == "abort":
            if self._cancelled:
                return self._end_cancelled(choice, output)
            self.abort_reason = "error" if self.on_abort is None else "timeout"
            self._finish(choice, "abort")
            if self.on_abort is not None:
                raise self.on_abort()
            raise ApiError(503, "The engine aborted this request.", type="service_unavailable_error")
        now = time.monotonic()
        delta = choice.feed(output)
        if choice.last_token is None:
            choice.first_token = now
            choice.first_scheduled = output.first_scheduled
            choice.num_cached_tokens = output.num_cached_tokens or 0
            self._metrics.first_output(self, choice, now)
        elif delta.token_ids:
            self._metrics.more_output(choice, now, len(delta.token_ids))
        choice.last_token = now
        self._metrics.generation_tokens += len(delta.token_ids)
        if choice.finish_reason is not None:
            if choice.finish_reason != output.finish_reason:
                self._client.abort([choice.mailbox])  # a stop string: the engine does not know it
            self._finish(choice, choice.finish_reason)
        return delta

    @property
    def awaited(self) -> list[MailboxLike]:
        """Those of choices that are not finished in the engine either."""
        open_choices = [choice for choice in self.choices if choice.finish_reason is None]
        return [choice.mailbox for choice in open_choices if not choice.mailbox.finished]

    def cancel(self) -> None:
        """Ends every choice that is not finished for whoever reads it: finish reason "stop", stop reason "abort".
        Idempotent. What the engine has finished keeps its end, also where nobody has read it yet.
        """
        self._cancelled = True
        self.abort_reason = "cancel"
        mailboxes = self.awaited
        self._client.abort(mailboxes)
        for mailbox in mailboxes:
            mailbox.put(RequestOutput(0, [], "abort"))

    def _end_cancelled(self, choice: Choice, output: RequestOutput) -> Delta:
        delta = choice.feed(output)
        self._metrics.generation_tokens += len(delta.token_ids)
        if choice.finish_reason == "abort":
            choice.stop_reason = "abort"
        self._finish(choice, choice.finish_reason or "abort")
        choice.finish_reason = "stop"
        return delta._replace(finish_reason="stop")

    def _finish(self, choice: Choice, reason: str) -> None:
        choice.finish_reason = reason
        self._unfinished[choice.index // self.n] -= 1
        self._metrics.finished(self, choice, last_of_prompt=self._unfinished[choice.index // self.n] == 0)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Aborts what is unfinished. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._on_close is not None:
            self._on_close()
        for task in self._tasks:
            task.cancel()
        open_choices = [choice for choice in self.choices if choice.finish_reason is None]
        if open_choices:
            self._client.abort([choice.mailbox for choice in open_choices])
            for choice in open_choices:
                self._finish(choice, "abort" if self._client.ready else "error")

    def usage(self) -> dict[str, Any]:
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_output = sum(choice.num_tokens for choice in self.choices)
        # the first choice of each prompt: the others share its blocks, which saves nothing that the client paid for
        num_cached = sum(choice.num_cached_tokens for choice in self.choices[:: self.n])
        return {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_output,
            "completion_tokens": num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {"reasoning_tokens": sum(c.num_reasoning_tokens for c in self.choices)},
        }


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientDisconnected as soon as the client is gone; `work` is cancelled then.

    A server cancels only handlers that send; one that is still thinking has to watch the connection itself.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            if not working.cancelled():
                working.exception()  # nobody is left to hear it
