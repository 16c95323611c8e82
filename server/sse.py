"""Bytes on the wire of a stream: each event is `data: <json>` and an empty line; what never changes is encoded once."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send

from .errors import ApiError, internal_error, unavailable
from .generation import Choice, Delta, Generation
from .logprobs import LogprobFormat, chat_logprobs, completion_logprobs
from .mailbox import EngineDeadError
from .parsers.parts import CallBegin, Content, Part, Reasoning
from .protocol import ChatRequest, CompletionRequest
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Streams end by themselves when the server drains; the library would cut them off at the first SIGTERM.
AppStatus.disable_automatic_graceful_drain()

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


class Events(Protocol):
    """What the events of a stream are made by, whatever API it is of."""

    def opening(self) -> bytes:
        """Before the first text."""
        ...

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """The events of one engine output, often none or one."""
        ...

    def closing(self) -> bytes:
        """After the last choice has finished."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Instead of whatever would still have come."""
        ...


class Chunks:
    """The events of one answer. Those of chat and of completions differ in what stands around the text."""

    object: str

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        request: ChatRequest | CompletionRequest,
        *,
        id: str,
        created: int,
        model: str,
    ) -> None:
        envelope = encode({"id": id, "object": self.object, "created": created, "model": model})
        self._open = b"data: " + envelope[:-1] + b',"choices":[{"index":'
        self._usage_open = b"data: " + envelope[:-1] + b',"choices":[],"usage":'
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        # OpenAI: where usage was asked for, every chunk has the field, and only the last one a value
        self._plain_close = b'}],"usage":null}\n\n' if request.include_usage else b"}]}\n\n"
        self._generation = generation
        self._tokenizer = tokenizer
        self._form = LogprobFormat.of(request)
        self._token_ids = bool(request.return_token_ids)
        # an event is due for tokens without text only where the tokens themselves are wanted
        self._every_token = self._form is not None or self._token_ids
        self._detailed = self._every_token or self._continuous_usage or generation.describes or generation.is_read
        self._unopened: set[int] = set()  # choices whose first event waits for what their prompt is described by
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

    def opening(self) -> bytes:
        """Before the first text."""
        return b"".join(map(self._prelude, self._generation.choices))

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

    def _close(self) -> bytes:
        if self._continuous_usage:
            return b'}],"usage":' + encode(self._generation.usage()) + b"}\n\n"
        return self._plain_close

    def closing(self) -> bytes:
        """After the last choice has finished."""
        if self._include_usage:
            return self._usage_open + encode(self._generation.usage()) + b"}\n\n" + DONE
        return DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE


class ChatChunks(Chunks):
    object = "chat.completion.chunk"

    def _head(self, index: int) -> bytes:
        return self._open + b'%d,"delta":{"content":' % index

    def _after(self, logprobs: bytes) -> bytes:
        return b'},"logprobs":' + logprobs + b',"finish_reason":null'

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        assert self._form is not None
        return chat_logprobs(self._tokenizer, delta, self._form)

    def _prelude(self, choice: Choice) -> bytes:
        """The role, exactly once a choice: SDKs concatenate it. Then what the answer goes on from, where it is wanted.

        A chat has one prompt: what there is to say of it comes with the role, its log-probabilities once.
        """
        close = self._close()
        extra = b""
        if self._token_ids:
            extra = b',"prompt_token_ids":' + encode(choice.prompt.token_ids)
        (report,) = self._generation.reports
        if report is not None and choice.index == 0:
            extra += b',"prompt_logprobs":' + encode(report.logprobs)
        data = b'%b%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]%b%b' % (
            self._open, choice.index, extra, close[2:],
        )  # fmt: skip
        if choice.prompt.echo:
            data += self._before_text[choice.index] + encode(choice.prompt.echo) + self._after(b"null") + close
        return data

    def _said(self, choice: Choice, delta: Delta, parts: list[Part]) -> bytes:
        """An event a part. What is said of the tokens goes with the first."""
        if not parts and not (delta.token_ids and self._every_token):
            return b""
        if len(parts) == 1 and isinstance(parts[0], Content) and not self._every_token:
            return self._before_text[choice.index] + encode(parts[0].text) + self._after(b"null") + self._close()
        close = self._close()
        data = b""
        logprobs = b"null" if delta.logprobs is None else encode(self._logprobs(delta))
        token_ids = b',"token_ids":' + encode(delta.token_ids) if self._token_ids else b""
        for part in parts or (None,):
            said = b"{}" if part is None else encode(_fields(part))
            data += b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":null%b%b' % (
                self._open, choice.index, said, logprobs, token_ids, close,
            )  # fmt: skip
            logprobs, token_ids = b"null", b""
        return data

    def _finish(self, choice: Choice, reason: str) -> bytes:
        return b'%b%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b%b' % (
            self._open, choice.index, encode(choice.ending), encode(choice.stop_reason), self._close(),
        )  # fmt: skip


