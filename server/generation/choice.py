"""One answer in the making: engine outputs become text, until a stop string, a limit or the engine ends it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from ...engine.link.media import MediaItem
from ...engine.link.messages import RequestOutput
from ...engine.link.plan import TokenLogprobs
from ...engine.link.sampling_params import SamplingParams
from ..client.mailbox import MailboxLike
from ..parsers.parts import CallBegin, Content, Part, Reasoning, merged
from ..parsers.reader import Reader
from ..text.detokenizer import Detokenizer, NoText, StopStrings, TightDetokenizer
from ..text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine; each of its n choices becomes one engine request."""

    token_ids: Sequence[int]  # int32 in an array
    sampling: SamplingParams
    echo: str = ""  # what each answer begins with
    media: tuple[MediaItem, ...] = ()  # in the order of their places

    def with_adapter(self, id: int) -> Prompt:
        return replace(self, sampling=msgspec.structs.replace(self.sampling, adapter=id))

    def with_grammar(self, key: str) -> Prompt:
        return replace(self, sampling=msgspec.structs.replace(self.sampling, grammar=key))


@dataclass(frozen=True, slots=True)
class Repetition:
    """A pattern of `shortest` to `longest` tokens that comes `count` times in a row."""

    shortest: int
    longest: int
    count: int


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to tell reasoning and tool calls from an answer's text."""

    reader: Callable[[], Reader]
    markers: frozenset[str] = frozenset()  # special tokens that the reader must see
    include_reasoning: bool = True
    max_calls: int | None = None  # later ones are left out
    ending: str = "tool_calls"  # the finish reason of an answer that calls


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become the text of an answer."""

    stops: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    repetition: Repetition | None = None
    prompt_only: bool = False  # what is generated is not shown
    read: ReadOptions | None = None

    def detokenizer(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Detokenizer:
        if not self.detokenize:
            return NoText()
        if not self.skip_special_tokens and not self.spaces_between_special_tokens:
            return TightDetokenizer(tokenizer, prompt)
        return Detokenizer(tokenizer, prompt, self.skip_special_tokens)

    def choice(self, index: int, prompt: Prompt, mailbox: MailboxLike, tokenizer: Tokenizer) -> Choice:
        if self.read is not None:
            read = WatchedReadChoice if self.repetition else ReadChoice
            return read(index, prompt, mailbox, Detokenizer(tokenizer, prompt.token_ids, True), self, tokenizer)
        kind = PromptOnly if self.prompt_only else WatchedChoice if self.repetition else Choice
        return kind(index, prompt, mailbox, self.detokenizer(tokenizer, prompt.token_ids), self)


class Delta(NamedTuple):
    """What one engine output adds to a choice."""

    text: str
    token_ids: list[int]  # those that are shown
    logprobs: list[TokenLogprobs] | None  # one a token, when asked
    offsets: list[int] | None  # where each token's text begins in the choice's text, with logprobs
    finish_reason: str | None = None  # with the choice's last delta
    parts: list[Part] | None = None  # of a choice that is read; `text` is then their content


class Choice:
    """One engine request, its text and its clock."""

    __slots__ = (
        "_detokenizer", "_include_stop", "_min_tokens", "_num_chars", "_stops", "_wants_offsets", "finish_reason",
        "first_scheduled", "first_token", "index", "last_token", "mailbox", "num_cached_tokens", "num_tokens",
        "prompt", "stop_reason", "submitted",
    )  # fmt: skip

    num_reasoning_tokens = 0

    def __init__(
        self, index: int, prompt: Prompt, mailbox: MailboxLike, detokenizer: Detokenizer, options: TextOptions
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
        self._stops = StopStrings(options.stops, options.include_stop) if options.stops else None
        self._include_stop = options.include_stop
        self._min_tokens = prompt.sampling.min_tokens
        self._wants_offsets = prompt.sampling.logprobs is not None
        self._num_chars = len(prompt.echo)

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

    @property
    def ending(self) -> str | None:
        """The finish reason as the client is told it."""
        return self.finish_reason

    def _release(self, piece: str) -> str:
        """What of the text so far may go out; finishes the choice when it completes a stop string."""
        self._num_chars += len(piece)
        if self._stops is None:
            return piece
        piece = self._stops.push(piece, armed=self.num_tokens > self._min_tokens)
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
        return piece


class WatchedChoice(Choice):
    """Ends where its tokens only repeat themselves."""

    __slots__ = ("_history", "_num_seen", "_repetition", "_runs")

    def __init__(
        self, index: int, prompt: Prompt, mailbox: MailboxLike, detokenizer: Detokenizer, options: TextOptions,
        *more: Tokenizer,
    ) -> None:  # fmt: skip
        super().__init__(index, prompt, mailbox, detokenizer, options, *more)
        assert options.repetition is not None
        self._repetition = options.repetition
        self._history: deque[int] = deque(maxlen=options.repetition.longest)  # the latest token first
        self._num_seen = 0
        # of each distance: how many of the latest tokens in a row equal the one so far before them
        self._runs = [0] * (options.repetition.longest - options.repetition.shortest + 1)

    def feed(self, output: RequestOutput) -> Delta:
        for position, token_id in enumerate(output.token_ids):
            if self._repeats(token_id):
                return self._end(output, position + 1)
        return super().feed(output)

    def _repeats(self, token_id: int) -> bool:
        shortest, count = self._repetition.shortest, self._repetition.count
        self._num_seen += 1
        found = False
        for i in range(len(self._runs)):
            size = shortest + i
            if size <= len(self._history) and self._history[size - 1] == token_id:
                self._runs[i] += 1
                found = found or self._runs[i] >= size * (count - 1)
            else:
                self._runs[i] = 0
        self._history.appendleft(token_id)
        return found and self._num_seen > self._min_tokens

    def _end(self, output: RequestOutput, used: int) -> Delta:
        logprobs = output.logprobs and output.logprobs[:used]
        # "length": the last token belongs to the text, as it does not where the engine says "stop"
        cut = RequestOutput(output.id, output.token_ids[:used], "length", logprobs=logprobs)
        delta = super().feed(cut)
        if self.finish_reason == "length":  # and no stop string was earlier
            self.finish_reason, self.stop_reason = "stop", "repetition"
        return delta._replace(finish_reason="stop")


class PromptOnly(Choice):
    """An answer that says nothing: the engine generates a token because it must, and it is not shown."""

    __slots__ = ()

    def feed(self, output: RequestOutput) -> Delta:
        self.finish_reason = "length"
        return Delta("", [], None, None, "length")


class ReadChoice(Choice):
    """An answer of which reasoning and tool calls are told apart. Stop strings count in its content only."""

    def __init__(
        self, index: int, prompt: Prompt, mailbox: MailboxLike, detokenizer: Detokenizer, options: TextOptions,
        tokenizer: Tokenizer,
    ) -> None:  # fmt: skip
        super().__init__(index, prompt, mailbox, detokenizer, options)
        assert options.read is not None
        self.num_calls = 0
        self._options = options.read
        self._reader = options.read.reader()
        self._special = tokenizer.special
        self._shown = options.read.markers if options.skip_special_tokens else tokenizer.special_texts

    @property
    def ending(self) -> str | None:
        return self._options.ending if self.num_calls and self.finish_reason == "stop" else self.finish_reason

    def feed(self, output: RequestOutput) -> Delta:
        token_ids, logprobs, finish = output.token_ids, output.logprobs, output.finish_reason
        num_visible = len(token_ids) - 1 if finish == "stop" and not self._include_stop else len(token_ids)
        parts: list[Part] = []
        hidden: set[int] = set()  # positions of tokens that nobody is told of
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if position >= num_visible:
                continue
            thinking = self._reader.thinking
            self._keep(parts, self._read(token_id))
            # White space before a call goes with it; where it ends the answer, no call can follow.
            space = "" if self._stops is None or self.finish_reason is not None else self._reader.held_space
            if space and self._stops is not None and self._stops.completes(space, self.num_tokens > self._min_tokens):
                self._keep(parts, (Content(space),))
            if thinking or self._reader.thinking:
                self.num_reasoning_tokens += 1
                if not self._options.include_reasoning:
                    hidden.add(position)
            if self.finish_reason is not None:
                token_ids, logprobs = token_ids[: position + 1], logprobs and logprobs[: position + 1]
                break
        if hidden:
            token_ids = [token for i, token in enumerate(token_ids) if i not in hidden]
            logprobs = logprobs and [entry for i, entry in enumerate(logprobs) if i not in hidden]
        if self.finish_reason is not None:
            return self._delta(parts, token_ids, logprobs, "stop")
        if finish is not None:
            self._keep(parts, self._reader.feed(self._detokenizer.flush()))
            self._keep(parts, self._reader.finish())
            if self.finish_reason is None:
                self._break_off(parts)
                self.finish_reason, self.stop_reason = finish, output.stop_reason
        return self._delta(parts, token_ids, logprobs, self.finish_reason)

    def _read(self, token_id: int) -> Sequence[Part]:
        special = self._special.get(token_id)
        if special is None:
            text = self._detokenizer.feed(token_id)
        else:
            text = self._detokenizer.interrupt() + (special if special in self._shown else "")
        return self._reader.feed(text) if text else ()

    def _keep(self, parts: list[Part], new: Sequence[Part]) -> None:
        """What of these may go out; finishes the choice when a stop string is complete."""
        for part in new:
            if self.finish_reason is not None:
                return
            if isinstance(part, Content):
                if text := self._release(part.text):
                    parts.append(Content(text))
            elif isinstance(part, Reasoning):
                if self._options.include_reasoning:
                    parts.append(part)
            elif self._options.max_calls is None or part.index < self._options.max_calls:
                self._break_off(parts)
                self.num_calls += isinstance(part, CallBegin)
                parts.append(part)

    def _break_off(self, parts: list[Part]) -> None:
        """The content ends, or is interrupted: nothing can complete a stop string any more."""
        if self._stops is not None and (text := self._stops.flush()):
            parts.append(Content(text))

    def _delta(
        self, parts: list[Part], token_ids: list[int], logprobs: list[TokenLogprobs] | None, reason: str | None
    ) -> Delta:
        text = "".join(part.text for part in parts if isinstance(part, Content))
        return Delta(text, token_ids, logprobs, None, reason, merged(parts))


class WatchedReadChoice(WatchedChoice, ReadChoice):
    """Both at once."""
