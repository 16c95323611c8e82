"""The options on text: tokenizer, chat template, and the defaults of sampling that a model brings."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ...engine.errors import ConfigError
from ...engine.link.sampling_params import POOLINGS
from ...engine.options.model_path import is_gguf, is_hub_name
from ...engine.options.option import option

# Defaults that count, with what they may be: (lowest, highest, lowest itself allowed).
RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 2, True),
    "top_p": (0, 1, False),
    "top_k": (-1, 2**31 - 1, True),
    "min_p": (0, 1, True),
    "repetition_penalty": (0, 1e6, False),
    "max_new_tokens": (1, 2**31 - 1, True),
}
_INTEGERS = ("top_k", "max_new_tokens")
# What --structured-outputs-config may set: its type, and what to do instead where it is not built.
_STRUCTURED: dict[str, tuple[type, str]] = {
    "disable_any_whitespace": (bool, ""),
    "disable_additional_properties": (bool, ""),
    "backend": (str, ""),  # one of BACKENDS
    "disable_fallback": (bool, ""),
    "reasoning_parser": (str, "use --reasoning-parser"),
    "enable_in_reasoning": (bool, "a grammar begins where the reasoning ends: leave it out"),
}
BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")  # vLLM's; the one that fits is taken
PoolingTask = Literal["embed", "classify", "token_embed", "token_classify", "encode", "score", "reward"]
POOLING_TASKS = get_args(PoolingTask)
# Of --pooler-config: vLLM's names, older and present, and what they set.
_POOLER = {
    "pooling_type": ("pooling",), "seq_pooling_type": ("pooling",), "tok_pooling_type": ("by_token",),
    "normalize": ("normalize",), "use_activation": ("normalize", "activate"), "activation": ("activate",),
    "softmax": ("activate",), "dimensions": ("dimensions",), "enable_chunked_processing": ("chunked",),
    "max_embed_len": ("longest",), "step_tag_id": ("step_tag",), "task": ("task",),
}  # fmt: skip
# Variables of chat templates that requests set by fields of their own.
RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
                      "chat_template", "conversation", "tokenize", "padding", "truncation", "max_length",
                      "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
                      "sanitize_control_tokens"))  # fmt: skip
_BY_TOKEN = ("all", "step")  # what every token has is to be had of every model, at /pooling
_KINDS = {bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class TextConfig:
    tokenizer: str | None = option(None, "folder or hub name of the tokenizer (default: the model's)", group="text")
    tokenizer_revision: str | None = option(
        None, "branch, tag or commit of a tokenizer taken from the hub (default: --revision)", group="text"
    )
    tokenizer_mode: str = option(
        "auto", "slow: SentencePiece's tokenizer.model, where there is one, comes before tokenizer.json; auto, hf: "
        "after it", choices=("auto", "hf", "slow"), group="text",
    )  # fmt: skip
    skip_tokenizer_init: bool = option(
        False, "load no tokenizer: prompts are token ids, and so are answers; there is no chat", group="text"
    )
    chat_template: str | None = option(
        None, "Jinja chat template, or the file that has it (default: the tokenizer's)", group="text"
    )
    default_chat_template_kwargs: str | None = option(
        None, "JSON object with variables of the chat template for requests that do not set them in "
        "chat_template_kwargs, such as '{\"enable_thinking\": false}'", group="text", is_json=True,
    )  # fmt: skip
    trust_request_chat_template: bool = option(
        False, "let requests bring a 'chat_template' of their own, which then runs here, within limits", group="text"
    )
    parse_user_special_tokens: bool = option(
        False, "special tokens that are spelled in the messages of users and tools are tokens, not text", group="text"
    )
    tools_in_system: bool = option(
        False, "tools, calls and results that the chat template does not show are written into the messages, the tools "
        "into the first system message; off: requests with them are refused", group="text",
    )  # fmt: skip
    tool_call_parser: str = option(
        "auto", "format of the model's tool calls; auto: found in its chat template, none: calls stay text",
        group="text",
    )  # fmt: skip
    reasoning_parser: str = option(
        "auto", "format of the model's reasoning; auto: found in its chat template, none: it stays in the text",
        group="text",
    )  # fmt: skip
    enable_auto_tool_choice: bool = option(True, "off: the same as --tool-call-parser none", group="text")
    enable_reasoning: bool = option(True, "off: the same as --reasoning-parser none", group="text")
    pooling: str = option(
        "auto", "which hidden state of an input is its embedding; auto: what the model's folder says, or last; of "
        "models that read both ways, mean",
        choices=("auto", "last", "mean", "cls"), group="text",
    )  # fmt: skip
    pooler_config: str | None = option(
        None, "JSON object on vectors and classes, as vLLM has it: pooling_type (LAST, MEAN, CLS), use_activation "
        "(false: embeddings of any length, logits of classes) or normalize (of embeddings alone), dimensions (of "
        "requests that say none), enable_chunked_processing (texts beyond the context: the mean of their pieces), "
        "max_embed_len, step_tag_id (the token that ends a step, of models that rate steps), task (of /pooling and "
        "`LLM.encode` where they say none: embed, classify, token_embed, token_classify)", group="text", is_json=True,
    )  # fmt: skip
    override_pooler_config: str | None = option(None, "the same, by vLLM's older name", group="text", is_json=True)
    generation_config: str = option(
        "auto", "defaults of sampling; auto: the model's generation_config.json, vserve: none, or the path of another",
        group="text",
    )  # fmt: skip
    override_generation_config: str | None = option(
        None, "JSON object with defaults of sampling that come before those, such as '{\"temperature\": 0.5}'",
        group="text", is_json=True,
    )  # fmt: skip

    structured_outputs_config: str | None = option(
        None, "JSON object for structured outputs: disable_any_whitespace (JSON in one line), "
        "disable_additional_properties (objects have what their schema lists); their backend is the one that fits",
        group="text", is_json=True,
    )  # fmt: skip

    def check_text(self) -> None:
        """Raises ConfigError."""
        template = self.chat_template
        if template is not None and not (is_template(template) or os.path.isfile(template)):
            raise ConfigError(
                f"--chat-template {template[:200]!r} is no file: give the path of a Jinja template, or its text"
            )
        for name in ("tokenizer", "chat_template"):
            if self.skip_tokenizer_init and getattr(self, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} has no meaning with --skip-tokenizer-init: leave one of them out")
        path = os.path.expanduser(self.tokenizer or ".")
        known = os.path.isdir(path) or is_gguf(Path(path))
        if not known and (os.path.exists(path) or not is_hub_name(path)):
            raise ConfigError(
                f"--tokenizer {path!r} is no folder: give one with a tokenizer.json, a GGUF file, or a name of the hub"
            )
        self.overrides()
        self.template_kwargs()
        self.structured_outputs()
        self.pooler()
        self.embed_limit()

    def overrides(self) -> dict[str, Any]:
        """--override-generation-config, read. Raises ConfigError."""
        flag = "--override-generation-config"
        content = _object(flag, self.override_generation_config, '{"temperature": 0.5}')
        for name, value in content.items():
            if name not in RANGES:
                raise ConfigError(f"{flag} has {name[:60]!r}: it may set {', '.join(RANGES)}")
            if problem := default_problem(name, value):
                raise ConfigError(f"{flag} has {name} {value!r:.60}, which {problem}")
        return {name: as_default(name, value) for name, value in content.items()}

    def template_kwargs(self) -> dict[str, Any]:
        """--default-chat-template-kwargs, read. Raises ConfigError."""
        flag = "--default-chat-template-kwargs"
        content = _object(flag, self.default_chat_template_kwargs, '{"enable_thinking": false}')
        for name in content:
            if name in RESERVED:
                raise ConfigError(f"{flag} has {name!r}, which requests have a field of their own for: leave it out")
        return content

    def pooler(self) -> tuple[str, bool | None]:
        """(--pooling, or what --pooler-config has for it; whether embeddings get the length 1, None where nothing says
        so). Raises ConfigError."""
        flag, asked = self._pooler()
        pooling = str(asked.get("pooling", self.pooling)).lower()
        if self.pooling not in ("auto", pooling):
            raise ConfigError(f"--pooling is {self.pooling!r}, and {flag} has {pooling!r}: leave one out")
        return pooling, asked.get("normalize")

    def embed_limit(self) -> int | None:
        """Tokens of an input that is embedded in pieces where it is longer than the context; 0: any number; None: it is
        refused. Raises ConfigError."""
        flag, asked = self._pooler()
        if "longest" in asked and not asked.get("chunked"):
            raise ConfigError(f"{flag} has max_embed_len without enable_chunked_processing: set that too")
        return asked.get("longest", 0) if asked.get("chunked") else None

    def pooled(self) -> dict[str, Any]:
        """Fields of PoolingDefaults that --pooler-config alone can say. Raises ConfigError."""
        asked = self._pooler()[1]
        found = {name: asked[name] for name in ("activate", "dimensions", "step_tag", "task") if name in asked}
        return found | {"longest": self.embed_limit()}

    def _pooler(self) -> tuple[str, dict[str, Any]]:
        """(the flag, what it has by our names). Raises ConfigError."""
        if self.pooler_config is not None and self.override_pooler_config is not None:
            raise ConfigError("--pooler-config and --override-pooler-config are one option: leave one out")
        flag = "--pooler-config" if self.override_pooler_config is None else "--override-pooler-config"
        text = self.pooler_config if self.override_pooler_config is None else self.override_pooler_config
        content = _object(flag, text, '{"pooling_type": "MEAN", "normalize": true}')
        asked: dict[str, Any] = {}
        for name, value in content.items():
            if name not in _POOLER:
                raise ConfigError(f"{flag} has {name[:60]!r}: it may set {', '.join(_POOLER)}")
            if value is None:
                continue
            for key in _POOLER[name]:
                if problem := _pooler_problem(key, value):
                    raise ConfigError(f"{flag} has {name} {value!r:.60}: {problem}")
                if str(value).lower() not in _BY_TOKEN and asked.setdefault(key, value) != value:
                    raise ConfigError(f"{flag} has {name} {value!r:.60}, and {asked[key]!r:.60} too: leave one out")
        return flag, asked

    def structured_outputs(self) -> dict[str, bool]:
        """--structured-outputs-config, read: its switches, by name. Raises ConfigError."""
        flag = "--structured-outputs-config"
        content = _object(flag, self.structured_outputs_config, '{"disable_any_whitespace": true}')
        for name, value in content.items():
            if name not in _STRUCTURED:
                raise ConfigError(f"{flag} has {name[:60]!r}: it may set {', '.join(_STRUCTURED)}")
            kind, remedy = _STRUCTURED[name]
            if not isinstance(value, kind):
                raise ConfigError(f"{flag} has {name} {value!r:.60}: it must be {_KINDS[kind]}")
            if name == "backend" and value not in BACKENDS:
                raise ConfigError(f"{flag} has backend {value!r:.60}: choose one of {', '.join(BACKENDS)}")
            if remedy and value:
                raise ConfigError(f"{flag} has {name} {value!r:.60}: {remedy}")
        return {name: value for name, value in content.items() if isinstance(value, bool)}


def _pooler_problem(key: str, value: Any) -> str | None:
    """What is wrong with a value of --pooler-config."""
    if key in ("normalize", "activate", "chunked"):
        return None if isinstance(value, bool) else "it must be true or false"
    if key in ("longest", "dimensions", "step_tag"):
        least = 0 if key == "step_tag" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            return "it must be an integer of at least 1" if least else "it must be the id of a token"
        return None
    if key == "task":
        return None if value in POOLING_TASKS else f"choose one of {', '.join(POOLING_TASKS)}"
    kinds = _BY_TOKEN if key == "by_token" else POOLINGS
    return None if str(value).lower() in (*kinds, *_BY_TOKEN) else f"choose one of {', '.join(kinds).upper()}"


def _object(flag: str, text: str | None, example: str) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        content = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{flag} is no JSON ({error}): give an object such as {example}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} is no JSON object: give one such as {example}")
    return content


def is_template(text: str) -> bool:
    """Whether it is a template and no path."""
    return "{" in text or "\n" in text


def default_problem(name: str, value: Any) -> str | None:
    """What is wrong with a default of sampling."""
    low, high, inclusive = RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "is no number"
    if not low <= value <= high or (value == low and not inclusive):  # also infinity and NaN
        return f"must be {'at least' if inclusive else 'above'} {low} and at most {high}"
    if name in _INTEGERS and value != int(value):
        return "is no integer"
    return None


def as_default(name: str, value: float) -> float:
    return int(value) if name in _INTEGERS else value
