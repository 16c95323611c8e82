"""The tokenizer of a model, its chat template, and what its folder says of answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from ..engine.config import ConfigError
from ..engine.model_path import find_model
from .config import ServerConfig
from .conversation import with_ids
from .errors import ApiError, bad_request, shorten
from .model_defaults import read_defaults, read_json
from .parsers.formats import Formats, choose
from .pooling import PoolingDefaults, read_pooling
from .template import ChatTemplate, check_variables, read_template, request_template
from .tokenizer_files import read_tokenizer, template_dict
from .tokenizer_trial import is_panic, try_out

logger = logging.getLogger(__name__)

# Of a model on the hub, what there is besides weights.
_TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*"]
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "merges.txt")  # one of them, whatever the kind


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads: the Rust tokenizer is never reconfigured."""

    def __init__(
        self,
        core: FastTokenizer,
        special_tokens: dict[str, str],
        templates: dict[str, str],
        load_hf: Callable[[], Any],
    ) -> None:
        """`special_tokens`: "eos_token" and so on, as templates know them. `templates`: by name, "default" among them.
        `load_hf` makes the tokenizer of transformers, for those who ask for it.
        """
        core.no_truncation()
        core.no_padding()
        self.core = core
        self.special_tokens = special_tokens
        eos = special_tokens.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else core.token_to_id(eos)
        # A byte-level decoder turns each token into bytes whatever stands before it; others (Metaspace strips the first
        # space) need to see some tokens of the prompt.
        self.byte_level = isinstance(core.decoder, decoders.ByteLevel)
        self._templates = templates
        self._compiled: dict[str, ChatTemplate] = {}
        self._load_hf = load_hf
        self._bytes: dict[int, bytes] = {}
        # Texts of single tokens, as the decoder gave them, with and without special ones; for Detokenizer.
        self.texts: dict[bool, dict[int, str]] = {True: {}, False: {}}
        self.history_id: Callable[[str], str] | None = None  # what the template wants of the ids of tool calls

    @cached_property
    def hf(self) -> Any:
        """The tokenizer of transformers. Takes seconds the first time: nothing that serves a request needs it."""
        return self._load_hf()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def with_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another chat template."""
        return Tokenizer(self.core, self.special_tokens, {"default": source}, self._load_hf)

    @cached_property
    def special(self) -> dict[int, str]:
        """The special tokens, by id."""
        return {id: token.content for id, token in self.core.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises ApiError (400) where the tokenizer itself gives up."""
        try:
            # The "fast" call leaves out the offsets, which nobody reads here.
            return self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            if is_panic(error):
                raise bad_request(f"The tokenizer cannot read this text ({shorten(str(error))}).", "prompt") from None
            raise

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
        """The prompt of a chat. `options`: add_generation_prompt, continue_final_message, tools, documents,
        chat_template (instead of the model's), and variables of the template.

        Raises ApiError (400) when there is no template, or it does not accept these messages, or takes too long.
        """
        variables = {**self.special_tokens, **options}
        source = variables.pop("chat_template", None)
        template = self.template(bool(options.get("tools"))) if source is None else request_template(source)
        if self.history_id is not None:
            messages = with_ids(messages, self.history_id)
        return template.render(messages, variables)

    def template(self, tools: bool = False) -> ChatTemplate:
        """The model's template. Raises ApiError (400)."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._compiled.get(name)
        if template is None:
            if name not in self._templates:
                raise bad_request(
                    "This model has no chat template; use /v1/completions, or start the server with --chat-template.",
                    "messages",
                    "no_chat_template",
                )
            template = self._compiled[name] = ChatTemplate(self._templates[name])
        return template

    def renders_slowly(self, options: dict[str, Any]) -> bool:
        """A template whose author is a client, or that once took long, is to be kept off the event loop."""
        return "chat_template" in options or any(template.slow for template in self._compiled.values())

    def check_template_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Raises ApiError (400)."""
        check_variables(kwargs)


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
    max_new_tokens: int | None = None  # no answer is longer, where the model's folder says so
    default_sources: dict[str, str] = field(default_factory=dict)  # where each default is from
    formats: Formats = field(default_factory=Formats)  # of tool calls and reasoning
    pooling: PoolingDefaults = field(default_factory=PoolingDefaults)  # of embeddings


