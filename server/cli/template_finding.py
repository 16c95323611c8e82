"""What a model's chat template does not take as clients send it: a line each."""

from __future__ import annotations

from collections.abc import Iterator

from ...engine.errors import ConfigError, ModelError
from ...engine.files.gguf_file import read_gguf
from ...engine.options.config import EngineConfig
from ...engine.options.model_path import find_model, is_gguf
from ..errors import ApiError
from ..text.files import read_tokenizer
from ..text.gguf_tokenizer import read_gguf_tokenizer
from ..text.tokenizer import Tokenizer
from .finding import OK, WARN, Finding
from .model_finding import from_hub_cache


def template_findings(engine: EngineConfig) -> Iterator[Finding]:
    """None for a model that is not here, or has no chat template that can be read."""
    try:
        folder = find_model(engine.model) or from_hub_cache(engine)
        if folder is None:
            return
        files = read_gguf_tokenizer(read_gguf(folder)) if is_gguf(folder) else read_tokenizer(folder)
    except (ConfigError, ModelError, OSError, ValueError):  # whoever loads it says so
        return
    if files is None or not files.templates:
        return
    tokenizer = Tokenizer(files.core, files.special_tokens, files.templates, lambda: None)
    try:
        can = tokenizer.capabilities(tokenizer.template(tools=True))
    except ApiError as error:
        yield Finding(WARN, "chat template", error.message, "name another with --chat-template")
        return
    lines = list(can.deviations())
    if not lines:
        yield Finding(OK, "chat template", "it takes everything as clients send it")
    for line in lines:
        shown = not line.startswith("it shows no")
        remedy = "" if shown else "requests with them are refused; --tools-in-system writes them into the messages"
        yield Finding(OK if shown else WARN, "chat template", line, remedy)
