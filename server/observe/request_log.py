"""What one request was, once it is over: a line in the log, and what the log says of its text when asked to."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from ...engine.link.logs import escape
from ..generation.choice import Choice, Delta
from ..generation.generation import Generation
from ..generation.timing import Timing
from ..options.config import ServerConfig
from ..parsers.parts import written
from ..text.tokenizer import Tokenizer

logger = logging.getLogger("vserve.request")

MAX_PATH = 200  # characters of an unknown path


class Finished(NamedTuple):
    """An HTTP request that is over."""

    id: str
    client: str  # address; "" on a Unix socket
    method: str
    route: str  # the route's pattern; "none" where no route matched
    path: str
    status: int
    started: float  # time.time()
    seconds: float
    headers: dict[bytes, bytes]
    generation: Generation | None  # where tokens were generated
    key: str = ""  # the name of the key that it brought, where the server knows that


class _Line:
    """What is said of a request, found out by who writes it down: not while others wait for their answers."""

    def __init__(self, request: Finished) -> None:
        self._request = request
        self._fields: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        if self._fields is not None:
            return self._fields
        request = self._request
        fields: dict[str, Any] = {
            "request_id": request.id,
            "client": request.client,
            "method": request.method,
            "route": request.route,
            "status": request.status,
            "seconds": round(request.seconds, 6),
        }
        place = request.route
        if request.route == "none":
            place = fields["path"] = escape(request.path[:MAX_PATH])
        fields["message"] = f"{request.method} {place} {request.status}"  # the rest has its own fields in JSON
        if request.key:
            fields["key"] = request.key
        if request.generation is not None:
            timing = Timing.of(request.generation)
            fields["model"] = request.generation.model
            if request.generation.adapter:
                fields["adapter"] = request.generation.adapter
            numbers = {
                "queue_seconds": timing.queue, "ttft_seconds": timing.ttft, "tpot_seconds": timing.tpot,
            }  # fmt: skip
            fields["prompt_tokens"] = timing.prompt_tokens
            fields["cached_tokens"] = timing.cached_tokens
            fields["completion_tokens"] = timing.completion_tokens
            for name, value in numbers.items():
                if value is not None:
                    fields[name] = round(value, 6)
            fields["finish_reason"] = ",".join(timing.finish_reasons)
        if request.generation is not None and (failure := request.generation.failure) is not None:
            fields["error"] = failure.message
        self._fields = fields
        return fields

    def __str__(self) -> str:
        """For people."""
        said = self.fields()
        text = f"{said['client'] or 'unix'} {said['message']} in {said['seconds']:.3f} s, {said['request_id']}"
        if "key" in said:
            text += f", key {escape(said['key'])}"
        if "finish_reason" in said:
            text += f": {escape(said.get('adapter') or said['model'])}"
            text += f", {said['prompt_tokens']} ({said['cached_tokens']} cached) + {said['completion_tokens']} tokens"
            for name, title in (("queue_seconds", "queue"), ("ttft_seconds", "TTFT"), ("tpot_seconds", "TPOT")):
                if name in said:
                    text += f", {title} {1000 * said[name]:.1f} ms"
            text += f", {said['finish_reason']}"
        if "error" in said:
            text += f"; its stream ended with an error: {escape(said['error'])}"
        return text


class RequestLog:
    def __init__(self, config: ServerConfig) -> None:
        self.lines = config.access_log
        self.prompts = config.enable_log_requests
        self.outputs = config.enable_log_outputs
        self._max_length = config.max_log_len
        self._silent = {path.strip() for path in config.disable_access_log_for_endpoints.split(",") if path.strip()}

    def finished(self, request: Finished) -> None:
        if not self.lines or request.route in self._silent or request.path in self._silent:
            return
        if request.route.startswith("/ui/"):  # a page is a dozen files
            return
        failure = None if request.generation is None else request.generation.failure
        level = logging.WARNING if request.status >= 500 or failure is not None else logging.INFO
        if not logger.isEnabledFor(level):
            return
        line = _Line(request)
        # logger.log would look through the stack for who has called it.
        logger.handle(
            logger.makeRecord(logger.name, level, __file__, 0, "%s", (line,), None, extra={"fields": line.fields})
        )

    # ---- text, only when asked for ----

    def prompt(self, request_id: str, generation: Generation, tokenizer: Tokenizer) -> None:
        """What the model reads, special tokens included, and how it is to answer."""
        for prompt in generation.prompts:
            ids = prompt.token_ids if self._max_length is None else prompt.token_ids[: self._max_length]
            text = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
            self._text("reads", request_id, text, "prompt", sampling=str(prompt.sampling), n=generation.n)

    async def listen(
        self, request_id: str, deltas: AsyncIterator[tuple[Choice, Delta]]
    ) -> AsyncIterator[tuple[Choice, Delta]]:
        """Passes the deltas on, and logs each choice's text when it is whole or nobody waits for it any more."""
        pieces: dict[Choice, list[str]] = {}
        try:
            async for choice, delta in deltas:
                pieces.setdefault(choice, []).append(delta.text if delta.parts is None else written(delta.parts))
                yield choice, delta
        finally:
            for choice, parts in pieces.items():
                self._text(
                    "answers", request_id, "".join(parts), "output",
                    index=choice.index, finish_reason=choice.finish_reason or "abort",
                )  # fmt: skip

    def _text(self, verb: str, request_id: str, text: str, name: str, **fields: Any) -> None:
        text = text[: self._max_length]
        rest = ", ".join(f"{key} {value}" for key, value in fields.items())
        logger.info(
            "%s %s %s; %s", request_id, verb, escape(text), rest,
            extra={"fields": {"request_id": request_id, name: text, **fields}},
        )  # fmt: skip
