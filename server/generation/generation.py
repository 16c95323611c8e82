"""Prompts become engine requests, outputs become text, whoever leaves is aborted: the one reader of mailboxes."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from ...engine.link.messages import RequestOutput
from ...engine.link.plan import ADAPTER_NOT_LOADED, ADAPTER_UNUSABLE, NO_PROMPT_LOGPROBS, NOTHING_ALLOWED, TokenLogprobs
from ..client.client import Client
from ..client.mailbox import Mailboxes, MailboxLike
from ..client.routing import ANYWHERE, Route
from ..errors import ApiError, adapter_unavailable
from ..pace import Pace
from ..text.tokenizer import Tokenizer
from .choice import Choice, Delta, Prompt, TextOptions
from .window import Window

PLAIN = TextOptions()
_numbers = itertools.count()

# What a request itself has brought about, which shows only in the engine.
_OWN_DOING: dict[str, dict[str, Any]] = {
    NOTHING_ALLOWED: {"code": "nothing_allowed"}, NO_PROMPT_LOGPROBS: {"param": "prompt_logprobs"},
}  # fmt: skip


class Observer(Protocol):
    """Who counts what becomes of requests; observe/metrics.py is one."""

    generation_tokens: int

    def first_output(self, generation: Generation, choice: Choice, now: float) -> None: ...

    def more_output(self, choice: Choice, now: float, num_tokens: int) -> None: ...

    def finished(self, generation: Generation, choice: Choice, last_of_prompt: bool) -> None: ...


class Generation:
    """All choices of one request. Whoever makes one must close it: that aborts what is unfinished."""

    def __init__(
        self,
        client: Client,
        observer: Observer,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        *,
        arrival: float,
        n: int = 1,
        text: TextOptions = PLAIN,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: int = 0,
        route: Route = ANYWHERE,
        on_close: Callable[[], None] | None = None,
        model: str = "",
        adapter: str = "",
        tells_timing: bool = False,
    ) -> None:
        """Of prompts × n requests, which `submit` sends; choice i of prompt p has index p · n + i.

        `on_close` is called when nothing of this is open any more. `model` and `adapter`: what clients call those of
        the prompts; `tells_timing`: see --enable-per-request-metrics.
        """
        self.model, self.adapter = model, adapter
        self.tells_timing = tells_timing
        self.prompts = list(prompts)
        self.n = n
        self.arrival = arrival
        self.choices: list[Choice] = []
        # Of each prompt's tokens 1 …, where they were asked for: there before the first delta of its choices comes out.
        self.prompt_logprobs: list[list[TokenLogprobs] | None] = [None] * len(prompts)
        self.is_read = text.read is not None  # deltas have parts
        self._client = client
        self._observer = observer
        self._on_close = on_close
        self._tokenizer = tokenizer
        self._text = text
        self._priority = priority
        self._cache_salt = cache_salt
        self._tenant = tenant
        if len(prompts) > 1 and prompts[0].sampling.pooling is None and route == ANYWHERE:
            # To one engine: its time limits hold for all together.
            route = Route(session=f"request {next(_numbers)}", together=True)
        self._route = route
        self._num_sent = 0  # of the prompts
        # One engine has all of them where the request is for that one, or of a session.
        self._window = Window(client, one_engine=route != ANYWHERE)
        self._closed = False
        self._cancelled = False
        self.ended: ApiError | None = None  # what is not sent yet is not sent any more: why
        self._unfinished = [n] * len(prompts)  # choices of each prompt
        # Tokens so far, summed up as they come: a stream may tell them with each event, of any number of choices.
        self._num_prompt = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_cached = self._num_output = self._num_reasoning = 0
        self.abort_reason = "disconnect"  # why close() would abort what is unfinished
        self.failure: ApiError | None = None  # that a stream ended with, after a status of 200
        self.on_abort: Callable[[], ApiError] | None = None  # what to answer when the engine aborts a choice

    async def submit(self) -> None:
        """In turns: there may be thousands. Of inputs for vectors as many as keep the engine busy: whoever comes later
        must not wait for all of them, and `deltas` sends the others.

        Raises EngineDeadError; whatever it raises, this is closed then.
        """
        pace = Pace()
        mailboxes: Sequence[MailboxLike] = ()
        try:
            while (prompt := self._next()) is not None:
                mailboxes = self._client.submit_choices(
                    self.n, prompt.token_ids, prompt.sampling, priority=self._priority, cache_salt=self._cache_salt,
                    tenant=self._tenant, route=self._route, media=prompt.media,
                )  # fmt: skip
                if prompt.media:  # whose pixels the engine keeps for as long as the answer takes, and nobody here
                    prompt = self.prompts[self._num_sent - 1] = replace(prompt, media=())
                for mailbox in mailboxes:
                    self.choices.append(self._text.choice(len(self.choices), prompt, mailbox, self._tokenizer))
                    await pace.rest()
        except BaseException:
            self.close()
            self._client.abort(mailboxes)  # of which not all have a choice
            raise

    def _next(self) -> Prompt | None:
        """What is to be sent now. Raises ApiError where there would be more, and nobody wants it."""
        if self._num_sent == len(self.prompts):
            return None
        if self.ended is not None:
            raise self.ended
        prompt = self.prompts[self._num_sent]
        if prompt.sampling.pooling is not None and self._window.is_full():
            return None
        self._num_sent += 1
        self._window.opened(len(prompt.token_ids))
        return prompt

    @property
    def scores_prompts(self) -> bool:
        """Whether `prompt_logprobs` get filled."""
        return self.prompts[0].sampling.prompt_logprobs is not None

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What the engine says, as it comes, until every choice is finished. Raises ApiError and EngineDeadError."""
        if len(self.prompts) * self.n == 1:
            (choice,) = self.choices
            mailbox = choice.mailbox
            while choice.finish_reason is None:
                if (output := mailbox.take()) is None:
                    await mailbox.news()
                else:
                    yield choice, self._feed(choice, output)
            return
        # Whoever reads slowly finds the outputs merged: that costs no memory.
        news = Mailboxes([choice.mailbox for choice in self.choices])
        # The first choice of a prompt brings its log-probabilities; the others, here in the order of their news, wait.
        early: dict[int, list[int]] = {i: [] for i in range(len(self.prompts))} if self.scores_prompts else {}
        unfinished, pace = len(self.prompts) * self.n, Pace()
        while unfinished:
            index = await news.next()
            choice, prompt = self.choices[index], index // self.n
            if choice.finish_reason is not None:
                continue
            if prompt in early and index % self.n:
                early[prompt].append(index)
                continue
            if (output := choice.mailbox.take()) is None:
                continue
            delta = self._feed(choice, output)
            for waiting in early.pop(prompt, ()):
                news.put_back(waiting)
            unfinished -= delta.finish_reason is not None
            yield choice, delta
            if self._num_sent < len(self.prompts):
                known = len(self.choices)
                await self.submit()
                for other in self.choices[known:]:
                    news.add(other.mailbox)
            await pace.rest()

    def _feed(self, choice: Choice, output: RequestOutput) -> Delta:
        if output.finish_reason is not None:
            if output.finish_reason == "abort" and self._cancelled:
                return self._end_cancelled(choice, output)
            if output.finish_reason in ("error", "abort"):
                if not output.token_ids:
                    return self._failed(choice, output)
                # Tokens of one step, or of several that were read late: they come first, and may end the choice.
                choice.mailbox.put(RequestOutput(output.id, [], output.finish_reason, error=output.error))
                output = msgspec.structs.replace(output, finish_reason=None, error=None)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[choice.index // self.n] = output.prompt_logprobs
        now, num_before = time.monotonic(), self._num_output
        delta = self._add(choice, output)
        num_new = self._num_output - num_before  # of which the delta may hide some
        if choice.last_token is None:
            choice.first_token = now
            choice.first_scheduled = output.first_scheduled
            choice.num_cached_tokens = output.num_cached_tokens or 0
            if choice.index % self.n == 0:
                # of each prompt once: the others share its blocks, which saves nothing that the client paid for
                self._num_cached += choice.num_cached_tokens
            self._observer.first_output(self, choice, now)
        elif num_new:
            self._observer.more_output(choice, now, num_new)
        choice.last_token = now
        self._observer.generation_tokens += num_new
        if choice.finish_reason is not None:
            if choice.finish_reason != output.finish_reason:
                self._client.abort([choice.mailbox])  # a stop string: the engine does not know it
            self._finish(choice, choice.finish_reason)
        return delta

    def _failed(self, choice: Choice, output: RequestOutput) -> Delta:
        """The engine gave up on one choice: that ends all of them, which have no reader any more. Raises ApiError."""
        if output.finish_reason == "error":
            self.abort_reason = "error"
            self._finish(choice, "error")
            if output.error is not None and output.error in _OWN_DOING:
                raise ApiError(400, f"{output.error[0].upper()}{output.error[1:]}.", **_OWN_DOING[output.error])
            if output.error in (ADAPTER_NOT_LOADED, ADAPTER_UNUSABLE):
                raise adapter_unavailable(self.adapter)
            raise ApiError(500, f"The engine failed on this request: {output.error}.", type="server_error")
        self.abort_reason = "error" if self.on_abort is None else "timeout"
        self._finish(choice, "abort")
        if self.on_abort is not None:
            raise self.on_abort()
        raise ApiError(503, "The engine aborted this request.", type="service_unavailable_error")

    def _add(self, choice: Choice, output: RequestOutput) -> Delta:
        num_tokens, num_reasoning = choice.num_tokens, choice.num_reasoning_tokens
        delta = choice.feed(output)
        self._num_output += choice.num_tokens - num_tokens
        self._num_reasoning += choice.num_reasoning_tokens - num_reasoning
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
        self.ended = ApiError(400, "The request was cancelled.", code="cancelled")
        self.abort_reason = "cancel"
        mailboxes = self.awaited
        self._client.abort(mailboxes)
        for mailbox in mailboxes:
            mailbox.put(RequestOutput(0, [], "abort"))

    def _end_cancelled(self, choice: Choice, output: RequestOutput) -> Delta:
        num_before = self._num_output
        delta = self._add(choice, output)
        self._observer.generation_tokens += self._num_output - num_before
        if choice.finish_reason == "abort":
            choice.stop_reason = "abort"
        self._finish(choice, choice.finish_reason or "abort")
        choice.finish_reason = "stop"
        return delta._replace(finish_reason="stop")

    def _finish(self, choice: Choice, reason: str) -> None:
        choice.finish_reason = reason
        prompt = choice.index // self.n
        self._unfinished[prompt] -= 1
        if not self._unfinished[prompt]:
            self._window.closed(len(choice.prompt.token_ids))
        self._observer.finished(self, choice, last_of_prompt=self._unfinished[prompt] == 0)

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
        open_choices = [choice for choice in self.choices if choice.finish_reason is None]
        if open_choices:
            self._client.abort([choice.mailbox for choice in open_choices])
            if any(choice.mailbox.lost for choice in open_choices):
                self.abort_reason = "error"  # of what other engines have
            for choice in open_choices:
                self._finish(choice, "error" if choice.mailbox.lost else "abort")

    def usage(self) -> dict[str, Any]:
        """So far, over all choices. Costs the same however many there are."""
        return {
            "prompt_tokens": self._num_prompt,
            "total_tokens": self._num_prompt + self._num_output,
            "completion_tokens": self._num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
            "completion_tokens_details": {"reasoning_tokens": self._num_reasoning},
        }
