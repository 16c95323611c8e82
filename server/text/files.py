"""A tokenizer read from its folder with the tokenizers library alone: importing transformers takes seconds.

transformers chooses a class by the names in config.json and tokenizer_config.json, and some classes replace parts of
what tokenizer.json says. The classes of the models that vserve runs are here. What is not known to come out the same
is left to transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Settings that make transformers do more than reading tokenizer.json.
_UNKNOWN_SETTINGS = ("auto_map", "fast_tokenizer_files", "init_inputs", "split_special_tokens", "fix_mistral_regex")
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Special tokens that a class has unless the folder says otherwise, null included.
_CLASS_TOKENS: dict[str, dict[str, str]] = {
    "TokenizersBackend": {},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
}


@dataclass(frozen=True)
class TokenizerFiles:
    core: FastTokenizer
    special_tokens: dict[str, str]  # bos_token, eos_token, …: variables of chat templates
    templates: dict[str, str]  # by name; "default" is the one to use, "tool_use" where there are tools


def read_tokenizer(folder: Path) -> TokenizerFiles | None:
    """None where only transformers can tell what the tokenizer is. Raises OSError and ValueError for broken files."""
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        config = _read(folder / "tokenizer_config.json")
    except FileNotFoundError:
        return None
    class_name = tokenizer_class(folder, config, '"ByteLevel"' in text)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if class_name is None or not isinstance(extra, list) or any(config.get(name) for name in _UNKNOWN_SETTINGS):
        return None
    others = (name for name in config if name.endswith("_token") and name not in NAMED_TOKENS)
    if any(isinstance(config[name], str | dict) for name in others):
        return None  # a multimodal model's own tokens
    named = _CLASS_TOKENS[class_name] | {name: config[name] for name in NAMED_TOKENS if name in config}
    if "added_tokens_decoder" not in config:
        if (folder / "added_tokens.json").exists():
            return None
        if (folder / "special_tokens_map.json").exists():
            listed = _read(folder / "special_tokens_map.json")
            if "extra_special_tokens" in listed or "additional_special_tokens" in listed:
                return None
            named |= {name: listed[name] for name in NAMED_TOKENS if name in listed}
    special = {name: _content(token) for name, token in named.items() if token is not None}
    core = FastTokenizer.from_str(text)
    if class_name == "TokenizersBackend":  # words of the vocabulary that are special only by being named
        known = {token.content for token in core.get_added_tokens_decoder().values()}
        words = [word for word in special.values() if word not in known and core.token_to_id(word) is not None]
        core.add_special_tokens([AddedToken(word, special=True) for word in words])
    listed = config.get("added_tokens_decoder", {})
    if not _adds_nothing(core, listed, [*special.values(), *map(_content, extra)], class_name):
        return None
    if class_name == "Qwen2Tokenizer":
        _become_qwen2(core, config)
    elif class_name == "LlamaTokenizer":
        _become_llama(core, config)
    return TokenizerFiles(core, special, read_templates(folder, config))


def tokenizer_class(folder: Path, config: dict[str, Any], byte_level: bool) -> str | None:
    """The class that transformers' AutoTokenizer takes; None where that is not known here."""
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    try:
        family = _read(folder / "config.json").get("model_type")
    except FileNotFoundError:
        return None
    if not name or (folder / "tekken.json").exists():
        return None
    if family == "qwen2":
        return "Qwen2Tokenizer"
    if family in ("mistral", "mixtral"):
        return "TokenizersBackend"
    if family not in ("llama", "qwen2_moe", "qwen3", "qwen3_moe"):
        return None
    if name in ("PreTrainedTokenizer", "TokenizersBackend") or (name == "LlamaTokenizer" and byte_level):
        return "TokenizersBackend"
    return name if name in _CLASS_TOKENS else None


def read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files of their own come before what tokenizer_config.json holds."""
    templates = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        templates["default"] = folder / "chat_template.jinja"
    if templates:
        return {name: path.read_text(encoding="utf-8") for name, path in templates.items()}
    return template_dict(config.get("chat_template"))


def template_dict(templates: Any) -> dict[str, str]:
    """From any form in which transformers keeps templates: text, a dict by name, a list of names and templates."""
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}
    return dict(templates or {})


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _adds_nothing(core: FastTokenizer, listed: dict[str, Any], special: list[str], class_name: str) -> bool:
    """tokenizer.json has all tokens that the other files name, with the same flags: transformers changes none."""
    added = core.get_added_tokens_decoder()
    for index, token in listed.items():
        other = AddedToken(**{name: value for name, value in token.items() if name != "__type"})
        if int(index) not in added or not _same(added[int(index)], other):
            return False
    if class_name != "TokenizersBackend" and listed and len(listed) != len(added):
        return False  # these classes take the list for the whole
    by_content = {token.content: token for token in added.values()}
    if class_name == "Qwen2Tokenizer":  # it adds them once more, as plain special tokens
        return all(text in by_content and _same(by_content[text], AddedToken(text, special=True)) for text in special)
    return all(text in by_content and by_content[text].special for text in special)


def _same(one: AddedToken, other: AddedToken) -> bool:
    return one.content == other.content and all(getattr(one, flag) == getattr(other, flag) for flag in _FLAGS)


def _become_qwen2(core: FastTokenizer, config: dict[str, Any]) -> None:
    model = core.model
    model.unk_token, model.fuse_unk, model.byte_fallback = None, False, False
    model.ignore_merges = False
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()


def _become_llama(core: FastTokenizer, config: dict[str, Any]) -> None:
    model = core.model
    model.unk_token, model.fuse_unk, model.byte_fallback = None, True, True
    model.ignore_merges = False
    prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    core.decoder = decoders.Sequence(steps)
