"""Which family a config.json is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MINICPM3
from .family import Family
from .gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_PICTURES
from .glm import GLM, GLM4, GLM4_MOE
from .gpt_oss import GPT_OSS
from .head_spec import base_name
from .llama import (
    EUROBERT,
    GRANITE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    LLAMA,
    LLAMA_BOTH_WAYS,
    MISTRAL,
    MIXTRAL,
    PHI3,
    SEED_OSS,
    SMOLLM3,
)
from .mistral import MINISTRAL3, MISTRAL4, MISTRAL_LARGE3
from .olmo import COHERE, COHERE2, EXAONE4, OLMO2, OLMO3, OLMOE
from .pictures import PICTURES, with_text
from .qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from .raw_config import architectures, model_type
from .refused import refusal
from .renamed import INTERNLM3, OTHER_CLASSES, OTHER_TYPES

FAMILIES = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, GEMMA3_PICTURES, PHI3, GLM, GLM4, GRANITE, COHERE, COHERE2,
    OLMO2, OLMO3, SMOLLM3, SEED_OSS, EXAONE4, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GRANITE_MOE_SHARED,
    GLM4_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, MINICPM3, GLM4_MOE_LITE, MINISTRAL3, MISTRAL4, MISTRAL_LARGE3,
    INTERNLM3, *PICTURES,
)  # fmt: skip
BOTH_WAYS = (EUROBERT, LLAMA_BOTH_WAYS)  # they generate nothing
_BY_ARCHITECTURE = OTHER_CLASSES | {family.architecture: family for family in (*FAMILIES, *BOTH_WAYS)}
_BY_ARCHITECTURE["Gemma3TextForCausalLM"] = GEMMA3  # as EmbeddingGemma's Gemma3TextModel would be called
_BY_MODEL_TYPE = OTHER_TYPES | {family.model_type: family for family in (*FAMILIES, *BOTH_WAYS)}


def is_known(name: str) -> bool:
    """Whether a class is one of a family, by its own name."""
    return name in _BY_ARCHITECTURE or base_name(name) in _BY_ARCHITECTURE


def find_family(raw: Mapping[str, Any]) -> Family:
    """By architecture; by model_type where none is named, or one that is known to nobody. Raises ModelError."""
    kind = model_type(raw)
    names = architectures(raw) or [kind]
    for name in names:
        for known in (name, base_name(name)):  # the second: of a model that embeds or classifies
            if known in _BY_ARCHITECTURE:
                return _of_its_text(_BY_ARCHITECTURE[known], raw)
    if (not architectures(raw) or generates_by_name(raw)) and kind in _BY_MODEL_TYPE:
        return _of_its_text(_BY_MODEL_TYPE[kind], raw)
    if (line := refusal(names)) is not None:
        raise ModelError(line)
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ModelError(f"architecture {names[0] or 'unnamed'} is not supported: serve one of {known}")


def generates_by_name(raw: Mapping[str, Any]) -> bool:
    """Whether the class that config.json names is by its name a decoder, and nothing says that its code is the
    folder's own: then its model_type says what it computes."""
    names, code = architectures(raw), raw.get("auto_map")
    own = isinstance(code, Mapping) and "AutoModelForCausalLM" in code
    return not own and refusal(names) is None and any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def _of_its_text(family: Family, raw: Mapping[str, Any]) -> Family:
    """With the decoder that config.json names, where that may be any. Raises ModelError."""
    text = raw.get(family.nested) if family.varied else None
    if not isinstance(text, Mapping) or not (architectures(text) or model_type(text)):
        return family
    found = find_family(text)
    if found.nested or found in BOTH_WAYS:
        raise ModelError(f"config.json: {family.nested} is of {found.architecture}, which is no decoder of text alone: "
                         "use another model")  # fmt: skip
    return with_text(family, found)
