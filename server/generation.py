"""What chat and completions share: prompts become engine requests, outputs become text, whoever leaves is aborted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.types import Receive

from ..engine.messages import EngineInfo, EngineStats, Progress, RequestOutput
from ..engine.plan import TokenLogprobs
from ..engine.request import SamplingParams
from .detokenizer import Detokenizer, StopStrings
from .errors import ApiError, ClientDisconnected
from .metrics import Metrics
from .sampling import Prompt
from .tokenizer import Tokenizer

T = TypeVar("T")


class MailboxLike(Protocol):
    async def get(self) -> RequestOutput: ...


class Client(Protocol):
    """What the server needs of EngineClient."""

    info: EngineInfo
    ready: bool
    phase: Progress | None
    dead: str | None
    stats: EngineStats
    stats_listeners: list[Any]

    def submit(
        self, token_ids: list[int], sampling: SamplingParams, *, priority: int = 0, cache_salt: str | None = None
    ) -> MailboxLike: ...

    def abort(self, mailboxes: Iterable[Any]) -> None: ...


class Delta(NamedTuple):
    """What one engine output adds to a choice."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one a token, when asked
    offsets: list[int] | None  # where each token's text begins in the choice's text, with logprobs
    finish_reason: str | None = None  # with the choice's last delta


class Choice:
    """One answer in the making: one engine request, its text and its clock."""

    __slots__ = (
        "_detokenizer", "_include_stop", "_min_tokens", "_num_chars", "_stops", "_wants_offsets", "finish_reason",
        "first_scheduled", "first_token", "index", "last_token", "mailbox", "num_cached_tokens", "num_tokens",
        "prompt", "stop_reason", "submitted",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        mailbox: MailboxLike,
        detokenizer: Detokenizer,
        stops: StopStrings | None,
        include_stop: bool,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.mailbox = mailbox
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        # time.monotonic(), the clock that the engine stamps with too
        self.submitted = time.monotonic()
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._detokenizer = detokenizer
        self._stops = stops
        self._include_stop = include_stop
        self._min_tokens = prompt.sampling.min_tokens
        self._wants_offsets = prompt.sampling.logprobs is not None
        self._num_chars = 0

    def feed(self, output: RequestOutput) -> Delta:
        """Token by token, so that a stop string ends the choice at the same token however outputs were merged."""
        token_ids, logprobs, finish = output.token_ids, output.logprobs, output.finish_reason
        offsets: list[int] | None = [] if self._wants_offsets else None
        # The token that ended the answer is not part of its text.
        num_visible = len(token_ids) - 1 if finish == "stop" and not self._include_stop else len(token_ids)
        text = ""
        for position, token_id in enumerate(token_ids):
            if offsets is not None:
                offsets.append(self._num_chars)
            self.num_tokens += 1
            piece = self._detokenizer.feed(token_id) if position < num_visible else ""
            if piece:
                text += self._release(piece)
                if self.finish_reason is not None:
                    used = position + 1
                    return Delta(text, token_ids[:used], logprobs and logprobs[:used], offsets, "stop")
        if finish is not None:
            text += self._release(self._detokenizer.flush())
            if self.finish_reason is None:
                if self._stops is not None:
                    text += self._stops.flush()
                self.finish_reason, self.stop_reason = finish, output.stop_reason
        return Delta(text, token_ids, logprobs, offsets, self.finish_reason)

    def _release(self, piece: str) -> str:
        """What of the text so far may go out; finishes the choice when it completes a stop string."""
        self._num_chars += len(piece)
        if self._stops is None:
            return piece
        piece = self._stops.push(piece, armed=self.num_tokens > self._min_tokens)
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
        return piece


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
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Submits prompts × n requests; choice i of prompt p has index p · n + i. Raises EngineDeadError."""
        self.prompts = prompts
        self.n = n
        self.arrival = arrival
        self.choices: list[Choice] = []
        self._client = client
        self._metrics = metrics
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._unfinished = [n] * len(prompts)  # choices of each prompt
        try:
            for prompt in prompts:
                for i in range(n):
                    mailbox = client.submit(
                        prompt.token_ids, prompt.sampling_of(i), priority=priority, cache_salt=cache_salt
                    )
                    detokenizer = Detokenizer(tokenizer, prompt.token_ids, skip_special_tokens)
                    stop_strings = StopStrings(stops, include_stop) if stops else None
                    self.choices.append(
                        Choice(len(self.choices), prompt, mailbox, detokenizer, stop_strings, include_stop)
                    )
        except BaseException:
            self.close()
            raise

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What the engine says, as it comes, until every choice is finished. Raises ApiError and EngineDeadError."""
        if len(self.choices) == 1:
            (choice,) = self.choices
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
            while choice.finish_reason is None:
                await queue.put((choice, self._feed(choice, await choice.mailbox.get())))
        except Exception as error:
            await queue.put(error)

    def _feed(self, choice: Choice, output: RequestOutput) -> Delta:
        if output.finish_reason == "error":
            self._finish(choice, "error")
            raise ApiError(500, f"The engine failed on this request: {output.error}.", type="server_error")
        if output.finish_reason == "abort":
            self._finish(choice, "abort")
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

    def _finish(self, choice: Choice, reason: str) -> None:
        choice.finish_reason = reason
        self._unfinished[choice.index // self.n] -= 1
        self._metrics.finished(self, choice, last_of_prompt=self._unfinished[choice.index // self.n] == 0)

    def close(self) -> None:
        """Aborts what is unfinished. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        open_choices = [choice for choice in self.choices if choice.finish_reason is None]
        if open_choices:
            self._client.abort([choice.mailbox for choice in open_choices])
            for choice in open_choices:
                self._finish(choice, "abort" if self._client.dead is None else "error")

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
            "completion_tokens_details": {"reasoning_tokens": 0},
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
