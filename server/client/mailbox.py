"""What the engine said of one request and nobody has read yet."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ...engine.link.messages import AddRequest, RequestOutput


class EngineDeadError(Exception):
    """The engine is gone; the message is the cause, in one line."""


class EngineRefusedError(EngineDeadError):
    """The engine does not start with this configuration, however often."""


class ShuttingDownError(EngineDeadError):
    """The server was told to end and waits no longer."""


class MailboxLike(Protocol):
    num_preemptions: int
    finished: bool  # the engine has said its last word

    @property
    def lost(self) -> bool: ...

    async def get(self) -> RequestOutput: ...

    def news(self) -> asyncio.Future[None]: ...

    def take(self) -> RequestOutput | None: ...

    def watch(self, on_news: Callable[[], None]) -> None: ...

    def put(self, output: RequestOutput) -> None: ...

    def fail(self, error: str | Exception) -> None: ...


class Mailbox:
    """A slow reader finds its outputs merged."""

    __slots__ = (
        "_error", "_on_news", "_output", "_waiter", "arrival", "expired", "finished", "id", "num_preemptions", "owner",
        "request", "rescued", "waiting_tokens",
    )  # fmt: skip

    def __init__(self, id: int, arrival: float, request: AddRequest | None = None, owner: object = None) -> None:
        self.id = id
        self.request = request  # what was sent, until the first word comes back: it can be sent elsewhere as well
        self.owner = owner  # the client of the engine that has it
        self.waiting_tokens = 0  # of its prompt, which nobody has computed yet
        self.rescued = False  # its engine died before the first word, and another one got it
        self.expired = False  # it may wait no longer for its first step
        self.arrival = arrival  # time.monotonic()
        self.finished = False  # the engine has said its last word
        self.num_preemptions = 0
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_news: Callable[[], None] | None = None

    @property
    def lost(self) -> bool:
        """The engine that had it has died."""
        return isinstance(self._error, EngineDeadError) and not isinstance(self._error, ShuttingDownError)

    async def get(self) -> RequestOutput:
        """Waits for news. Raises EngineDeadError when none will come, or what `fail` was given."""
        while (output := self.take()) is None:
            await self.news()
        return output

    def news(self) -> asyncio.Future[None]:
        """For whoever has found nothing: done once there is something, or an error. It is the last one's who asks. No
        coroutine: this runs once a token."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter

    def take(self) -> RequestOutput | None:
        """What there is, without waiting. Raises as `get` does."""
        output, self._output = self._output, None
        if output is None and self._error is not None:
            raise self._error
        return output

    def watch(self, on_news: Callable[[], None]) -> None:
        """From now on `on_news` is called where `take` would bring something else than before; see Mailboxes."""
        self._on_news = on_news
        if self._output is not None or self._error is not None:
            on_news()

    def put(self, output: RequestOutput) -> None:
        if self._output is not None:
            self._output = merge(self._output, output)
            self.finished = output.finish_reason is not None
            return  # whoever reads has been told
        self._output = output
        self.finished = output.finish_reason is not None
        self._notify()

    def fail(self, error: str | Exception) -> None:
        self._error = EngineDeadError(error) if isinstance(error, str) else error
        self._notify()

    def _notify(self) -> None:
        if self._on_news is not None:
            self._on_news()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def refused(n: int, error: str) -> list[Mailbox]:
    """Of requests that no engine was asked: each ends with this error."""
    mailboxes = [Mailbox(0, time.monotonic()) for _ in range(n)]
    for mailbox in mailboxes:
        mailbox.put(RequestOutput(0, [], "error", error=error))
    return mailboxes


class Mailboxes:
    """Several with one reader, who finds them in the order of their news."""

    def __init__(self, mailboxes: Sequence[MailboxLike]) -> None:
        self._ready: deque[int] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._num_known = 0
        for mailbox in mailboxes:
            self.add(mailbox)

    def add(self, mailbox: MailboxLike) -> None:
        mailbox.watch(partial(self.put_back, self._num_known))
        self._num_known += 1

    async def next(self) -> int:
        """Waits for news. Returns the index of the mailbox, where `take` may find nothing all the same."""
        while not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._ready.popleft()

    def put_back(self, index: int) -> None:
        """There is something in this one."""
        self._ready.append(index)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one request as one. The first one's lists are extended: a long pile-up stays linear."""
    token_ids, logprobs = first.token_ids, first.logprobs
    token_ids += second.token_ids
    if logprobs is None:
        logprobs = second.logprobs
    else:
        logprobs += second.logprobs or ()
    return RequestOutput(
        first.id,
        token_ids,
        second.finish_reason,
        second.stop_reason,
        logprobs,
        first.num_cached_tokens if first.num_cached_tokens is not None else second.num_cached_tokens,
        first.first_scheduled if first.first_scheduled is not None else second.first_scheduled,
        second.error,
        first.prompt_logprobs if first.prompt_logprobs is not None else second.prompt_logprobs,
        first.embedding or second.embedding,
    )
