"""What the server knows of a model besides what the engine says: its tokenizer, and what its folder says of answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as FastTokenizer

from ...engine.describe.download import from_hub
from ...engine.describe.model_source import hub_gguf, split_name
from ...engine.describe.overrides import overridden, overrides
from ...engine.describe.reading import read_vision, reads_both_ways
from ...engine.errors import ConfigError, ModelError
from ...engine.files.gguf_file import read_gguf
from ...engine.link.sampling_params import LAST, MEAN
from ...engine.options.config import EngineConfig
from ...engine.options.model_path import cache_folder, find_model, is_gguf
from ..errors import ApiError, shorten
from ..options.config import ServerConfig
from ..parsers.formats import Formats, choose
from .answer_form import by_response_template
from .defaults import read_defaults, read_described
from .files import TokenizerFiles, read_tokenizer, template_dict
from .gguf_tokenizer import read_gguf_tokenizer
from .pooling import PoolingDefaults, read_embedding_files, read_pooling
from .sentencepiece import read_sentencepiece
from .template import read_template
from .tokenizer import NoTokenizer, Tokenizer
from .tool_text import ToolText, reader_of
from .trial import try_out

if TYPE_CHECKING:
    from ...engine.vision.processor import Processor

logger = logging.getLogger(__name__)

# Of a model on the hub, what there is besides weights.
_TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*"]
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "merges.txt")  # one of them, whatever the kind
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # without one of those: nothing


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
    processor: Processor | None = None  # of pictures, where the model sees any


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
    source_folder = folder
    if config.skip_tokenizer_init:
        tokenizer: Tokenizer = NoTokenizer()
    else:
        source_folder = folder if same else _folder(source, revision, cache)
        tokenizer = _load_tokenizer(source, source_folder, config.tokenizer_mode == "slow")
    tokenizer.users_speak_tokens = config.parse_user_special_tokens
    tokenizer.template_kwargs = config.template_kwargs()
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
    if tokenizer.has_chat_template:
        formats = _asked(tokenizer, formats, config)
        is_auto = config.tool_call_parser == config.reasoning_parser == "auto" and config.enable_auto_tool_choice
        if is_auto and tokenizer.tool_text is None:
            settings = read_described(source_folder, "tokenizer_config.json")
            if (spec := settings.get("response_template")) is not None:
                found = by_response_template(spec, tokenizer, formats, defaults.eos_token_ids)
                formats = found if config.enable_reasoning else replace(found, reasoning=None)
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
        pooling=replace(
            read_pooling(folder, *config.pooler(), default=MEAN if reads_both_ways(described) else LAST),
            **read_embedding_files(folder, described),
            **config.pooled(),
        ),
        any_whitespace=not structured.get("disable_any_whitespace"),
        additional_properties=not structured.get("disable_additional_properties"),
        processor=None if tokenizer.missing else _processor(described, engine, folder),
    )


def _described(folder: Path, engine: EngineConfig) -> dict[str, Any]:
    """What config.json says, as the engine's options have it. Raises ConfigError."""
    other = engine.hf_config_path
    source = folder if other is None else _folder(other, None, cache_folder(engine.download_dir))
    return overridden(read_described(source, "config.json"), overrides(engine))


def _processor(described: dict[str, Any], engine: EngineConfig, folder: Path) -> Processor | None:
    """Raises ConfigError."""
    try:
        vision = read_vision(described, engine, folder)
    except ModelError:  # of which the engine says what is wrong
        return None
    if vision is None:
        return None
    from ...engine.vision.processors import read_processor  # with NumPy, which the server starts without

    try:
        return read_processor(folder, vision, engine.processor_kwargs)
    except ModelError as error:
        raise ConfigError(str(error)) from None


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


def _asked(tokenizer: Tokenizer, formats: Formats, config: ServerConfig) -> Formats:
    """The formats, once the template has been asked what it takes and writes: one that does not read the calls that the
    template itself writes is the wrong one."""
    with suppress(ApiError):  # where chats with tools have a template of their own, no other chat shall wait for it
        tokenizer.capabilities(tokenizer.template())
    try:
        template = tokenizer.template(tools=True)
    except ApiError:
        return formats
    can = tokenizer.capabilities(template)
    for line in can.deviations():
        logger.info("the chat template: %s", line)
    if formats.tools is not None and (written := tokenizer.written_call()):
        found = reader_of(formats.tools, formats.reasoning, written, tokenizer.special_texts)
        if found is not formats.tools:
            logger.warning(
                "the format %s does not read the calls that the chat template writes (%s)%s",
                formats.tools.name, shorten(written.strip()),
                ": see --tool-call-parser" if found is None else f"; {found.name} does",
            )  # fmt: skip
            if config.tool_call_parser == "auto":
                formats = replace(formats, tools=found)
    if can.shows_tools and can.shows_calls and can.shows_results:
        return formats
    unshown = "tools" if not can.shows_tools else "calls" if not can.shows_calls else "results of tools"
    if not config.tools_in_system:
        logger.info("the chat template shows no %s: requests with them are refused (see --tools-in-system)", unshown)
        return formats
    calls = config.tool_call_parser != "none" and config.enable_auto_tool_choice
    tokenizer.tool_text = ToolText.of(formats.tools)
    logger.info(
        "the chat template shows no %s: they are written into the messages (--tools-in-system), calls in the format %s",
        unshown, tokenizer.tool_text.format.name,
    )  # fmt: skip
    return replace(formats, tools=tokenizer.tool_text.format) if calls else formats


def _load_tokenizer(source: str, folder: Path, slow: bool = False) -> Tokenizer:
    """`folder`: or a GGUF file; `slow`: tokenizer.model comes before tokenizer.json."""
    if is_gguf(folder):
        return _put_together(read_gguf_tokenizer(read_gguf(folder)))

    def load_hf() -> Any:
        from transformers import AutoTokenizer  # slow to import

        return AutoTokenizer.from_pretrained(str(folder))

    try:
        if slow and (files := read_sentencepiece(folder)) is not None:
            return _put_together(files)
        if slow:
            logger.info("--tokenizer-mode slow: the folder has no tokenizer.model; tokenizer.json has the same ids")
        if (files := read_tokenizer(folder)) is not None:
            return Tokenizer(files.core, files.special_tokens, files.templates, load_hf)
        if not (folder / "tokenizer.json").exists() and (files := read_sentencepiece(folder)) is not None:
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
    found = Tokenizer(core, dict(hf.special_tokens_map), template_dict(hf.chat_template), lambda: hf)
    found.tells_types = "token_type_ids" in hf.model_input_names
    return found


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
    if split_name(name)[1] and (file := hub_gguf(name, revision, cache)) is not None:
        return file
    folder = from_hub(name, revision, _TEXT_FILES, cache)
    if any((folder / file).exists() for file in ("config.json", "tokenizer.json")):
        return folder
    return hub_gguf(name, revision, cache) or folder
