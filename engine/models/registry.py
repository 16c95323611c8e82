"""Which class runs which architecture."""

from __future__ import annotations

from ..layers.weights import Placement
from ..model_config import ModelConfig, ModelError
from .blocks import CausalLM
from .llama import LlamaForCausalLM
from .mistral import MistralForCausalLM
from .qwen2 import Qwen2ForCausalLM
from .qwen3 import Qwen3ForCausalLM

ARCHITECTURES: dict[str, type[CausalLM]] = {
    model.__name__: model for model in (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
}


def build_model(config: ModelConfig, place: Placement, max_len: int) -> CausalLM:
    """The model with uninitialised weights on `place`; contexts up to `max_len` tokens."""
    try:
        model = ARCHITECTURES[config.architecture]
    except KeyError:
        raise ModelError(
            f"architecture {config.architecture} is not supported: serve one of {', '.join(ARCHITECTURES)}"
        ) from None
    return model(config, place, max_len)
