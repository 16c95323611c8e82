"""An answer whose first bytes are there, and what it says of the servers that were not asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum, auto

import httpx
import msgspec

from ..errors import CODE_HEADER, ApiError

LARGEST_REFUSAL = 1 << 20  # bytes; what is larger is read by the client alone
_READ = frozenset((400, 404, 413, 429, 502, 503, 504))
_FULL = frozenset(("queue_full", "too_many_bodies"))  # limits of a key are told to its client, who has to keep to them
_TOO_LONG = "This model's maximum context length is "  # of vLLM, which has no code for it


class Verdict(Enum):
    """Of a request at one server."""

    FINAL = auto()  # the answer, or a refusal that any of them would say
    MISSING = auto()  # it has not what the request is about
    BUSY = auto()  # nothing has begun there
    TOO_LONG = auto()  # for its context
    DIED = auto()  # its engine, of this request or beside it
    LOST = auto()  # it may have been answered, and nobody will say how


@dataclass
class Begun:
    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes
    rest: AsyncIterator[bytes]
    answer: httpx.Response

    @property
    def is_stream(self) -> bool:
        return self.answer.headers.get("content-type", "").startswith("text/event-stream")

    async def verdict(self) -> Verdict:
        """Reads a refusal to its end. Raises httpx.TransportError."""
        if self.status not in _READ:
            return Verdict.FINAL
        async for chunk in self.rest:
            self.first += chunk
            if len(self.first) > LARGEST_REFUSAL:
                return Verdict.FINAL
        self.rest = _nothing()
        code, message = self._said()
        if self.status == 404 or code == "previous_response_not_found":
            return Verdict.MISSING
        if self.status == 413 or code == "context_length_exceeded" or message.startswith(_TOO_LONG):
            return Verdict.TOO_LONG
        if self.status == 503:
            return Verdict.DIED if code == "engine_dead" else Verdict.BUSY
        if self.status in (502, 504):
            return Verdict.LOST
        return Verdict.BUSY if code in _FULL else Verdict.FINAL

    def _said(self) -> tuple[str, str]:
        """An error's code, and its message."""
        try:
            error = msgspec.json.decode(self.first)["error"]
            code, message = self.answer.headers.get(CODE_HEADER) or error.get("code"), error.get("message")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, KeyError, AttributeError):
            return "", ""
        return str(code), str(message)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def lost(is_stored: bool) -> ApiError:
    """Its server was, before it had begun to answer. `is_stored`: it would be."""
    message = (
        "The connection to the server broke before its answer began. No other server was asked, since the answer may "
        "have been made and stored; with 'store': false one is."
        if is_stored
        else "The connection to the server broke before its answer began. Such a request is sent on once at most: it "
        "may be what ends servers."
    )
    return ApiError(502, message, type="server_error", code="server_lost")