def _fields(part: Part) -> dict[str, Any]:
    """SDKs put strings together and everything else in the place of what was there: id, type and name come once."""
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning": part.text, "reasoning_content": part.text}
    if isinstance(part, CallBegin):
        function = {"name": part.name, "arguments": ""}
        return {"tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


class CompletionChunks(Chunks):
    object = "text_completion"

    def _head(self, index: int) -> bytes:
        return self._open + b'%d,"text":' % index

    def _after(self, logprobs: bytes) -> bytes:
        return b',"logprobs":' + logprobs + b',"finish_reason":null,"stop_reason":null'

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        assert self._form is not None
        return completion_logprobs(self._tokenizer, delta.token_ids, delta.logprobs or (), delta.offsets, self._form)

    def opening(self) -> bytes:
        if self._generation.describes:  # several prompts are described one after the other
            self._unopened = set(range(len(self._generation.choices)))
            return b""
        return super().opening()

    def _prelude(self, choice: Choice) -> bytes:
        report = self._generation.reports[choice.index // self._generation.n]
        if report is None and not choice.prompt.echo and not self._token_ids:
            return b""
        echoed = b"null" if report is None or report.echo is None else encode(report.echo)
        data = self._before_text[choice.index] + encode(choice.prompt.echo) + self._after(echoed)
        if self._token_ids:
            data += b',"token_ids":[],"prompt_token_ids":' + encode(choice.prompt.token_ids)
        if report is not None and report.logprobs is not None:
            data += b',"prompt_logprobs":' + encode(report.logprobs)
        return data + self._close()

    def _finish(self, choice: Choice, reason: str) -> bytes:
        return b'%b%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b%b' % (
            self._open, choice.index, encode(reason), encode(choice.stop_reason), self._close(),
        )  # fmt: skip


async def events(
    generation: Generation,
    chunks: Events,
    first: tuple[Choice, Delta],
    deltas: AsyncIterator[tuple[Choice, Delta]],
    request_id: str,
) -> AsyncIterator[bytes]:
    """The whole stream. An error in one choice ends all of them: after the status line it can only be an event."""
    try:
        yield chunks.opening() + chunks.delta(*first)
        async for choice, delta in deltas:
            if data := chunks.delta(choice, delta):
                yield data
        yield chunks.closing()
    except Exception as error:
        if isinstance(error, ApiError):
            answer = error
        elif isinstance(error, EngineDeadError):
            answer = unavailable(error)
        else:
            logger.exception("request %s failed", request_id)
            answer = internal_error(request_id)
        generation.close()
        yield chunks.failure(answer)
    finally:
        generation.close()


class EventStream(EventSourceResponse):
    """A stream of encoded events. However it ends, `on_close` is called."""

    def __init__(
        self, content: AsyncIterator[bytes], on_close: Callable[[], None], headers: dict[str, str], ping: float
    ) -> None:
        super().__init__(content, headers={"cache-control": "no-cache", **headers}, sep="\n", ping=ping)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_event: Send = scope.get("state", {}).get("send_event", send)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    async def _stream_response(self, send: Send) -> None:
        """As in the library, without the cancel scope that it opens for every event: no send has a time limit here."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self.body_iterator:
            await self._send_event({"type": "http.response.body", "body": data, "more_body": True})
        async with self._send_lock:  # a ping must not follow
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})
