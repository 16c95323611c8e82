"""The lines of a file of requests, in OpenAI's batch format: read, and judged before anything is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

URLS = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v2/embed",
    "/classify",
    "/pooling",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)


class BatchError(Exception):
    """The file of requests has none, or a line of it is no request. The message names the line."""


@dataclass(frozen=True)
class Line:
    """One request of a batch, or what is wrong with it."""

    custom_id: str | None
    url: str = ""
    body: bytes = b""  # as it stands in the line: who answers it reads it
    problem: str | None = None


def places(text: bytes) -> Iterator[tuple[int, int, int]]:
    """(number, start, end) of each line that is not empty."""
    start, number = 0, 0
    while start < len(text):
        number += 1
        end = text.find(b"\n", start)
        end = len(text) if end < 0 else end
        if text[start:end].strip():
            yield number, start, end
        start = end + 1


_OFF = (b"null", b"false")


def read_line(line: bytes, where: str) -> Line:
    """`where`: what messages call it. No value is made of what is within its body: that may be large."""
    custom_id: str | None = None
    try:
        try:
            line.decode()
            request = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        except UnicodeDecodeError as error:
            raise BatchError(f"{where} is not text in UTF-8 ({error})") from None
        except msgspec.ValidationError:  # an array, or a single value
            request = {}
        except (msgspec.DecodeError, RecursionError) as error:
            raise BatchError(f"{where} is no JSON ({error})") from None
        custom_id, method, url = (_text(request.get(name)) for name in ("custom_id", "method", "url"))
        if custom_id is None:
            raise BatchError(f"{where} has no 'custom_id', a string that its answer will carry")
        if ("method" in request and method != "POST") or url not in URLS:
            raise BatchError(f"{where}: method must be POST, and url one of {', '.join(URLS)}")
        try:
            body = msgspec.json.decode(request.get("body", b""), type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError):
            raise BatchError(f"{where} has no 'body', the object that would be posted") from None
        if bytes(body.get("stream", b"null")) not in _OFF:
            raise BatchError(f"{where} has 'stream': leave it out, a batch has whole answers")
        if bytes(body.get("background", b"null")) not in _OFF:
            raise BatchError(f"{where} has 'background': leave it out, a batch waits for its answers")
        if (_text(body.get("encoding_format")) or "").startswith("bytes"):
            raise BatchError(f"{where} has 'encoding_format' bytes: take base64, an answer here is a line of JSON")
    except BatchError as error:
        return Line(custom_id, problem=str(error))
    return Line(custom_id, url or "", bytes(request["body"]))


def _text(value: msgspec.Raw | None) -> str | None:
    """None: it is no string."""
    try:
        return None if value is None else msgspec.json.decode(value, type=str)
    except msgspec.DecodeError:
        return None
