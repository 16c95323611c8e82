"""ModelConfig against transformers' AutoConfig, and the one-line refusals."""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import parse_model_config, read_folder
from vserve.engine.errors import ModelError
from vserve.engine.families import registry
from vserve.engine.families.encoders import ENCODERS
from vserve.engine.families.family import TRANSFORMERS
from vserve.engine.families.layer_spec import AttentionSpec, DeltaSpec, KVSpec, LatentAttentionSpec, MLPSpec, MoESpec
from vserve.engine.families.mistral import MISTRAL_LARGE3
from vserve.engine.families.pictures import PICTURES
from vserve.engine.families.rope_config import ROPE_TYPES
from vserve.engine.models.blocks import CausalLM
from vserve.engine.quant.weights import Placement
from vserve.engine.weights.loader import count_parameters, make_model
from vserve.engine.weights.matching import choose_formats

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "phi3": "Phi3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
}
# Whose layers differ from one another, or from llama's: test_{published,hybrid}_families.py have them.
UNLIKE = {
    "bamba": "BambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "hy_v3": "HYV3ForCausalLM",
    "laguna": "LagunaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "llama4_text": "Llama4ForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
# As published: keys of config.json of well-known checkpoints that this file's rules are about.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": {"model_type": "llama", "num_key_value_heads": 32, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "torch_dtype": "float16", "pretraining_tp": 1},
    "Llama-3.2-1B": {"model_type": "llama", "head_dim": 64, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "tie_word_embeddings": True, "eos_token_id": [128001, 128008, 128009],
        "bos_token_id": 128000, "max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
    "Mistral-7B-v0.1": {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0,
        "max_position_embeddings": 32768},
    "Mistral-Nemo": {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40,
        "sliding_window": None, "rope_theta": 1000000.0, "max_position_embeddings": 1024000},
    "Qwen2.5-7B": {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
        "num_hidden_layers": 28, "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28,
        "rope_theta": 1000000.0, "max_position_embeddings": 32768, "eos_token_id": 151645, "bos_token_id": 151643,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "Qwen3-0.6B": {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_hidden_layers": 28, "head_dim": 128, "tie_word_embeddings": True, "rope_scaling": None,
        "sliding_window": None, "rope_theta": 1000000, "max_position_embeddings": 40960, "dtype": "bfloat16"},
    "Mixtral-8x7B-v0.1": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "rope_theta": 1000000.0, "torch_dtype": "bfloat16"},
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", "head_dim": 128, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
        "rope_theta": 1000000.0, "max_position_embeddings": 40960, "max_window_layers": 48, "torch_dtype": "bfloat16"},
    "GLM-4.5-Air": {"model_type": "glm4_moe", "head_dim": 128, "hidden_size": 4096, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "attention_bias": True,
        "use_qk_norm": False, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408, "rope_theta": 1000000, "rope_scaling": None, "num_nextn_predict_layers": 1,
        "eos_token_id": [151329, 151336, 151338], "torch_dtype": "bfloat16"},
    "DeepSeek-V2-Lite": {"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "first_k_dense_replace": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "q_lora_rank": None, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": {"beta_fast": 32, "beta_slow": 1,
            "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
            "type": "yarn"}, "vocab_size": 102400, "eos_token_id": 100001, "torch_dtype": "bfloat16"},
    "DeepSeek-V3": {"model_type": "deepseek_v3", "num_experts_per_tok": 8, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
        "rope_theta": 10000, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
        "torch_dtype": "bfloat16"},
    "gemma-7b": {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None, "rope_theta": 10000.0,
        "num_hidden_layers": 28, "eos_token_id": 1, "torch_dtype": "bfloat16"},
    "gemma-2-9b": {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "sliding_window_size": 4096, "cache_implementation": "hybrid"},
    "gemma-2-27b": {"model_type": "gemma2", "hidden_size": 4608, "head_dim": 128, "num_attention_heads": 32,
        "num_key_value_heads": 16, "query_pre_attn_scalar": 144, "sliding_window": 4096, "num_hidden_layers": 46},
    "gemma-3-1b": {"model_type": "gemma3_text", "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1,
        "intermediate_size": 6912, "sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1000000,
        "rope_local_base_freq": 10000, "rope_scaling": None, "max_position_embeddings": 32768, "vocab_size": 262144,
        "eos_token_id": [1, 106]},
    "gemma-3-27b": {"model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "text_config":
        {"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
         "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
         "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896,
         "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14},
        "mm_tokens_per_image": 256},
    "Phi-3-mini-4k": {"model_type": "phi3", "sliding_window": 2047, "original_max_position_embeddings": 4096,
        "num_key_value_heads": 32, "rope_scaling": None},
    "Phi-3-mini-128k": {"model_type": "phi3", "max_position_embeddings": 131072, "sliding_window": 262144,
        "original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", "long_factor":
            [1.5 + i for i in range(48)], "short_factor": [1.0 + i / 50 for i in range(48)]}},
    "Phi-4-mini": {"model_type": "phi3", "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064,
        "partial_rotary_factor": 0.75, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "tie_word_embeddings": True, "rope_scaling": {"type": "longrope", "long_factor":
            [1.5 + i for i in range(48)], "short_factor": [1.0] * 48}},
    "phi-4": {"model_type": "phi3", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10,
        "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "rope_theta": 250000,
        "rope_scaling": None, "sliding_window": None, "num_hidden_layers": 40, "eos_token_id": 100265},
    "glm-4-9b-chat-hf": {"model_type": "glm", "rope_theta": 10000.0, "num_key_value_heads": 4},
    "GLM-4-32B-0414": {"model_type": "glm4", "hidden_size": 6144, "num_attention_heads": 48, "num_key_value_heads": 8,
        "attention_bias": False, "partial_rotary_factor": 0.5, "max_position_embeddings": 32768,
        "eos_token_id": [151329, 151336, 151338], "rms_norm_eps": 1e-5},
    "granite-3.3-8b": {"model_type": "granite", "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 16.0, "num_key_value_heads": 8, "rope_theta": 10000000.0,
        "rope_scaling": None, "tie_word_embeddings": True, "max_position_embeddings": 131072},
    "c4ai-command-r-v01": {"model_type": "cohere", "logit_scale": 0.0625, "rope_theta": 8000000.0,
        "max_position_embeddings": 8192, "model_max_length": 131072, "num_key_value_heads": 64},
    "c4ai-command-r7b": {"model_type": "cohere2", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 8, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 50000,
        "logit_scale": 0.25, "max_position_embeddings": 8192, "layer_switch": 4, "order_of_interleaved_layers":
        "local_attn_first", "rotary_pct": 1.0, "use_embedding_sharing": True},
    "OLMo-2-7B": {"model_type": "olmo2", "vocab_size": 100352, "rope_theta": 500000, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "rope_scaling": None, "eos_token_id": 100257},
    "Olmo-3-7B": {"model_type": "olmo3", "vocab_size": 100278, "rope_theta": 500000, "max_position_embeddings": 65536,
        "sliding_window": 4096, "rms_norm_eps": 1e-6, "rope_scaling": {"attention_factor": 1.2079441541679836,
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 8192,
            "rope_type": "yarn"}},
    "SmolLM3-3B": {"model_type": "smollm3", "rope_theta": 5000000.0, "max_position_embeddings": 65536,
        "no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36, "use_sliding_window": False,
        "sliding_window": None, "eos_token_id": 128012},
    "Seed-OSS-36B": {"model_type": "seed_oss", "hidden_size": 5120, "rope_theta": 10000000.0, "rope_scaling":
        {"rope_type": "default"}, "attention_out_bias": False, "attention_bias": True},
    "EXAONE-4.0-32B": {"model_type": "exaone4", "hidden_size": 5120, "num_attention_heads": 40, "head_dim": 128,
        "num_key_value_heads": 8, "num_hidden_layers": 64, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16, "max_position_embeddings": 131072,
        "rope_theta": 1000000, "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
    "EXAONE-4.0-1.2B": {"model_type": "exaone4", "hidden_size": 2048, "sliding_window": None, "num_hidden_layers": 30,
        "num_key_value_heads": 8, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 30},
    "MiniCPM3-4B": {"model_type": "minicpm3", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
        "max_position_embeddings": 32768, "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 8 + [3.0] * 8,
            "short_factor": [1.0] * 8 + [3.0] * 8, "original_max_position_embeddings": 32768}},
    "GLM-4.7-Flash": {"model_type": "glm4_moe_lite", "num_nextn_predict_layers": 1, "rope_theta": 1000000,
        "max_position_embeddings": 202752, "num_experts_per_tok": 4, "topk_method": "noaux_tc",
        "eos_token_id": [154820, 154827, 154829], "dtype": "bfloat16"},
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "experts_per_token": 4,
        "num_experts_per_tok": 4, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_theta": 150000, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
        "initial_context_length": 4096, "max_position_embeddings": 131072, "eos_token_id": 200002},
}  # fmt: skip
# What their max_model_len is, where it is not max_position_embeddings.
LONGEST = {"Qwen2.5-7B": 131072}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-tuned": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7,
        "mscale_all_dim": 0.9, "truncate": False},
}  # fmt: skip


