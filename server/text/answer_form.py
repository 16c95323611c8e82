"""The response_template of a model's tokenizer_config.json, where it has one: its answers are read by that."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..errors import ApiError, shorten
from ..parsers.formats import Formats
from ..parsers.response_formats import formats
from ..parsers.response_template import TemplateError, read_template
from .probe import TOOL
from .tokenizer import Tokenizer
from .tool_text import reads

logger = logging.getLogger(__name__)


def by_response_template(spec: Any, tokenizer: Tokenizer, detected: Formats, ends: Iterable[int]) -> Formats:
    """The formats that `spec` makes, or those `detected` in the chat template where it makes none that could serve; a
    line in the log says which. `ends`: the tokens that end an answer."""
    try:
        made = _made(spec, tokenizer, detected, [tokenizer.core.id_to_token(id) or "" for id in ends])
    except TemplateError as error:
        logger.warning(
            "the response_template in tokenizer_config.json is not used: %s; answers are read as the chat template "
            "shows them", shorten(str(error), 300),
        )  # fmt: skip
        return detected
    names = [format.name for format in (made.tools, made.reasoning) if format is not None]
    logger.info("answers are read by the response_template in tokenizer_config.json: %s", ", ".join(names))
    return made


def _made(spec: Any, tokenizer: Tokenizer, detected: Formats, ends: list[str]) -> Formats:
    """Raises TemplateError."""
    template = read_template(spec)
    if detected.tools is not None and detected.tools.lead is not None:
        # A response_template says nothing of what stands between thoughts and calls.
        raise TemplateError(f"the format {detected.tools.name} lets the model think before it calls")
    try:
        one, two = tokenizer.written_call(), tokenizer.written_call(2)
    except ApiError:
        one = two = ""
    name = TOOL["function"]["name"]
    made = formats(template, one, two, name, tokenizer.special_texts, list(filter(None, ends)))
    if template.unread:
        logger.info("the response_template's reasoning is not used: %s", template.unread)
    if made.tools is not None and detected.tools is not None:  # ids are as the chat template wants them
        known = detected.tools
        made = replace(made, tools=replace(made.tools, new_id=known.new_id, history_id=known.history_id))
    found = Formats(made.tools or detected.tools, made.reasoning or detected.reasoning)
    if made.tools is not None and one and not reads(made.tools, found.reasoning, one, tokenizer.special_texts):
        raise TemplateError(f"it does not read the calls that the chat template writes ({shorten(one.strip())})")
    return found