def load_text_model(model: str, config: ServerConfig, revision: str | None = None) -> TextModel:
    """Reads tokenizer, chat template and generation_config.json. Raises ConfigError with the remedy.

    `model`: a folder, or a name on the hub.
    """
    folder = _folder(model, revision)
    source = config.tokenizer or model
    tokenizer = _load_tokenizer(source, folder if source == model else _folder(source, None))
    try_out(tokenizer.core)
    if config.chat_template is not None:
        try:
            tokenizer = tokenizer.with_template(read_template(config.chat_template))
            tokenizer.template()
        except (ApiError, ValueError) as error:
            raise ConfigError(f"{error}" if "--chat-template" in str(error) else f"--chat-template: {error}") from None
    elif tokenizer.has_chat_template:
        try:
            tokenizer.template()
        except ApiError as error:
            logger.warning("%s Chats will be refused; name another template with --chat-template", error.message)
    defaults = read_defaults(folder, config, tokenizer.eos_token_id)
    formats = _formats(tokenizer, folder, config)
    if formats.tools is not None:
        tokenizer.history_id = formats.tools.history_id
    return TextModel(
        names=config.served_model_name or (model,),
        root=model,
        tokenizer=tokenizer,
        eos_token_ids=defaults.eos_token_ids,
        defaults=defaults.sampling,
        max_new_tokens=defaults.max_new_tokens,
        default_sources=defaults.sources,
        formats=formats,
        pooling=read_pooling(folder, config.pooling),
    )


def _formats(tokenizer: Tokenizer, folder: Path, config: ServerConfig) -> Formats:
    """Raises ConfigError for names that no parser has."""
    try:
        template, tool_template = tokenizer.template().source, tokenizer.template(tools=True).source
    except ApiError:  # completions are possible
        template = tool_template = ""
    model_type = read_json(folder / "config.json").get("model_type")
    tools = config.tool_call_parser if config.enable_auto_tool_choice else "none"
    reasoning = config.reasoning_parser if config.enable_reasoning else "none"
    try:
        formats = choose(template, tool_template, model_type, tools, reasoning)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for what, format in (("tool calls", formats.tools), ("reasoning", formats.reasoning)):
        if format is not None:
            logger.info("the format of this model's %s: %s", what, format.name)
    return formats


def _load_tokenizer(source: str, folder: Path) -> Tokenizer:
    def load_hf() -> Any:
        from transformers import AutoTokenizer  # slow to import

        return AutoTokenizer.from_pretrained(str(folder))

    try:
        files = read_tokenizer(folder)
        if files is not None:
            return Tokenizer(files.core, files.special_tokens, files.templates, load_hf)
        if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
            raise FileNotFoundError(f"there is no tokenizer.json in {folder}: copy it there")
        logger.debug("the tokenizer of %s is left to transformers", source)
        hf = load_hf()
    except Exception as error:  # transformers and tokenizers raise whatever the broken file provokes
        raise ConfigError(
            f"cannot load the tokenizer of {source!r} ({shorten(str(error), 200)}); name another with --tokenizer"
        ) from error
    core = getattr(hf, "backend_tokenizer", None)
    if not isinstance(core, FastTokenizer):
        raise ConfigError(
            f"the tokenizer ({type(hf).__name__}) has no fast form: add a tokenizer.json to the model's folder, or "
            "name a tokenizer that has one with --tokenizer"
        )
    return Tokenizer(core, dict(hf.special_tokens_map), template_dict(hf.chat_template), lambda: hf)


def _folder(name: str, revision: str | None) -> Path:
    """Where a model's small files are. Raises ConfigError."""
    if (folder := find_model(name)) is not None:
        return folder
    import huggingface_hub  # slow, and not needed for a folder

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_TEXT_FILES))
    except Exception as error:  # network, name, licence, disk
        raise ConfigError(
            f"cannot get {name} from the hub ({type(error).__name__}: {shorten(str(error), 200)}): "
            "check name, network and HF_TOKEN, or pass a folder"
        ) from error