def write(folder: Path, raw: dict[str, Any]) -> Path:
    raw = {"num_experts_per_tok": 6} | raw if raw.get("model_type") == "deepseek_v2" else raw  # which has no default
    raw = {"head_dim": 128} | raw if raw.get("model_type") == "glm4_moe" else raw  # whose default has no even half
    raw = {"architectures": [FAMILIES[raw["model_type"]]], **raw} if raw.get("model_type") in FAMILIES else raw
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def assert_same_mlp(ours: MLPSpec | MoESpec, theirs: Any) -> None:
    if isinstance(ours, MLPSpec):
        assert ours.inner == theirs.intermediate_size
        return
    inner = getattr(theirs, "moe_intermediate_size", None)
    assert ours.inner == (theirs.intermediate_size if inner is None else inner)
    assert ours.routing.num_experts == (getattr(theirs, "num_local_experts", None) or theirs.num_experts)
    shared = [getattr(theirs, f"shared_{name}", 0) for name in ("expert_intermediate_size", "intermediate_size")]
    assert ours.shared_inner == (max(shared) or ours.inner * getattr(theirs, "n_shared_experts", 0))
    assert ours.routing.factor == getattr(theirs, "routed_scaling_factor", 1.0)
    if ours.routing.num_groups > 1:
        assert (ours.routing.num_groups, ours.routing.kept_groups) == (theirs.n_group, theirs.topk_group)
    assert ours.routing.top_k == theirs.num_experts_per_tok
    sums_to_one = ours.routing.renormalize or ours.routing.softmax_chosen
    assert sums_to_one == getattr(theirs, "norm_topk_prob", True)


