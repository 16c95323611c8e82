"""The chunks of chat and completions: each is `data: <json>` and an empty line; what never changes is encoded once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..errors import ApiError
from ..generation import timing
from ..generation.choice import Choice, Delta, Prompt
from ..generation.generation import Generation
from ..generation.logprobs import LogprobFormat, PromptReport
from ..parsers.parts import Part
from ..text.tokenizer import Tokenizer
from ..wire.requests import ChatRequest, CompletionRequest

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


class Chunks:
    """The events of one answer. Those of chat and of completions differ in what stands around the text."""

    object: str

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        request: ChatRequest | CompletionRequest,
        reports: Sequence[PromptReport | None],
        *,
        id: str,
        created: int,
        model: str,
    ) -> None:
        """`reports`: of each prompt, where `generation.scores_prompts`; there before its first delta."""
        envelope = encode({"id": id, "object": self.object, "created": created, "model": model})
        self._open = b"data: " + envelope[:-1] + b',"choices":[{"index":'
        self._usage_open = b"data: " + envelope[:-1] + b',"choices":[],"usage":'
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        # OpenAI: where usage was asked for, every chunk has the field, and only the last one a value
        self._plain_close = b'}],"usage":null}\n\n' if request.include_usage else b"}]}\n\n"
        self._generation = generation
        self._reports = reports
        self._tokenizer = tokenizer
        self._form = LogprobFormat.of(request)
        self._token_ids = bool(request.return_token_ids)
        # an event is due for tokens without text only where the tokens themselves are wanted
        self._every_token = self._form is not None or self._token_ids
        self._detailed = self._every_token or self._continuous_usage or generation.scores_prompts or generation.is_read
        self._unopened: set[int] = set()  # choices whose first event waits for what their prompt is described by
        self._encoded: tuple[Prompt | None, bytes] = (None, b"")  # the prompt of which it was asked last, and its ids
        self._before_text = [self._head(i) for i in range(len(generation.choices))]
        self._after_text = self._after(b"null") + self._plain_close

    def _head(self, index: int) -> bytes:
        raise NotImplementedError

    def _after(self, logprobs: bytes) -> bytes:
        raise NotImplementedError

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _prelude(self, choice: Choice) -> bytes:
        """What a choice says before its first text."""
        raise NotImplementedError

    def _said(self, choice: Choice, delta: Delta, parts: list[Part]) -> bytes:
        """The events of a choice that is more than text."""
        raise NotImplementedError

    def _finish(self, choice: Choice, reason: str) -> bytes:
        raise NotImplementedError

    def openings(self) -> Iterable[bytes]:
        """Before the first text, a piece for each choice."""
        return map(self._prelude, self._generation.choices)

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """The events of one engine output, often none or one."""
        if not self._detailed:
            data = self._before_text[choice.index] + encode(delta.text) + self._after_text if delta.text else b""
        else:
            data = self._details(choice, delta)
        if delta.finish_reason is not None:
            data += self._finish(choice, delta.finish_reason)
        return data

    def _details(self, choice: Choice, delta: Delta) -> bytes:
        """The same with all that a request may ask for beside the text."""
        data = b""
        if choice.index in self._unopened:
            self._unopened.remove(choice.index)
            data = self._prelude(choice)
        if delta.parts is not None:
            return data + self._said(choice, delta, delta.parts)
        if delta.text or (delta.token_ids and self._every_token):
            logprobs = b"null" if delta.logprobs is None else encode(self._logprobs(delta))
            token_ids = b',"token_ids":' + encode(delta.token_ids) if self._token_ids else b""
            after = self._after(logprobs) + token_ids + self._close()
            data += self._before_text[choice.index] + encode(delta.text) + after
        return data

    def _close(self, *, opening: bool = False) -> bytes:
        """`opening`: of an event before any output, which the engine has sent already."""
        if self._continuous_usage:
            usage = self._generation.usage()
            if opening:
                usage |= {"total_tokens": usage["prompt_tokens"], "completion_tokens": 0}
                usage["completion_tokens_details"] = {"reasoning_tokens": 0}
            return b'}],"usage":' + encode(usage) + b"}\n\n"
        return self._plain_close

    def _prompt_ids(self, prompt: Prompt) -> bytes:
        """Each of many choices says them."""
        if self._encoded[0] is not prompt:
            self._encoded = (prompt, encode(list(prompt.token_ids)))
        return self._encoded[1]

    def closing(self) -> bytes:
        """After the last choice has finished."""
        if self._include_usage:
            measured = b"".join(
                b',"%b":%b' % (name.encode(), encode(it)) for name, it in timing.told(self._generation).items()
            )
            return self._usage_open + encode(self._generation.usage()) + measured + b"}\n\n" + DONE
        return DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE
