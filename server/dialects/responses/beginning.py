"""A response as it is when it begins, with what it repeats of its request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...wire.requests import ChatRequest
from .request import ResponsesRequest

_FUNCTION = {"description": None, "parameters": None, "strict": None}


def repeated(body: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """What may be large: JSON already, for each of several events has it."""
    text = body.text
    fields: dict[str, Any] = {
        "instructions": body.instructions,
        "text": {
            "format": {"type": "text"} if text is None or text.format is None else text.format,
            "verbosity": None if text is None else text.verbosity,
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_FUNCTION | tool if tool.get("type") == "function" else tool for tool in body.tools or ()],
    }
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def beginning(
    body: ResponsesRequest, chat: ChatRequest, defaults: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """`defaults`: the model's; `about`: `id`, `created_at`, `model`, and what is `repeated`."""
    reasoning = body.reasoning
    return {
        "id": None,
        "object": "response",
        "created_at": None,
        "completed_at": None,
        "status": "in_progress",
        "background": body.background is True,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": None,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": None,
        "store": body.stores,
        "temperature": defaults.get("temperature", 1.0) if chat.temperature is None else chat.temperature,
        "text": None,
        "tool_choice": None,
        "tools": None,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.get("top_p", 1.0) if chat.top_p is None else chat.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
        **({} if body.conversation is None else {"conversation": {"id": body.conversation}}),
        **about,
    }
