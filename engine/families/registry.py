"""Which family a config.json is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MINICPM3
from .family import Family
from .gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_PICTURES
from .gemma4 import GEMMA4, GEMMA4_PICTURES, GEMMA4_UNIFIED
from .glm import GLM, GLM4, GLM4_MOE
from .gpt_oss import GPT_OSS
from .head_spec import base_name
from .lfm import LFM2, LFM2_MOE
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
from .llama4 import LLAMA4, LLAMA4_PICTURES
from .mamba import BAMBA, FALCON_H1, GRANITE_HYBRID, NEMOTRON_H
from .mistral import MINISTRAL3, MISTRAL4, MISTRAL_LARGE3
from .mixtures import HY_V3, LAGUNA, MIMO_V2, MINIMAX_M2
from .olmo import COHERE, COHERE2, EXAONE4, OLMO2, OLMO3, OLMOE
from .pictures import PICTURES, with_text
from .qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from .qwen_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_PICTURES, QWEN3_5_PICTURES, QWEN3_NEXT
from .raw_config import architectures, model_type
from .refused import refusal
from .renamed import INTERNLM3, OTHER_CLASSES, OTHER_TYPES

FAMILIES = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, GEMMA3_PICTURES, PHI3, GLM, GLM4, GRANITE, COHERE, COHERE2,
    OLMO2, OLMO3, SMOLLM3, SEED_OSS, EXAONE4, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GRANITE_MOE_SHARED,
    GLM4_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, MINICPM3, GLM4_MOE_LITE, QWEN3_5, QWEN3_5_MOE, QWEN3_5_PICTURES,
    QWEN3_5_MOE_PICTURES, QWEN3_NEXT, GEMMA4, GEMMA4_PICTURES, GEMMA4_UNIFIED, MINIMAX_M2, MIMO_V2, HY_V3, LAGUNA,
    LLAMA4, LLAMA4_PICTURES, MINISTRAL3, MISTRAL4, MISTRAL_LARGE3, INTERNLM3, LFM2, LFM2_MOE,
    GRANITE_HYBRID, BAMBA, FALCON_H1, NEMOTRON_H,
    *PICTURES,
)  # fmt: skip
BOTH_WAYS = (EUROBERT, LLAMA_BOTH_WAYS)  # they generate nothing
_BY_ARCHITECTURE = OTHER_CLASSES | {family.architecture: family for family in (*FAMILIES, *BOTH_WAYS)}
_BY_ARCHITECTURE["Gemma3TextForCausalLM"] = GEMMA3  # as EmbeddingGemma's Gemma3TextModel would be called
_BY_MODEL_TYPE = OTHER_TYPES | {family.model_type: family for family in (*FAMILIES, *BOTH_WAYS)}


def is_known(name: str) -> bool:
    """Whether a class is one of a family, by its own name."""
    return name in _BY_ARCHITECTURE or base_name(name) in _BY_ARCHITECTURE


def own_family(raw: Mapping[str, Any]) -> Family | None:
    """By architecture; by model_type where none is named, or one that is known to nobody. Raises ModelError for what
    are no names."""
    kind, names = model_type(raw), architectures(raw)
    known = (known for name in names for known in (name, base_name(name)))  # the second: of one that embeds, classifies
    found = next((_BY_ARCHITECTURE[name] for name in known if name in _BY_ARCHITECTURE), None)
    if found is None and (not names or generates_by_name(raw)):
        found = _BY_MODEL_TYPE.get(kind)
    return None if found is None else _of_its_text(found, raw)


def find_family(raw: Mapping[str, Any]) -> Family:
    """As own_family. Raises ModelError where there is none."""
    if (family := own_family(raw)) is not None:
        return family
    names = architectures(raw) or [model_type(raw)]
    if (line := refusal(names)) is not None:
        raise ModelError(line)
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ModelError(f"architecture {names[0] or 'unnamed'} is not supported: serve one of {supported}")


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
