"""Talking to the page in a browser: what its tests share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import expect


def ask(page: Any, text: str) -> Any:
    """Sends a message; the last answer's element, which may still grow."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    return page.locator("article.assistant").last


def answered(page: Any, text: str) -> Any:
    answer = ask(page, text)
    expect(answer).to_have_attribute("aria-busy", "false")
    return answer


def event_stream(*deltas: dict[str, Any], finish: str = "stop") -> str:
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    usage = {"prompt_tokens": 7, "completion_tokens": len(deltas), "prompt_tokens_details": {"cached_tokens": 2}}
    chunks.append({"choices": [], "usage": usage})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


@contextmanager
def scripted(page: Any, *streams: str) -> Iterator[list[dict[str, Any]]]:
    """The next answers are these event streams. Gives the bodies of the requests."""
    bodies: list[dict[str, Any]] = []
    left = list(streams)

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=left.pop(0))

    page.route("**/v1/chat/completions", answer)
    yield bodies
    page.unroute("**/v1/chat/completions")
