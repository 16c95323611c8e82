"""Which of llama.cpp's architectures are read: what transformers calls their tensors and keys, and what its converter
does to the numbers. Torch is not needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .gguf_file import Keys

Settings = dict[str, Any]  # under the names of config.json
# Name of a layer's tensor → transformers'. Experts' are stacked in the file, [E, N, K], and one each in a folder.
LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GEMMA2 = {**LLAMA, **NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
OLMO2 = {part: name for part, name in {**LLAMA, **NORMS_BEHIND}.items() if part not in ("attn_norm", "ffn_norm")}
COHERE = {part: name for part, name in LLAMA.items() if part != "ffn_norm"}
PHI3 = {
    **{part: name for part, name in LLAMA.items() if part not in ("attn_q", "attn_k", "attn_v", "ffn_gate")},
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
QWEN_MOE = {
    **LLAMA,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GPT_OSS = {
    **{part: name for part, name in LLAMA.items() if part not in ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")},
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")},
}
_NO_MLP = {part: name for part, name in LLAMA.items() if part not in ("ffn_gate", "ffn_up", "ffn_down")}
MINIMAX = {**_NO_MLP, **MIXTRAL, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
GLM_MOE = {
    **{part: name for part, name in QWEN_MOE.items() if part not in ("ffn_norm", "ffn_gate_inp_shexp")},
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
BARE = (".sinks", ".e_score_correction_bias")  # what transformers names without "weight" or "bias"


@dataclass(frozen=True)
class GGUFFamily:
    architecture: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    # What differs from llama's keys, of (keys, what has been read); rope_parameters among it already.
    settings: Callable[[Keys, Settings], Settings] = lambda keys, config: {}
    norm_eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    permuted: bool = False  # rows of query and key: pairs that rotate together are neighbours in the file
    raised_norms: bool = False  # by 1: in a folder their weights are stored less one
    rotates_a_part: bool = False  # of a head
    layers_with_windows: bool = False  # whether it is known which
    qkv_bias: bool = False  # always, and of no other projection


def _llama(keys: Keys, config: Settings) -> Settings:
    """Mistral's models and their mixtures are "llama" too."""
    found: Settings = {}
    window = int(keys.number("attention.sliding_window", 0))
    if window and window < config["max_position_embeddings"]:
        found |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if keys.number("expert_count", 0):
        found |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **_experts(keys)}
        found["num_local_experts"] = found["num_experts"]
    return found


def _experts(keys: Keys) -> Settings:
    return {"num_experts": keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}


def _qwen_moe(keys: Keys, config: Settings) -> Settings:
    """Whether chosen weights are made to sum to 1 the files do not say: Qwen 3's are, Qwen 2's are not."""
    inner = keys.count("expert_feed_forward_length")
    found = {**_experts(keys), "moe_intermediate_size": inner, "norm_topk_prob": keys.prefix != "qwen2moe"}
    if keys.prefix == "qwen2moe":
        found["shared_expert_intermediate_size"] = keys.count("expert_shared_feed_forward_length")
    return found


def _minimax(keys: Keys, config: Settings) -> Settings:
    experts = _experts(keys)
    inner = keys.count("expert_feed_forward_length", config["intermediate_size"])
    rotated = keys.count("rope.dimension_count", config["head_dim"])
    return {**experts, "num_local_experts": experts["num_experts"], "intermediate_size": inner, "rotary_dim": rotated}


def _glm_moe(keys: Keys, config: Settings) -> Settings:
    """Layers that draft are counted with the others in the file, and stand behind them."""
    experts, drafting = _experts(keys), int(keys.number("nextn_predict_layers", 0))
    found = {
        **experts,
        "n_routed_experts": experts["num_experts"],
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_shared_experts": int(keys.number("expert_shared_count", 0)),
        "first_k_dense_replace": int(keys.number("leading_dense_block_count", 0)),
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(keys.file.metadata.get(f"{keys.prefix}.expert_weights_norm", True)),
        "partial_rotary_factor": keys.count("rope.dimension_count", config["head_dim"]) / config["head_dim"],
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
    }
    if drafting:
        found |= {
            "num_nextn_predict_layers": drafting,
            "num_hidden_layers": max(1, config["num_hidden_layers"] - drafting),
        }
    return found


def _gemma2(keys: Keys, config: Settings) -> Settings:
    return {
        "sliding_window": keys.count("attention.sliding_window", 4096),  # older files leave out what all have
        "attn_logit_softcapping": keys.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=46),
    }