def assert_latent_agrees(ours: LatentAttentionSpec, theirs: Any) -> None:
    assert ours.q_rank == (theirs.q_lora_rank or 0)
    assert ours.kv_rank == theirs.kv_lora_rank
    assert (ours.nope_dim, ours.rope_dim) == (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim)
    assert ours.value_dim == theirs.v_head_dim
    assert ours.bias == theirs.attention_bias
    assert ours.interleaved == getattr(theirs, "rope_interleave", theirs.model_type == "deepseek_v2")


def assert_agrees(ours: ModelConfig, whole: Any) -> None:
    theirs = whole.get_text_config()
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert len(ours.layers) == theirs.num_hidden_layers
    for layer in ours.layers:
        assert_same_mlp(layer.mlp, theirs)
        if isinstance(delta := layer.mixer, DeltaSpec):
            sizes = delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim, delta.conv_width
            names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
            assert sizes == tuple(getattr(theirs, f"linear_{name}") for name in names)
            continue
        assert layer.attention.num_heads == theirs.num_attention_heads
        if isinstance(layer.attention, LatentAttentionSpec):
            assert_latent_agrees(layer.attention, theirs)
            continue
        assert layer.attention.num_kv_heads == theirs.num_key_value_heads
        dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert layer.attention.head_dim == dim
    assert ours.norm_eps == (getattr(theirs, "rms_norm_eps", None) or theirs.layer_norm_eps)
    assert ours.tie_word_embeddings == whole.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    eos = getattr(whole, "eos_token_id", None) or theirs.eos_token_id
    assert ours.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    if whole.dtype is not None:
        assert ours.dtype == whole.dtype
    window = (getattr(theirs, "sliding_window", None) or 0) if getattr(theirs, "use_sliding_window", True) else 0
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    assert [layer.attention is None for layer in ours.layers] == [kind == "linear_attention" for kind in types]
    windows = [layer.attention.window for layer in ours.layers if layer.attention is not None]
    types = [kind for kind in types if kind != "linear_attention"]
    assert windows == [window if kind == "sliding_attention" else 0 for kind in types]
    for layer, kind in zip((layer for layer in ours.layers if layer.attention), types, strict=True):
        if layer.attention.rope is not None:
            assert_rotated_alike(layer.attention, theirs.rope_parameters.get(kind, theirs.rope_parameters))
    rotated = [layer.attention.rope is not None for layer in ours.layers if layer.attention is not None]
    if theirs.model_type in ("cohere2", "exaone4") and window:
        assert rotated == [kind == "sliding_attention" for kind in types]
    else:
        assert rotated == [bool(there) for there in getattr(theirs, "no_rope_layers", [1] * len(rotated))]


