"""The tokenizer of a model, its chat template, and the defaults that its folder sets."""

from __future__ import annotations

import inspect
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from ..engine.config import ConfigError
from .config import ServerConfig
from .errors import ApiError, bad_request, shorten

logger = logging.getLogger(__name__)

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads: the Rust tokenizer is never reconfigured."""

    def __init__(self, hf: Any, chat_template: str | None = None) -> None:
        """`hf`: a tokenizer of transformers; it renders templates, its Rust core does the rest."""
        core = getattr(hf, "backend_tokenizer", None)
        if not isinstance(core, FastTokenizer):
            raise ConfigError(
                f"the tokenizer ({type(hf).__name__}) has no fast form: add a tokenizer.json to the model's folder, or "
                "name a tokenizer that has one with --tokenizer"
            )
        core.no_truncation()
        core.no_padding()
        self.hf = hf
        self.core = core
        self.chat_template = chat_template
        self.eos_token_id: int | None = hf.eos_token_id
        # A byte-level decoder turns each token into bytes whatever stands before it; others (Metaspace strips the first
        # space) need to see some tokens of the prompt.
        self.byte_level = isinstance(core.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}
        self._reserved = set(inspect.signature(hf.apply_chat_template).parameters) - {"kwargs"}

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template or self.hf.chat_template)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The "fast" call leaves out the offsets, which nobody reads here.
        return self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, also where it is only part of a character. Special tokens are their names."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._token_bytes(token_id)
        return known

    def _token_bytes(self, token_id: int) -> bytes:
        token = self.core.id_to_token(token_id)
        if token is None:  # a row of the embedding that no token uses
            return b""
        if self.byte_level:
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        if "▁" in token:
            return token.replace("▁", " ").encode()
        return self.core.decode([token_id], skip_special_tokens=False).encode()

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """The prompt of a chat. `options`: add_generation_prompt, continue_final_message, variables of the template.

        Raises ApiError (400) when there is no template or it does not accept these messages.
        """
        if not self.has_chat_template:
            raise bad_request(
                "This model has no chat template; use /v1/completions, or start the server with --chat-template.",
                "messages",
                "no_chat_template",
            )
        try:
            rendered = self.hf.apply_chat_template(
                messages, tokenize=False, chat_template=self.chat_template, **options
            )
        except Exception as error:  # the template is a program of the model's author: it may raise anything
            raise _template_error(error) from error
        assert isinstance(rendered, str)
        return rendered

    def check_template_kwargs(self, kwargs: dict[str, Any]) -> None:
        for name in kwargs:
            if name in self._reserved or name == "messages":
                raise bad_request(
                    f"'chat_template_kwargs' must not contain {shorten(name)!r}.", f"chat_template_kwargs.{name}"
                )


def _template_error(error: Exception) -> ApiError:
    line = getattr(error, "lineno", None)  # of a syntax error
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    where = f" at line {line}" if line else ""
    message = f"The chat template failed{where}: {shorten(str(error), 300).rstrip('.')}."
    return bad_request(message, "messages", "chat_template_error")


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character (GPT-2's table, openai/gpt-2 src/encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


@dataclass(frozen=True)
class TextModel:
    """What the server knows of the model besides what the engine says: names, text, defaults."""

    names: tuple[str, ...]  # that requests may use; the first one is in the answers
    root: str  # as given on the command line
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    defaults: dict[str, float]  # of sampling, where the model's folder sets them


def load_text_model(model: str, config: ServerConfig, revision: str | None = None) -> TextModel:
    """Reads tokenizer, chat template and generation_config.json. Takes seconds; raises ConfigError with the remedy.

    `model`: a folder, or a name on the hub.
    """
    from transformers import AutoTokenizer

    source = config.tokenizer or model
    try:
        hf = AutoTokenizer.from_pretrained(source, revision=revision if source == model else None)
    except Exception as error:  # transformers raises whatever the broken file provokes
        raise ConfigError(
            f"cannot load the tokenizer of {source!r} ({shorten(str(error), 200)}); name another with --tokenizer"
        ) from error
    template = Path(config.chat_template).read_text(encoding="utf-8") if config.chat_template else None
    tokenizer = Tokenizer(hf, template)
    generation = _read_json(model, "generation_config.json", revision)
    # generation_config.json has the last word on where an answer ends; config.json stands in for it
    listed = generation.get("eos_token_id", None)
    if listed is None:
        listed = _read_json(model, "config.json", revision).get("eos_token_id")
    eos = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    defaults = {}
    for name in SAMPLING_DEFAULTS:
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[name] = value
    if defaults:
        logger.info(
            "generation_config.json sets the defaults of sampling: %s",
            ", ".join(f"{name} {value}" for name, value in defaults.items()),
        )
    return TextModel(
        names=config.served_model_name or (model,),
        root=model,
        tokenizer=tokenizer,
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if isinstance(token, int))),
        defaults=defaults,
    )


def _read_json(model: str, name: str, revision: str | None) -> dict[str, Any]:
    """A JSON file of the model's folder; {} where there is none."""
    from transformers.utils.hub import cached_file

    path = cached_file(model, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{name} of {model!r} is no JSON ({error}): repair or delete the file") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name} of {model!r} holds no JSON object: repair or delete the file")
    return content
