"""Tiny random checkpoints of transformers' architectures, with what sets each apart switched on: windows, caps, sinks,
multipliers, experts. A window is shorter than the prompts that are tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_WINDOWS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
# model type → keys of its config.json
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": {**_WINDOWS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
              "num_dense_layers": 1, "num_shared_experts": 1, "global_attn_every_n_layers": 2},
    "apertus": {},
    "arcee": {},
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {**_WINDOWS, "logit_scale": 0.5},
    "cwm": {**_WINDOWS, "bos_token_id": 0},
    "deepseek_v2": {**_ROUTED, **_LATENT, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "dots1": {**_ROUTED, **_WINDOWS},
    "ernie4_5": {"use_bias": True},
    "exaone4": {**_WINDOWS},
    "exaone_moe": {**_WINDOWS, **_EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
                   "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    "flex_olmo": {**_EXPERTS},
    "gemma": {},
    "gemma2": {**_WINDOWS, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 24},
    "gemma4_text": {**_WINDOWS, "global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": 300},
    "glm": {"rope_parameters": _PARTIAL, "attention_bias": True},
    "glm4": {"rope_parameters": _PARTIAL},
    "glm4_moe": {**_ROUTED, "rope_parameters": _PARTIAL, "use_qk_norm": True},
    "gpt2": {},
    "gpt_bigcode": {"multi_query": True},
    "gpt_neox": {"rope_parameters": _PARTIAL},
    "gpt_oss": {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5,
                "logits_scaling": 4.0},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
                   "attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jais2": {},
    "llama4_text": {"num_local_experts": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 64,
                    "intermediate_size_mlp": 96, "no_rope_layers": [1, 0], "attn_temperature_tuning": False},
    "hy_v3": {**_EXPERTS},
    "internlm3": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "ministral3": {},
    "nanochat": {},
    "persimmon": {"rope_parameters": _PARTIAL},
    "solar_open": {},
    "minicpm3": {**_LATENT, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {"rope_parameters": _PARTIAL},
    "olmo": {"clip_qkv": 1.5},
    "olmo2": {},
    "olmo3": {**_WINDOWS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "clip_qkv": 1.5},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": True},
    "phi": {"rope_parameters": _PARTIAL},
    "phi3": {"rope_parameters": _PARTIAL, "sliding_window": 8},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "lm_head_bias": True},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"rope_parameters": _PARTIAL, "use_qkv_bias": True},
    "starcoder2": {"use_bias": True, "sliding_window": 8},
}  # fmt: skip


def foreign_config(model_type: str, **overrides: Any) -> Any:
    """transformers' config of a tiny model: 2 layers, hidden 64, 4 heads that share 2 key heads."""
    values: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 2,
        "pad_token_id": 0,
    }  # fmt: skip
    return AutoConfig.for_model(model_type, **(values | ARCHITECTURES.get(model_type, {}) | overrides))


def foreign_checkpoint(tiny_models: Any, folder: Path, model_type: str, **overrides: Any) -> Path:
    """Write a random model of this type and its tokenizer into `folder`; overrides are keys of its config.json.

    tiny_models: the module beside this one.
    """
    config = foreign_config(model_type, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(weight, 0.0, 0.5)
            elif "norm" in name and weight.dim() == 1:
                torch.nn.init.normal_(weight, 1.0, 0.3)
            elif weight.dim() > 2:  # experts: transformers leaves some of them at their default
                torch.nn.init.normal_(weight, 0.0, 0.3)
    model.to(torch.float32).save_pretrained(folder)
    tiny_models.tiny_tokenizer().save_pretrained(folder)
    return Path(folder)
