"""Chat templates: the Jinja programs that turn messages into a prompt, rendered as in transformers, within limits."""

from __future__ import annotations

import threading
import time
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateSyntaxError

from ..errors import ApiError, bad_request, shorten
from ..options.text import RESERVED, is_template
from .capabilities import Capabilities
from .sandbox import MAX_SIZE, LimitError, Sandbox, too_large

MAX_SOURCE = 64 << 10  # characters of a template that came in a request
SLOW_SECONDS = 0.005  # of computing; a template that ever took longer is rendered off the event loop
# Where the model was thinking: templates know it by one of these names.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_END = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the final message ends, then is cut off with all that follows it

_sandbox = Sandbox()
_compiling = threading.Lock()  # Jinja's lexer cache and the meter of compilation


class ChatTemplate:
    """A template, compiled once. Rendering is safe in several threads at a time."""

    def __init__(self, source: str) -> None:
        """Raises ApiError (400) that names the line when it is no Jinja."""
        self.source = source
        self.slow = False
        self.can: Capabilities | None = None  # once it has been asked
        try:
            with _compiling, _sandbox.metered():
                self._template: Template = _sandbox.from_string(source)
        except Exception as error:  # also RecursionError and what Python's compiler says of deep nesting
            raise template_error(error) from None

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """The prompt. `options`: variables of the template; `continue_final_message` is none of them and leaves the
        end of the last message open.

        Raises ApiError (400) naming the line when the template refuses, fails, or exceeds time or size.
        """
        start = time.thread_time()
        try:
            return self._render(messages, dict(options))
        except Exception as error:  # the template is a program: it may raise anything
            raise template_error(error) from None
        finally:
            if time.thread_time() - start > SLOW_SECONDS:
                self.slow = True

    def _render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        continued = variables.pop("continue_final_message", False)
        chat = [_plain(message) for message in messages]
        if not continued:
            return self._run(chat, variables)
        if variables.get("add_generation_prompt"):
            raise ValueError("'continue_final_message' and 'add_generation_prompt' exclude each other")
        return self._continue(chat, variables)

    def _run(self, chat: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        variables = {"tools": None, "documents": None, "add_generation_prompt": False, **variables, "messages": chat}
        template = self._template
        with _sandbox.metered() as meter:
            pieces = []
            size = 0
            for piece in template.root_render_func(template.new_context(variables)):
                meter.spend(len(piece))
                pieces.append(piece)
                size += len(piece)
                if size > MAX_SIZE:
                    raise too_large()
            return "".join(pieces)

    def _continue(self, chat: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        content = chat[-1].get("content")
        parts: list[dict[str, Any]] = content if isinstance(content, list) else [{"text": content}]
        at = next((i for i in reversed(range(len(parts))) if isinstance(parts[i].get("text"), str)), None)
        if at is None:
            raise ValueError("'continue_final_message' needs a final message with content")
        if "content" not in self.source:
            raise ValueError("'continue_final_message' needs a template that uses 'content'")
        final: str = parts[at]["text"]
        opened = [*parts[:at], {**parts[at], "text": final + _END}, *parts[at + 1 :]]
        chat[-1] = {**chat[-1], "content": opened if isinstance(content, list) else final + _END}
        rendered = self._run(chat, variables)
        end = rendered.rfind(_END.strip())
        if end < 0 or final.strip() not in rendered:
            raise ValueError("the final message, which 'continue_final_message' continues, is not in the prompt")
        if rendered.startswith(_END, end):
            return rendered[:end]
        return rendered[:end].rstrip()  # the template trims messages


@lru_cache(maxsize=16)
def request_template(source: str) -> ChatTemplate:
    """A template that came in a request. Raises ApiError (400)."""
    if len(source) > MAX_SOURCE:
        raise bad_request(
            f"'chat_template' has {len(source)} characters; at most {MAX_SOURCE} are allowed.", "chat_template"
        )
    return ChatTemplate(source)


def check_variables(names: dict[str, Any]) -> None:
    """Raises ApiError (400) where `chat_template_kwargs` would replace what has a field of its own."""
    for name in names:
        if name in RESERVED:
            raise bad_request(
                f"'chat_template_kwargs' must not contain {shorten(name)!r}.", f"chat_template_kwargs.{name}"
            )


def read_template(path_or_text: str) -> str:
    """The template of --chat-template: a file's content, or the text itself. Raises ValueError."""
    if is_template(path_or_text):
        return path_or_text
    try:
        return Path(path_or_text).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"--chat-template {shorten(path_or_text)!r} cannot be read ({error.__class__.__name__}): "
            "give the path of a Jinja template, or its text"
        ) from None


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Without fields that are null but the content, and with the reasoning under the names that templates look for."""
    plain = {name: value for name, value in message.items() if value is not None or name == "content"}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def template_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    line = error.lineno if isinstance(error, TemplateSyntaxError) else _line(error.__traceback__)
    where = f" at line {line}" if line else ""
    cause = shorten(str(error) or type(error).__name__, 300).rstrip(".")
    what = "was stopped" if isinstance(error, LimitError) else "failed"
    message = f"The chat template {what}{where}: {cause}."
    return bad_request(message, "messages", "chat_template_error")


def _line(traceback: TracebackType | None) -> int | None:
    """The line of the template that was at work, innermost."""
    line = None
    while traceback is not None:
        template = traceback.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return line