def _gemma3(keys: Keys, config: Settings) -> Settings:
    local = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", 10_000.0)}
    return {
        "sliding_window": keys.count("attention.sliding_window"),
        "sliding_window_pattern": keys.count("attention.sliding_window_pattern", 6),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=62),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def _query_scalar(config: Settings, layers_of_27b: int) -> int:
    """No key has it. The largest models divide by their width over their heads, as llama.cpp knows by their layers."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(keys: Keys, config: Settings) -> Settings:
    window = int(keys.number("attention.sliding_window", 0))
    part = keys.count("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    return {
        "sliding_window": window or None,
        "partial_rotary_factor": part,
        "original_max_position_embeddings": config["rope_parameters"].get(
            "original_max_position_embeddings", config["max_position_embeddings"]
        ),
    }


def _granite(keys: Keys, config: Settings) -> Settings:
    return {
        "attention_multiplier": keys.positive("attention.scale", 1.0),
        "embedding_multiplier": keys.positive("embedding_scale", 1.0),
        "residual_multiplier": keys.positive("residual_scale", 1.0),
        "logits_scaling": keys.positive("logit_scale", 1.0),
    }


def _cohere(keys: Keys, config: Settings) -> Settings:
    return {"logit_scale": keys.positive("logit_scale"), "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.file.tensors}


def _gpt_oss(keys: Keys, config: Settings) -> Settings:
    """That the bounds of its rotation are not rounded no key says: all of these models have it so."""
    rope, experts = config["rope_parameters"], _experts(keys)
    return {
        **experts,
        "num_local_experts": experts["num_experts"],
        "intermediate_size": keys.count("expert_feed_forward_length", config["intermediate_size"]),
        "sliding_window": keys.count("attention.sliding_window"),
        "rope_parameters": rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily(
        "LlamaForCausalLM", "llama", {**LLAMA, **MIXTRAL}, _llama, permuted=True, layers_with_windows=True
    ),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": GGUFFamily("Qwen2MoeForCausalLM", "qwen2_moe", QWEN_MOE, _qwen_moe, qkv_bias=True),
    "qwen3moe": GGUFFamily("Qwen3MoeForCausalLM", "qwen3_moe", QWEN_MOE, _qwen_moe),
    # Their text halves; what looks at pictures is a file of its own.
    "qwen3vl": GGUFFamily("Qwen3ForCausalLM", "qwen3"),
    "qwen3vlmoe": GGUFFamily("Qwen3MoeForCausalLM", "qwen3_moe", QWEN_MOE, _qwen_moe),
    "minimax-m2": GGUFFamily("MiniMaxM2ForCausalLM", "minimax_m2", MINIMAX, _minimax, rotates_a_part=True),
    "glm4moe": GGUFFamily("Glm4MoeForCausalLM", "glm4_moe", GLM_MOE, _glm_moe, rotates_a_part=True, qkv_bias=True),
    "gemma": GGUFFamily("GemmaForCausalLM", "gemma", raised_norms=True),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", "gemma2", GEMMA2, _gemma2, raised_norms=True, layers_with_windows=True),
    "gemma3": GGUFFamily(
        "Gemma3ForCausalLM", "gemma3_text", GEMMA2, _gemma3, raised_norms=True, layers_with_windows=True
    ),
    "phi3": GGUFFamily("Phi3ForCausalLM", "phi3", PHI3, _phi3, rotates_a_part=True, layers_with_windows=True),
    "olmo2": GGUFFamily("Olmo2ForCausalLM", "olmo2", OLMO2),
    "granite": GGUFFamily("GraniteForCausalLM", "granite", LLAMA, _granite, permuted=True),
    "gpt-oss": GGUFFamily("GptOssForCausalLM", "gpt_oss", GPT_OSS, _gpt_oss, layers_with_windows=True),
    "command-r": GGUFFamily(
        "CohereForCausalLM", "cohere", COHERE, _cohere, norm_eps=("attention.layer_norm_epsilon", "layer_norm_eps")
    ),
}


def shapes_of(config: Settings) -> dict[str, tuple[int, ...]]:
    """Name of a tensor in the file, without its layer, → shape as torch has it: [out, in], of experts [E, out, in]."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config["head_dim"]
    query, key = head_dim * config["num_attention_heads"], head_dim * config["num_key_value_heads"]
    experts = config.get("num_experts", 0)
    small = config.get("moe_intermediate_size") or inner  # Mixtral's are as wide as its keys say of all
    model_type = config["model_type"]
    shared = config.get("shared_expert_intermediate_size", config.get("n_shared_experts", 0) * small)
    each = {
        "olmo2": ((query,), (key,)),
        "minimax_m2": ((query,), (key,)),
        "cohere": ((query // head_dim, head_dim), (key // head_dim, head_dim)),
    }
    query_norm, key_norm = each.get(model_type, ((head_dim,), (head_dim,)))
    matrices = {
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_qkv": (query + 2 * key, hidden),
        "attn_output": (hidden, query),
        "ffn_gate": (inner, hidden),
        "ffn_up": (2 * inner if model_type == "phi3" else inner, hidden),
        "ffn_down": (hidden, inner),
    }
    weights: dict[str, tuple[int, ...]] = {
        "token_embd": (vocabulary, hidden),
        "output": (vocabulary, hidden),
        **{name: (hidden,) for name in ("output_norm", "attn_norm", "ffn_norm", *NORMS_BEHIND)},
        "attn_q_norm": query_norm,
        "attn_k_norm": key_norm,
        **matrices,
        "attn_sinks": (config["num_attention_heads"],),
        "ffn_gate_inp": (experts, hidden),
        "ffn_gate_exps": (experts, small, hidden),
        "ffn_up_exps": (experts, small, hidden),
        "ffn_down_exps": (experts, hidden, small),
        "ffn_gate_inp_shexp": (1, hidden),
        "ffn_gate_shexp": (shared, hidden),
        "ffn_up_shexp": (shared, hidden),
        "ffn_down_shexp": (hidden, shared),
    }
    biases: dict[str, tuple[int, ...]] = {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    mixture = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    biases |= {f"{name}.bias": weights[name][:-1] for name in mixture} | {"exp_probs_b.bias": (experts,)}
    return {f"{name}.weight": shape for name, shape in weights.items()} | biases
