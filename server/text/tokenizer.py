"""The tokenizer of a model, its chat template, and what its folder says of answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Encoding, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from ...engine.config import ConfigError, EngineConfig
from ...engine.gguf_file import read_gguf
from ...engine.model_file import is_gguf
from ...engine.model_path import cache_folder, find_model
from ...engine.overrides import overridden, overrides
from ..errors import ApiError, bad_request, shorten
from ..options.config import ServerConfig
from ..parsers.formats import Formats, choose
from .conversation import with_ids
from .defaults import read_defaults, read_described
from .files import TokenizerFiles, read_tokenizer, template_dict
from .gguf_tokenizer import read_gguf_tokenizer
from .pooling import PoolingDefaults, read_pooling
from .sentencepiece import read_sentencepiece
from .spelled import MARK, Spellings, pieces, restored
from .template import ChatTemplate, check_variables, read_template, request_template
from .trial import is_panic, try_out

logger = logging.getLogger(__name__)

# Of a model on the hub, what there is besides weights.
_TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*"]
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "merges.txt")  # one of them, whatever the kind
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # without one of those: nothing

BATCH = 4096  # pieces of a text at a time: what the library makes of one takes as much as many tokens


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads: the Rust tokenizer is never reconfigured."""

    missing = False  # there is none, only token ids

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
        self.users_speak_tokens = False  # special tokens in the messages of users and tools are tokens
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
        other = Tokenizer(self.core, self.special_tokens, {"default": source}, self._load_hf)
        other.largest_id = self.largest_id
        other.users_speak_tokens = self.users_speak_tokens
        return other

    @cached_property
    def special(self) -> dict[int, str]:
        """The special tokens, by id."""
        return {id: token.content for id, token in self.core.get_added_tokens_decoder().items() if token.special}

    @cached_property
    def largest_id(self) -> int:
        """No text gives a larger one. Takes as long as it takes to look at each, once."""
        return max(self.core.get_vocab().values(), default=-1)

    @cached_property
    def _spellings(self) -> Spellings:
        return Spellings(self.special.values())

    @cached_property
    def special_texts(self) -> frozenset[str]:
        return frozenset(self.special.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises ApiError (400) where the tokenizer itself gives up."""
        try:
            # The "fast" call leaves out the offsets, which nobody reads here.
            return self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise _unreadable(error) from None

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Several at once, with special tokens around each."""
        return [one.ids for one in self.core.encode_batch_fast(texts, add_special_tokens=True)]

    def count(self, text: str) -> int:
        """How many tokens a text is, without special ones around it."""
        try:
            return len(self.core.encode_batch_fast([text], add_special_tokens=False)[0])
        except BaseException as error:
            raise _unreadable(error) from None

    def encode_rendered(self, text: str, add_special_tokens: bool) -> list[int]:
        """Of what `render` gave, whose marks are left out. Raises ApiError (400)."""
        if MARK not in text:
            return self.encode(text, add_special_tokens)
        parts = pieces(text)
        batches = (parts[start : start + BATCH] for start in range(0, len(parts), BATCH))
        try:
            encoded = (self.core.encode_batch_fast(batch, add_special_tokens=False) for batch in batches)
            if not add_special_tokens:
                return [token for batch in encoded for piece in batch for token in piece.ids]
            whole = Encoding.merge([Encoding.merge(batch, growing_offsets=False) for batch in encoded], False)
            return self.core.post_process(whole, add_special_tokens=True).ids
        except BaseException as error:
            raise _unreadable(error) from None

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
        chat_template (instead of the model's), and variables of the template. It may have marks: see spelled.py.

        Raises ApiError (400) when there is no template, or it does not accept these messages, or takes too long.
        """
        variables = {**self.special_tokens, **options}
        source = variables.pop("chat_template", None)
        template = self.template(bool(options.get("tools"))) if source is None else request_template(source)
        marked = None
        if not self.users_speak_tokens:
            marked = self._spellings.marked(messages, variables.get("documents"))
        if marked is not None:
            messages, variables["documents"] = marked
        if self.history_id is not None:
            messages = with_ids(messages, self.history_id)
        text = template.render(messages, variables)
        return text if marked is None else restored(text)

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


class NoTokenizer(Tokenizer):
    """Prompts are token ids, and so are answers."""

    missing = True

    def __init__(self) -> None:
        super().__init__(FastTokenizer(models.BPE()), {}, {}, no_text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        no_text()

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        return no_text() if texts else []

    def count(self, text: str) -> int:
        no_text()

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def template(self, tools: bool = False) -> ChatTemplate:
        no_text("messages")


def no_text(param: str = "prompt") -> NoReturn:
    """Raises ApiError (400)."""
    raise bad_request(
        "This server has no tokenizer (--skip-tokenizer-init): give token ids to /v1/completions or /v1/embeddings, "
        "and read 'token_ids' of the answer.", param, "no_tokenizer",
    )  # fmt: skip


def _unreadable(error: BaseException) -> BaseException:
    if is_panic(error):
        return bad_request(f"The tokenizer cannot read this text ({shorten(str(error))}).", "prompt")
    return error


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
    any_whitespace: bool = True  # False: structured JSON is in one line, whatever a request says
    additional_properties: bool = True  # False: objects have what their schema lists, whatever a request says


def load_text_model(
    model: str,
    config: ServerConfig,
    engine: EngineConfig | None = None,
    check: Callable[[Path], None] = lambda folder: None,
) -> TextModel:
    """Reads tokenizer, chat template and generation_config.json. Raises ConfigError with the remedy.

    `model`: a folder, or a name on the hub; `engine`: what else was said of it. `check` is called with the folder
    before the tokenizer is read.
    """
    engine = engine or EngineConfig(model)
    cache = cache_folder(engine.download_dir)
    folder = _folder(model, engine.revision, cache)
    check(folder)
    described = _described(folder, engine)
    source = config.tokenizer or model
    revision = config.tokenizer_revision or (engine.revision if source == model else None)
    same = source == model and revision == engine.revision
    if config.skip_tokenizer_init:
        tokenizer: Tokenizer = NoTokenizer()
    else:
        tokenizer = _load_tokenizer(source, folder if same else _folder(source, revision, cache))
    tokenizer.users_speak_tokens = config.parse_user_special_tokens
    try_out(tokenizer.core)
    _ = tokenizer.largest_id  # no request shall wait for it
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
    defaults = read_defaults(folder, config, tokenizer.eos_token_id, described.get("eos_token_id"))
    formats = _formats(tokenizer, described.get("model_type"), config)
    if formats.tools is not None:
        tokenizer.history_id = formats.tools.history_id
    structured = config.structured_outputs()
    return TextModel(
        names=config.served_model_name or (model,),
        root=model,
        tokenizer=tokenizer,
        eos_token_ids=defaults.eos_token_ids,
        defaults=defaults.sampling,
        max_new_tokens=defaults.max_new_tokens,
        default_sources=defaults.sources,
        formats=formats,
        pooling=replace(read_pooling(folder, *config.pooler()), longest=config.embed_limit()),
        any_whitespace=not structured.get("disable_any_whitespace"),
        additional_properties=not structured.get("disable_additional_properties"),
    )


def _described(folder: Path, engine: EngineConfig) -> dict[str, Any]:
    """What config.json says, as the engine's options have it. Raises ConfigError."""
    other = engine.hf_config_path
    source = folder if other is None else _folder(other, None, cache_folder(engine.download_dir))
    return overridden(read_described(source, "config.json"), overrides(engine))


def _formats(tokenizer: Tokenizer, model_type: str | None, config: ServerConfig) -> Formats:
    """Raises ConfigError for names that no parser has."""
    try:
        template, tool_template = tokenizer.template().source, tokenizer.template(tools=True).source
    except ApiError:  # completions are possible
        template = tool_template = ""
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
    """`folder`: or a GGUF file."""
    if is_gguf(folder):
        return _put_together(read_gguf_tokenizer(read_gguf(folder)))

    def load_hf() -> Any:
        from transformers import AutoTokenizer  # slow to import

        return AutoTokenizer.from_pretrained(str(folder))

    try:
        files = read_tokenizer(folder)
        if files is not None:
            return Tokenizer(files.core, files.special_tokens, files.templates, load_hf)
        if (files := read_sentencepiece(folder)) is not None:
            return _put_together(files)
        if not any(file.name not in _SETTINGS for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
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


def _put_together(files: TokenizerFiles) -> Tokenizer:
    """Of what transformers cannot read by itself."""

    def wrapped() -> Any:
        from transformers import PreTrainedTokenizerFast  # slow to import

        return PreTrainedTokenizerFast(tokenizer_object=files.core, **files.special_tokens)

    return Tokenizer(files.core, files.special_tokens, files.templates, wrapped)


def _folder(name: str, revision: str | None, cache: str | None) -> Path:
    """Where a model's small files are. Raises ConfigError."""
    if (folder := find_model(name)) is not None:
        return folder
    import huggingface_hub  # slow, and not needed for a folder

    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=_TEXT_FILES)
        )
    except Exception as error:  # network, name, licence, disk
        raise ConfigError(
            f"cannot get {name} from the hub ({type(error).__name__}: {shorten(str(error), 200)}): "
            "check name, network and HF_TOKEN, or pass a folder"
        ) from error
