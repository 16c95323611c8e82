"""A chat as tokens: the template's options, the rendered text, its ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import unsupported
from ..text.probe import SWITCHES
from ..text.tokenizer import Tokenizer
from ..wire.requests import ChatRequest
from ..wire.tokens import TokenizeRequest


def chat_options(request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer, trust_template: bool) -> dict[str, Any]:
    """What `Tokenizer.render` gets beside the messages. Raises ApiError (400) for what requests may not set."""
    options = dict(request.chat_template_kwargs or {})
    tokenizer.check_template_kwargs(options)
    if request.chat_template is not None:
        if not trust_template:
            raise unsupported("chat_template", "'chat_template' (without --trust-request-chat-template)")
        options["chat_template"] = request.chat_template
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
        if request.chat_template is None and tokenizer.has_chat_template:
            source = tokenizer.template().source
            for name in SWITCHES:
                if re.search(rf"(?<![.\w'\"]){name}(?![\w'\"])", source):
                    options.setdefault(name, request.reasoning_effort != "none")
    options = {**tokenizer.template_kwargs, **options}
    offered = request.tools
    if isinstance(request, ChatRequest) and request.tool_use is None:  # tool_choice none
        offered = None
    if offered:
        options["tools"] = offered
    if request.documents:
        options["documents"] = request.documents
    continued = bool(request.continue_final_message)
    options["continue_final_message"] = continued
    answer_follows = request.add_generation_prompt
    options["add_generation_prompt"] = not continued if answer_follows is None else answer_follows
    return options


def turns_off_thinking(request: ChatRequest, tokenizer: Tokenizer) -> bool:
    """Whether it tells the model not to reason, however its template takes that, or the server does so by default
    (--default-chat-template-kwargs). Saying nothing does, where the template makes it reason only when asked."""
    switches = _switches(request.chat_template_kwargs or {})
    if not switches and request.reasoning_effort is None:
        switches = _switches(tokenizer.template_kwargs)
    if switches or request.reasoning_effort is not None:
        return not any(switches) if switches else request.reasoning_effort == "none"
    if request.chat_template is not None or not tokenizer.has_chat_template:
        return False
    return tokenizer.capabilities(tokenizer.template()).thinks_when_asked


def _switches(variables: Mapping[str, Any]) -> list[Any]:
    return [value for name in SWITCHES if (value := variables.get(name)) is not None]


def chat_prompt(
    messages: list[dict[str, Any]],
    add_special_tokens: bool,
    tokenizer: Tokenizer,
    options: dict[str, Any],
    is_short: Callable[[int], bool],
    pictures: list[int] | None = None,
) -> tuple[str, list[int] | None]:
    """(the rendered text, its token ids where it has so few characters). Raises ApiError (400) for messages that the
    template refuses. `pictures`: see `Tokenizer.render`.
    """
    text = tokenizer.render(messages, options, pictures)
    if not is_short(len(text)):
        return text, None
    # The template writes its own special tokens: the tokenizer's would come on top.
    return text, tokenizer.encode_rendered(text, add_special_tokens)
