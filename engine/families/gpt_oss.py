"""gpt-oss 20B and 120B."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ModelError
from .family import Family, attention_spec, expert_counts, mlp_spec, windows_of
from .layer_spec import LayerSpec, MoESpec, RoutingSpec
from .raw_config import RawConfig

# transformers' rotation where config.json says nothing of it.
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ALPHA = 1.702  # of the experts' activation


def layers(raw: RawConfig) -> tuple[LayerSpec, ...]:
    """Llama with sinks, biases, a window in some layers, and experts chosen by logits, whose activation is clamped."""
    if not (raw.get("rope_scaling") or raw.get("rope_parameters")):
        raw = RawConfig({**raw.values, "rope_parameters": ROPE}, raw.defaults)
    if (alpha := raw.number("swiglu_alpha")) != ALPHA:
        raise ModelError(f"config.json: swiglu_alpha is {alpha}, supported is {ALPHA}: use another model")
    attention = replace(attention_spec(raw, bias=bool(raw.get("attention_bias"))), sinks=True)
    num_experts, top_k = expert_counts(raw, "num_local_experts", "num_experts")
    routing = RoutingSpec(num_experts, top_k, score="none", bias=True, softmax_chosen=True)
    mixture = MoESpec(
        mlp_spec(raw).inner,
        routing,
        bias=True,
        activation="clamped",
        limit=raw.number("swiglu_limit"),
        stored="transposed",
        interleaved=True,
    )
    return tuple(LayerSpec(replace(attention, window=window), mixture) for window in windows_of(raw, full_every=2))


GPT_OSS = Family("GptOssForCausalLM", "gpt_oss", layers, own={"rope_scaling": None, "rope_parameters": None})