def assert_rotated_alike(attention: AttentionSpec | LatentAttentionSpec, theirs: dict[str, Any]) -> None:
    rope = attention.rope
    assert rope is not None and (rope.type, rope.theta) == (theirs["rope_type"], theirs["rope_theta"])
    if isinstance(attention, AttentionSpec):
        assert attention.rotary_dim == int(attention.head_dim * theirs.get("partial_rotary_factor", 1.0))
    for name in ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim"):
        if theirs.get(name) is not None:
            assert getattr(rope, name) == theirs[name], name
    for name in ("short_factor", "long_factor"):
        assert getattr(rope, name) == tuple(theirs.get(name, ())), name
    if "original_max_position_embeddings" in theirs:
        assert rope.original_length == theirs["original_max_position_embeddings"]


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_of_missing_keys_are_transformers(tmp_path: Path, family: str) -> None:
    write(tmp_path, {"model_type": family})
    assert_agrees(read_folder(tmp_path), AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_read_as_transformers_reads_them(tmp_path: Path, name: str) -> None:
    write(tmp_path, PUBLISHED[name])
    ours = read_folder(tmp_path)
    assert_agrees(ours, AutoConfig.from_pretrained(tmp_path))
    assert ours.max_model_len == LONGEST.get(name, ours.max_position_embeddings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_transformers_makes_of_them_reads_the_same(tmp_path: Path, name: str) -> None:
    """Both dialects: as published, and as transformers writes it today."""
    write(tmp_path, PUBLISHED[name])
    old = read_folder(tmp_path)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert replace(read_folder(tmp_path), dtype=old.dtype) == old


def test_what_deepseek_v3_keeps_of_a_token() -> None:
    """One row a layer: 512 elements that are key and value, and 64 that are rotated; 68.6 KiB in bf16, not 4,880."""
    config = parse_model_config(PUBLISHED["DeepSeek-V3"])
    assert {layer.attention.kv for layer in config.layers} == {KVSpec(1, 576, 512, shared=True)}
    assert sum(2 * layer.attention.kv.token_elements for layer in config.layers) == 61 * 576 * 2 == 70272
    expanded = 128 * (128 + 64 + 128)
    assert 61 * expanded * 2 == 4880 << 10
    assert config.layers[0].attention.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert config.max_model_len == 163840


def test_gpt_oss_rotates_as_transformers_where_nothing_is_said() -> None:
    config = parse_model_config({"model_type": "gpt_oss"})
    rope = config.layers[0].attention.rope
    assert (rope.type, rope.theta, rope.factor, rope.original_length) == ("yarn", 150000.0, 32.0, 4096)
    assert not rope.truncate and config.max_model_len == 131072


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5, supported is 1.702: use another model"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 36 layers: correct the file"),
        ("gpt_oss", {"layer_types": ["mamba"] * 36}, "layer type 'mamba' is not supported"),
        ("deepseek_v2", {}, "num_experts_per_tok is missing, to how many experts a token goes: add it"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "topk_method": "best"}, "topk_method is 'best', supported are"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "norm_topk_prob": True}, "norm_topk_prob is set, which is not"),
        ("deepseek_v2", {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63, rotary embedding needs an even one"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', supported is sigmoid"),
        ("deepseek_v3", {"n_group": 3}, "256 experts are no 3 groups (n_group) of which 4 (topk_group) are chosen"),
        (
            "deepseek_v3",
            {"first_k_dense_replace": "two"},
            "first_k_dense_replace is 'two', a whole number from 0 on belongs",
        ),
        (
            "deepseek_v3",
            {"n_shared_experts": "one"},
            "n_shared_experts is 'one', a whole number from 0 on belongs there",
        ),
    ],
)
def test_mixtures_with_other_attention_that_are_refused(family: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_config({"model_type": family, **keys})
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "rope_scaling with type"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "glm4", "cohere2"])
def test_rope_spellings(tmp_path: Path, family: str, spelling: str, rope: str) -> None:
    values = dict(ROPES[rope])
    raw: dict[str, Any] = {"model_type": family, "max_position_embeddings": 65536}
    if spelling == "rope_parameters":
        raw["rope_parameters"] = values | {"rope_theta": 50000.0}
    else:
        if "type" in spelling:
            values["type"] = values.pop("rope_type")
        raw |= {"rope_scaling": values, "rope_theta": 50000.0}
    write(tmp_path, raw)
    config = read_folder(tmp_path)
    assert_agrees(config, AutoConfig.from_pretrained(tmp_path))
    assert config.layers[0].attention.rope.theta == 50000.0
    lengths = {"linear": 4 * 65536, "dynamic": 2 * 65536, "yarn": 4 * 32768, "yarn-tuned": 4 * 65536}
    assert config.max_model_len == lengths.get(rope, 65536)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_names_that_longrope_had(tmp_path: Path, name: str) -> None:
    raw = PUBLISHED["Phi-3-mini-128k"]
    old = raw | {"rope_scaling": raw["rope_scaling"] | {"type": name}}
    assert parse_model_config(old) == parse_model_config(raw)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 16,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ],
)  # fmt: skip
def test_qwen_windows(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    write(tmp_path, {"model_type": family, **SMALL, **keys})
    assert_agrees(read_folder(tmp_path), AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_norms_and_parameter_count_match_transformers_model(family: str) -> None:
    for extra in ({}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24}):
        raw = {"model_type": family, "vocab_size": 99, "intermediate_size": 40, "pad_token_id": None, **SMALL, **extra}
        if family in ("olmoe", "glm4_moe_lite"):
            raw.pop("head_dim", None)  # which the norms of the first do not know of; the second's is rotated, in all
        if family.startswith("deepseek"):
            raw |= {"num_key_value_heads": 4, "q_lora_rank": 24 if extra else None, "num_experts_per_tok": 4}
            raw |= {"mlp_bias": False, "first_k_dense_replace": 2, "num_mtp_layers": 0}
        if family.startswith(("qwen3_5", "qwen3_next")):
            raw |= {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
        if family in ("gemma3", "qwen3_5", "qwen3_5_moe"):
            raw = {"model_type": family, "text_config": {**raw, "model_type": f"{family}_text"}}
        config = parse_model_config(raw)
        with torch.device("meta"):
            kind = AutoModelForImageTextToText if family == "mistral4" else AutoModelForCausalLM
            theirs = kind.from_config(AutoConfig.for_model(**raw).get_text_config())
        names = [name for name, _ in theirs.named_parameters()]
        for layer in config.layers:
            if (attention := layer.attention) is None:
                continue
            assert getattr(layer.mlp, "bias", False) == any(
                name.endswith(("up_proj.bias", "up_proj_bias")) for name in names
            )
            if isinstance(attention, LatentAttentionSpec):
                assert attention.bias == any(name.endswith("kv_a_proj_with_mqa.bias") for name in names)
                continue
            assert attention.qkv_bias == any(name.endswith(("q_proj.bias", "qkv_proj.bias")) for name in names)
            assert attention.output_bias == any(name.endswith("o_proj.bias") for name in names)
            assert bool(attention.qk_norm) == any("q_norm" in name for name in names)
        corrections = [bias for name, bias in theirs.named_buffers() if name.endswith("correction_bias")]
        assert count_parameters(config) == sum(weight.numel() for weight in (*theirs.parameters(), *corrections))
        ours = CausalLM(config, Placement(torch.float16, torch.device("cpu")), max_len=8)
        for holder in choose_formats(ours):
            holder.create()
        assert count_parameters(config) == sum(weight.numel() for weight in ours.parameters())
        assert ours.kv_specs() == config.kv_specs()
        if isinstance(attention, LatentAttentionSpec):
            rank, rotated = {"minicpm3": (256, 32), "mistral4": (256, 64)}.get(family, (512, 64))
            assert attention.kv == KVSpec(1, rank + rotated, rank, shared=True)
        else:
            assert attention.kv == KVSpec(2, attention.head_dim, attention.head_dim, attention.window)


def test_every_family_is_tested_here() -> None:
    others = (*PICTURES, MISTRAL_LARGE3)  # in test_pictures.py, and of which transformers has none
    own = [family for family in registry.FAMILIES if family not in others]
    assert {family.model_type: family.architecture for family in own} == FAMILIES | UNLIKE


def test_counting_the_parameters_of_a_large_model_allocates_nothing() -> None:
    raw = {"model_type": "llama", "hidden_size": 1 << 40, "head_dim": 1 << 40, "num_hidden_layers": 2}
    assert count_parameters(parse_model_config(raw)) > 1 << 85


def test_architecture_falls_back_to_the_model_type() -> None:
    assert parse_model_config({"model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


def test_dtype_of_a_silent_config_is_that_of_the_weights(tmp_path: Path, tiny_model: Any) -> None:
    folder = tiny_model("llama", dtype="bfloat16")
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("dtype", None), raw.pop("torch_dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_folder(tmp_path).dtype is torch.float32  # no weights to look at
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert read_folder(tmp_path).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"architectures": ["NoSuchModel"]},
            "architecture NoSuchModel is not supported: serve one of LlamaForCausalLM, MistralForCausalLM, "
            "Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": ["AlbertModel"]}, "architecture AlbertModel is not served: it is an encoder"),
        (
            {"architectures": "LlamaForCausalLM"},
            "config.json: architectures is 'LlamaForCausalLM', a list of names such as [\"LlamaForCausalLM\"] belongs "
            "there: correct the file",
        ),
        ({"architectures": [7]}, 'config.json: architectures is [7], a list of names such as ["LlamaForCausalLM"]'),
        ({"architectures": {}}, 'config.json: architectures is {}, a list of names such as ["LlamaForCausalLM"]'),
        (
            {"architectures": None, "model_type": ["llama"]},
            "config.json: model_type is ['llama'], a name belongs there: correct the file",
        ),
        ({"architectures": None, "model_type": None}, "architecture unnamed is not supported: serve one of Llama"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act is 'gelu', supported is silu: use another model"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "silu"},
            "supported are gelu_pytorch_tanh, gelu_new: use",
        ),
        (
            {"rope_scaling": {"rope_type": "xpos", "factor": 4}},
            "config.json: rope type 'xpos', supported are default, linear, dynamic, yarn, llama3, longrope, ",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4}},
            "config.json: short_factor is None, a list of numbers belongs there: correct the file",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4, "short_factor": [1, 2], "long_factor": [1, 2]}},
            "config.json: short_factor has 2 entries, 64 pairs of elements are rotated: correct the file",
        ),
        ({"rope_scaling": {"type": "linear"}}, "config.json: factor is None, a number above 0 belongs there: correct"),
        ({"rope_parameters": {"full_attention": {}}}, "rope parameters that differ by layer are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, other than 1 is not supported for this"),
        (
            {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 0.51, "head_dim": 128},
            "config.json: partial_rotary_factor 0.51 of a head of 128 is 65, an even number up to 128 is needed",
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": 3},
            "config.json: text_config is 3, an object belongs there: correct the file",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
            "attention goes both ways (is_causal, use_bidirectional_attention), which is computed for plain layers",
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            "no_rope_layers has 1 entries for 36 layers: correct the file",
        ),
        (
            {"architectures": ["GraniteForCausalLM"], "residual_multiplier": "x"},
            "residual_multiplier is 'x', a number above 0 belongs there: correct the file",
        ),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 32 is no multiple of num_key_value_heads 3: correct the file",
        ),
        ({"hidden_size": "large"}, "config.json: hidden_size is 'large', a whole number above 0 belongs there"),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers is 0, a whole number above 0 belongs there"),
        ({"vocab_size": True}, "config.json: vocab_size is True, a whole number above 0 belongs there"),
        ({"hidden_size": 10**30}, f"hidden_size is {10**30}, more than 1099511627776 is none of a model: correct"),
        ({"rms_norm_eps": math.inf}, "config.json: rms_norm_eps is inf, a number above 0 belongs there"),
        ({"tie_word_embeddings": "x"}, "config.json: tie_word_embeddings is 'x', true or false belongs there: correct"),
        ({"attention_bias": "yes"}, "config.json: attention_bias is 'yes', true or false belongs there: correct"),
        ({"attention_bias": []}, "config.json: attention_bias is [], true or false belongs there: correct"),
        ({"is_causal": "no"}, "config.json: is_causal is 'no', true or false belongs there: correct"),
        ({"hidden_act": 7}, "config.json: hidden_act is 7, a name belongs there: correct"),
        (
            {"eos_token_id": [2, "</s>"]},
            "eos_token_id is [2, '</s>'], a token's number or a list of some belongs there",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": "x"},
            "config.json: norm_topk_prob is 'x', true or false belongs there: correct the file",
        ),
        *(
            (
                {"architectures": [name], "sliding_window": -1},
                "config.json: sliding_window is -1, a whole number",
            )
            for name in ("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM")
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4, "mlp_only_layers": [0, 99]},
            "config.json: mlp_only_layers is [0, 99], a list of layers from 0 to 3 belongs there: correct the file",
        ),
        (
            {
                "architectures": ["Qwen2MoeForCausalLM"],
                "num_hidden_layers": 1,
                "use_sliding_window": True,
                "layer_types": ["foo"],
            },
            "layer type 'foo' is not supported (full_attention, sliding_attention are)",
        ),
        *(
            (
                {"architectures": [name], "topk_method": "foo", "head_dim": 64},
                "config.json: topk_method is 'foo', supported is noaux_tc: use another model",
            )
            for name in ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "n_shared_experts": -1},
            "config.json: n_shared_experts is -1, a whole number from 0 on belongs there: correct the file",
        ),
        ({"head_dim": 15}, "config.json: head_dim is 15, rotary embedding needs an even one"),
        ({"torch_dtype": "int4"}, "config.json: dtype is 'int4', supported are bfloat16, float16, float32, float64"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | keys)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_defaults_are_those_of_transformers() -> None:
    root = Path(__file__).parents[2]
    written = runpy.run_path(str(root / "tools" / "docs" / "family_defaults.py"))
    assert (root / "configs" / "families.json").read_text() == written["table"](), (
        "run python tools/docs/family_defaults.py"
    )


