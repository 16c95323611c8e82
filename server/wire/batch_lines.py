"""The lines of a file of requests, in OpenAI's batch format: read, and judged before anything is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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
    body: dict[str, Any] = field(default_factory=dict)
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


def read_line(line: bytes, where: str) -> Line:
    """`where`: what messages call it."""
    custom_id: str | None = None
    try:
        try:
            request = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise BatchError(f"{where} is not text in UTF-8 ({error})") from None
        except (ValueError, RecursionError) as error:
            raise BatchError(f"{where} is no JSON ({error})") from None
        if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
            raise BatchError(f"{where} has no 'custom_id', a string that its answer will carry")
        custom_id = request["custom_id"]
        if request.get("method", "POST") != "POST" or request.get("url") not in URLS:
            raise BatchError(f"{where}: method must be POST, and url one of {', '.join(URLS)}")
        if not isinstance(request.get("body"), dict):
            raise BatchError(f"{where} has no 'body', the object that would be posted")
        if request["body"].get("stream"):
            raise BatchError(f"{where} has 'stream': leave it out, a batch has whole answers")
        if request["body"].get("background"):
            raise BatchError(f"{where} has 'background': leave it out, a batch waits for its answers")
        if str(request["body"].get("encoding_format")).startswith("bytes"):
            raise BatchError(f"{where} has 'encoding_format' bytes: take base64, an answer here is a line of JSON")
    except BatchError as error:
        return Line(custom_id, problem=str(error))
    return Line(custom_id, request["url"], request["body"])
