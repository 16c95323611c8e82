"""Names of models as people have them: a copied address, a name without its owner, another program's short name."""

from __future__ import annotations

import re

_HUB = r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co|hf-mirror\.com)/"
# https://huggingface.co/owner/model/tree/main, hf.co/owner/model:Q4_K_M …; not that of a branch or of one file, which
# would be another model.
_ADDRESS = re.compile(
    _HUB + r"(?P<name>(?!(?:datasets|spaces|collections|papers|docs|blog)/)[^/?#\s]+/[^/?#\s]+)"
    r"(?:/tree/main)?/?(?:[?#]\S*)?"
)
# Who publishes a family, by how its names begin, whatever the case. The longer beginning comes first.
_OWNERS = {
    "qwen": "Qwen", "qwq": "Qwen", "meta-llama": "meta-llama", "llama": "meta-llama", "gemma": "google",
    "embeddinggemma": "google", "gpt-oss": "openai", "deepseek": "deepseek-ai", "mistral": "mistralai",
    "ministral": "mistralai", "mixtral": "mistralai", "magistral": "mistralai", "devstral": "mistralai",
    "codestral": "mistralai", "phi": "microsoft", "smollm": "HuggingFaceTB", "granite": "ibm-granite",
    "glm": "zai-org", "kimi": "moonshotai", "minimax": "MiniMaxAI", "mimo": "XiaomiMiMo", "olmo": "allenai",
    "seed-oss": "ByteDance-Seed", "exaone": "LGAI-EXAONE", "bge": "BAAI", "nomic-embed": "nomic-ai",
    "multilingual-e5": "intfloat", "e5": "intfloat", "gte": "Alibaba-NLP", "internvl": "OpenGVLab",
    "all-minilm": "sentence-transformers", "all-mpnet": "sentence-transformers", "lfm2": "LiquidAI",
    "nvidia-nemotron": "nvidia", "nemotron": "nvidia", "falcon": "tiiuae", "ernie": "baidu", "hunyuan": "tencent",
    "c4ai-command": "CohereLabs", "command-a": "CohereLabs", "aya": "CohereLabs", "modernbert": "answerdotai",
    "minicpm": "openbmb", "laguna": "poolside", "tinyllama": "TinyLlama",
}  # fmt: skip
# Models that the hub has without an owner.
_OWNERLESS = re.compile(
    r"(distil)?gpt2(-(medium|large|xl))?|openai-gpt|(distil)?bert-\S+|(distil)?roberta-\S+|xlm-\S+|albert-\S+|"
    r"t5-\S+|camembert-\S+|xlnet-\S+"
)
# Ollama's short names: family, version, size.
_SHORT = re.compile(r"(?P<family>[a-z][a-z-]*?)-?(?P<version>\d+(?:\.\d+)?)?(?::(?P<tag>[\w.-]+))?")
_SIZE = re.compile(r"\d+(\.\d+)?[bm](-[\w.-]+)?|e\d+b(-[\w.-]+)?|\d+x\d+b|latest|mini|small|medium|large")
_SHORT_NAMES = {
    ("llama", "3"): "meta-llama/Meta-Llama-3-{SIZE}-Instruct",
    ("llama", "3.1"): "meta-llama/Llama-3.1-{SIZE}-Instruct",
    ("llama", "3.2"): "meta-llama/Llama-3.2-{SIZE}-Instruct",
    ("llama", "3.3"): "meta-llama/Llama-3.3-{SIZE}-Instruct",
    ("qwen", "2.5"): "Qwen/Qwen2.5-{SIZE}-Instruct",
    ("qwen", "3"): "Qwen/Qwen3-{SIZE}",
    ("qwen", "3.5"): "Qwen/Qwen3.5-{SIZE}",
    ("gemma", "2"): "google/gemma-2-{size}-it",
    ("gemma", "3"): "google/gemma-3-{size}-it",
    ("gemma", "4"): "google/gemma-4-{SIZE}-it",
    ("gpt-oss", ""): "openai/gpt-oss-{size}",
    ("mistral", ""): "mistralai/Mistral-7B-Instruct-v0.3",
    ("mixtral", ""): "mistralai/Mixtral-8x7B-Instruct-v0.1",
    ("phi", "4"): "microsoft/phi-4",
    ("deepseek-r", "1"): "deepseek-ai/DeepSeek-R1-Distill-Qwen-{SIZE}",
}
_USUAL = {
    ("llama", "3"): "8b", ("llama", "3.1"): "8b", ("llama", "3.2"): "3b", ("llama", "3.3"): "70b",
    ("qwen", "2.5"): "7b", ("qwen", "3"): "8b", ("qwen", "3.5"): "9b", ("gemma", "2"): "9b", ("gemma", "3"): "4b",
    ("gemma", "4"): "e4b", ("gpt-oss", ""): "20b", ("deepseek-r", "1"): "7b",
}  # fmt: skip


def hub_name(name: str) -> str:
    """The name on the hub of an address that was copied from its page; any other name as it is."""
    found = _ADDRESS.fullmatch(name.strip())
    return found["name"] if found else name


def is_address(name: str) -> bool:
    """Whether it is one of the web, or of a page of the hub, which `hub_name` has left as it is."""
    return re.match(rf"https?://|{_HUB}", name) is not None


def has_no_owner(name: str) -> bool:
    """Whether it is a bare word, which the hub knows none of but some old models."""
    return "/" not in name and not _OWNERLESS.fullmatch(name.lower())


def meant(name: str) -> str:
    """What is probably meant by a name without an owner: owner/name; "": nothing is known."""
    if short := _of_short_name(name.lower()):
        return short
    if ":" in name:
        return ""
    begin = name.lower()
    for family in sorted(_OWNERS, key=len, reverse=True):
        if begin.startswith(family) and begin != family:
            return f"{_OWNERS[family]}/{name}"
    return ""


def _of_short_name(name: str) -> str:
    found = _SHORT.fullmatch(name)
    if found is None:
        return ""
    key = found["family"].rstrip("-"), found["version"] or ""
    pattern, tag = _SHORT_NAMES.get(key), found["tag"] or "latest"
    if pattern is None or not _SIZE.fullmatch(tag):
        return ""
    size = tag.partition("-")[0]
    if not size[0].isdigit() and not size.startswith("e"):
        if size != "latest" and "{" not in pattern:
            return ""  # such as phi4:mini, which is another model than phi4
        size = _USUAL.get(key, "")
    elif "{" not in pattern and size not in pattern.lower():
        return ""
    return pattern.format(size=size, SIZE=size.upper())