def test_a_family_has_defaults_of_its_own_only_where_transformers_has_others() -> None:
    for family in (*registry.FAMILIES, *registry.BOTH_WAYS):
        known = TRANSFORMERS[family.like or family.model_type]
        assert all(known.get(key) != value or key not in known for key, value in family.own.items()), family


OF_ANY_KIND = ("x", -1, 0, 1.5, True, [], ["x"], [99], {"a": 1}, math.nan, math.inf, 10**30, [None], None)


@pytest.mark.parametrize(
    "family", (*registry.FAMILIES, *registry.BOTH_WAYS, *ENCODERS), ids=lambda family: str(family.model_type)
)
def test_a_key_of_any_kind_is_read_or_refused(family: Any) -> None:
    """In one line: nothing else is raised."""
    base = {"model_type": family.model_type, "num_hidden_layers": 4, "num_experts_per_tok": 2}
    for key in family.defaults:
        for value in OF_ANY_KIND:
            try:
                parse_model_config({**base, key: value})
            except ModelError as error:
                assert "\n" not in str(error)


def test_a_rotation_of_any_kind_is_read_or_refused() -> None:
    """And what is read makes tables: text that no one looks at would end a start that has begun."""
    rope = {"factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10_000.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}  # fmt: skip
    yarn = {"attention_factor": 1.1, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "truncate": True}  # fmt: skip
    base = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64, "num_hidden_layers": 1}
    place = Placement(torch.float32, torch.device("cpu"))
    refused = set()
    for kind in ROPE_TYPES:
        whole = {"rope_type": kind, **rope, **yarn}
        for key in whole:
            for value in OF_ANY_KIND:
                described = {**base, "architectures": ["LlamaForCausalLM"], "rope_scaling": {**whole, key: value}}
                try:
                    make_model(parse_model_config(described), place, 8)
                except ModelError as error:
                    assert "\n" not in str(error)
                    refused.add((kind, key, str(value)))
    assert {("yarn", key, "x") for key in yarn} <= refused and ("longrope", "attention_factor", "x") in refused


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers: correct the file"),
        ({"layer_types": ["full_attention"] * 2 + ["mamba"]}, "layer type 'mamba' is not supported"),
        ({"layer_types": ["sliding_attention"] * 3}, "no window is on: set use_sliding_window and sliding_window"),
    ],
)
def test_layer_types_that_cannot_be_served(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_model_config({"model_type": "qwen3", **SMALL, **keys})


def test_files_that_are_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **kwargs: Any) -> str:
        raise PermissionError(13, "Permission denied")

    def refusal(folder: Path) -> str:
        with pytest.raises(ModelError) as caught:
            read_folder(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    remedy = "pass the folder of a Hugging Face model (config.json, tokenizer.json, *.safetensors)"
    assert refusal(tmp_path) == f"{tmp_path} has no config.json: {remedy}"
    (tmp_path / "model.gguf").touch()
    assert refusal(tmp_path) == (
        f"{tmp_path} has no config.json, only GGUF files: pass one of them, such as {tmp_path / 'model.gguf'}"
    )
    (tmp_path / "adapter_config.json").touch()
    remedy_here = f"pass its base model, and --merge-lora {tmp_path}"
    assert refusal(tmp_path).startswith(f"{tmp_path} is a LoRA adapter: {remedy_here}")
    assert refusal(tmp_path / "gone") == f"{tmp_path / 'gone'} is no folder: {remedy}"
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert "config.json is no valid JSON (Expecting value: line 1" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert f"holds a list where an object belongs: {remedy}" in refusal(tmp_path)
    with monkeypatch.context() as patch:  # root may read every file
        patch.setattr(Path, "read_text", denied)
        assert "config.json may not be read by the user with the id" in refusal(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in refusal(tmp_path)
