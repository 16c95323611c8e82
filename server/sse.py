"""Bytes on the wire of a stream: each event is `data: <json>` and an empty line; what never changes is encoded once."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send

from .engine_client import EngineDeadError
from .errors import ApiError, engine_dead, internal_error
from .generation import Choice, Delta, Generation
from .logprobs import chat_logprobs, completion_logprobs
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Streams end by themselves when the server drains; the library would cut them off at the first SIGTERM.
AppStatus.disable_automatic_graceful_drain()

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


class Chunks:
    """The events of one answer. Those of chat and of completions differ in what stands around the text."""

    object: str

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        id: str,
        created: int,
        model: str,
        include_usage: bool,
        num_logprobs: int | None,
        token_ids: bool,
    ) -> None:
        envelope = encode({"id": id, "object": self.object, "created": created, "model": model})
        self._open = b"data: " + envelope[:-1] + b',"choices":[{"index":'
        self._usage_open = b"data: " + envelope[:-1] + b',"choices":[],"usage":'
        # OpenAI: where usage was asked for, every chunk has the field, and only the last one a value
        self._close = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._include_usage = include_usage
        self._generation = generation
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._token_ids = token_ids
        # an event is due for tokens without text only where the tokens themselves are wanted
        self._every_token = num_logprobs is not None or token_ids
        self._before_text = [self._head(i) for i in range(len(generation.choices))]
        self._after_text = self._after(b"null") + self._close

    def _head(self, index: int) -> bytes:
        raise NotImplementedError

    def _after(self, logprobs: bytes) -> bytes:
        raise NotImplementedError

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _finish(self, choice: Choice, reason: str) -> bytes:
        raise NotImplementedError

    def opening(self) -> bytes:
        """Before the first text."""
        return b""

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """The events of one engine output, often none or one."""
        if not self._every_token:
            data = self._before_text[choice.index] + encode(delta.text) + self._after_text if delta.text else b""
        elif delta.token_ids or delta.text:
            logprobs = b"null" if delta.logprobs is None else encode(self._logprobs(delta))
            token_ids = b',"token_ids":' + encode(delta.token_ids) if self._token_ids else b""
            after = self._after(logprobs) + token_ids + self._close
            data = self._before_text[choice.index] + encode(delta.text) + after
        else:
            data = b""
        if delta.finish_reason is not None:
            data += self._finish(choice, delta.finish_reason)
        return data

    def closing(self) -> bytes:
        """After the last choice has finished."""
        if self._include_usage:
            return self._usage_open + encode(self._generation.usage()) + b"}\n\n" + DONE
        return DONE


class ChatChunks(Chunks):
    object = "chat.completion.chunk"

    def _head(self, index: int) -> bytes:
        return self._open + b'%d,"delta":{"content":' % index

    def _after(self, logprobs: bytes) -> bytes:
        return b'},"logprobs":' + logprobs + b',"finish_reason":null'

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        assert self._num_logprobs is not None
        return chat_logprobs(self._tokenizer, delta, self._num_logprobs)

    def _finish(self, choice: Choice, reason: str) -> bytes:
        return b'%b%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b%b' % (
            self._open, choice.index, encode(reason), encode(choice.stop_reason), self._close,
        )  # fmt: skip

    def opening(self) -> bytes:
        """The role, exactly once a choice: SDKs concatenate it."""
        close = self._close
        if self._token_ids:
            prompt = encode(self._generation.prompts[0].token_ids)
            close = close.replace(b"}]", b'}],"prompt_token_ids":' + prompt, 1)
        role = b'%b%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null%b'
        return b"".join(role % (self._open, i, close) for i in range(len(self._generation.choices)))


class CompletionChunks(Chunks):
    object = "text_completion"

    def _head(self, index: int) -> bytes:
        return self._open + b'%d,"text":' % index

    def _after(self, logprobs: bytes) -> bytes:
        return b',"logprobs":' + logprobs + b',"finish_reason":null,"stop_reason":null'

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        assert self._num_logprobs is not None
        return completion_logprobs(self._tokenizer, delta, self._num_logprobs)

    def opening(self) -> bytes:
        if not self._token_ids:
            return b""
        chunk = b'%b"",%b,"token_ids":[],"prompt_token_ids":%b%b'
        return b"".join(
            chunk % (self._head(choice.index), self._after(b"null")[1:], encode(choice.prompt.token_ids), self._close)
            for choice in self._generation.choices
        )

    def _finish(self, choice: Choice, reason: str) -> bytes:
        return b'%b%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b%b' % (
            self._open, choice.index, encode(reason), encode(choice.stop_reason), self._close,
        )  # fmt: skip


async def events(
    generation: Generation,
    chunks: Chunks,
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
            answer = engine_dead(str(error))
        else:
            logger.exception("request %s failed", request_id)
            answer = internal_error(request_id)
        generation.close()
        yield b"data: " + answer.body() + b"\n\n" + DONE
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
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    async def _stream_response(self, send: Send) -> None:
        """As in the library, without the cancel scope that it opens for every event: no send has a time limit here."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self.body_iterator:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        async with self._send_lock:  # a ping must not follow
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})
