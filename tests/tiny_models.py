"""Tiny random checkpoints, written by transformers: the oracle of the model tests and the models of end-to-end tests.

Weights have standard deviation 0.3: at the usual 0.02 the output hardly depends on positions, and a model without RoPE
passes for a right one. Biases and norms are random too: at their initial 0 and 1 they could be left out unnoticed.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

DEEPSEEK = {  # of latent attention's sizes none is as large as another; a dense layer, then experts
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
}  # fmt: skip
# Sizes of a delta net, of which none is as large as another but in one of its dimensions.
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"], "num_hidden_layers": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 3, "num_experts": 5, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56, "initializer_range": 0.2}  # fmt: skip
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
_GROWING = {  # of queries, from position 16 on
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
# Keys of config.json beside those of all: what a family needs to be small, or would not show.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "ministral3": {"rope_parameters": _GROWING, "num_hidden_layers": 3},
    "mistral4": {**DEEPSEEK, "head_dim": 24, "rope_parameters": _GROWING},
    "internlm3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    # Layers without a window have longer heads, and values made as keys are; the last two layers keep nothing.
    "gemma4_text": {"sliding_window": 8, "global_head_dim": 32, "num_global_key_value_heads": 1, "num_hidden_layers": 5,
        "attention_k_eq_v": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention",
        "sliding_attention", "full_attention"], "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 300, "enable_moe_block": True,
        "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40, "final_logit_softcapping": 4.0},
    "phi3": {},
    "glm": {},
    "glm4": {},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.15},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 8, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "seed_oss": {},
    "exaone4": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe_lite": {**{key: value for key, value in DEEPSEEK.items() if "dense" not in key}, "mlp_layer_types":
        ["sparse", "dense"]},
    "minicpm3": {**{key: value for key, value in DEEPSEEK.items() if "exp" not in key and "group" not in key},
        "scale_emb": 5, "scale_depth": 0.7, "dim_model_base": 16},
    "mixtral": {"num_experts_per_tok": 3, "num_local_experts": 5},
    "qwen2_moe": {"num_experts_per_tok": 3, "num_experts": 5, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56},
    "qwen3_moe": {"num_experts_per_tok": 3, "num_experts": 5, "moe_intermediate_size": 40},
    "olmoe": {"num_experts_per_tok": 3, "num_experts": 5},
    "gpt_oss": {"num_experts_per_tok": 3, "num_local_experts": 5, "sliding_window": 8, "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False,
            "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}},
    "glm4_moe": {"num_experts_per_tok": 3, "n_routed_experts": 8, "moe_intermediate_size": 40, "attention_bias": True,
        "routed_scaling_factor": 1.5},
    "minimax_m2": {"num_experts_per_tok": 3, "num_local_experts": 5, "rope_parameters": {"rope_type": "default",
        "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    # Values are shorter than keys; the layer with a window has twice as many of both.
    "mimo_v2_flash": {"num_experts_per_tok": 3, "n_routed_experts": 5, "moe_intermediate_size": 40, "head_dim": 24,
        "v_head_dim": 16, "sliding_window": 8, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    # A position counts for the scale of queries from 8 on; chunks are of 8 positions.
    "llama4_text": {"num_local_experts": 5, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8, "intermediate_size_mlp": 112, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1],
        "floor_scale": 8, "attn_scale": 0.8},
    "hy_v3": {"num_experts_per_tok": 3, "num_experts": 5, "moe_intermediate_size": 40},
    "laguna": {"num_experts_per_tok": 3, "num_experts": 5, "moe_intermediate_size": 40, "sliding_window": 8,
        "shared_expert_intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads_per_layer": [4, 6, 4],
        "moe_routed_scaling_factor": 1.5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "granitemoe": {"num_experts_per_tok": 3, "num_local_experts": 5, **_GRANITE},
    "granitemoeshared": {"num_experts_per_tok": 3, "num_local_experts": 5, **_GRANITE, "shared_intermediate_size": 56},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "qwen3_next": {**_DELTA, **_EXPERTS},
}  # fmt: skip
_SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14}  # fmt: skip
_QWEN_SIGHT = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
    "fullatt_block_indexes": [1], "initializer_range": 0.2}  # fmt: skip
_QWEN3_SIGHT = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "initializer_range": 0.2}  # fmt: skip
_DEEP = {"deepstack_visual_indexes": [0, 2]}  # blocks behind which features are made for layers 0 and 1
# Tokens of Qwen's, and of all that stand for pictures.
QWEN_TOKENS = {"image_token_id": 299, "video_token_id": 298, "vision_start_token_id": 297, "vision_end_token_id": 296}
_SQUARES = {"num_hidden_layers": 2, "image_size": 56, "initializer_range": 0.2}
_INTERN_SIGHT = _SIGHT | _SQUARES | {"image_size": [56, 56], "patch_size": [14, 14], "layer_scale_init_value": 0.7}
_PIXTRAL_SIGHT = _SIGHT | {"model_type": "pixtral", "num_hidden_layers": 3, "image_size": 196,
    "initializer_range": 0.2}  # fmt: skip
_GLM_SIGHT = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
    "image_size": 28, "patch_size": 14}  # fmt: skip
_GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
_THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_EXPERTS_ALONE = {"num_experts_per_tok": 3, "num_experts": 5, "moe_intermediate_size": 40}
# Models of pictures and text: model_type → keys of the text, and of what looks at pictures. Those whose text has a
# model_type may have others.
PICTURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        {"rope_parameters": _THREE_AXES},
        {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "initializer_range": 0.2},
    ),
    "qwen2_5_vl": ({"rope_parameters": _THREE_AXES}, _QWEN_SIGHT),
    "qwen3_vl": ({"rope_parameters": _THREE_AXES | {"mrope_interleaved": True}}, _QWEN3_SIGHT | _DEEP),
    "qwen3_vl_moe": (
        {"rope_parameters": _THREE_AXES | {"mrope_interleaved": True}, **_EXPERTS_ALONE},
        _QWEN3_SIGHT | _DEEP,
    ),
    "glm4v": ({"rope_parameters": _GLM_ROPE}, _GLM_SIGHT),
    "glm46v": ({"rope_parameters": _GLM_ROPE, "model_type": "glm4v_text"}, _GLM_SIGHT | {"model_type": "glm4v_vision"}),
    "glm4v_moe": ({"rope_parameters": _GLM_ROPE, **FAMILIES["glm4_moe"]}, _GLM_SIGHT),
    "mistral3": ({"model_type": "ministral3", **FAMILIES["ministral3"]}, _PIXTRAL_SIGHT),
    "kimi_k25": ({"model_type": "deepseek_v3", **DEEPSEEK}, _SIGHT),
    "internvl": (
        {"model_type": "qwen3"},
        _INTERN_SIGHT,
    ),
    "llava": ({"model_type": "llama"}, _SIGHT | _SQUARES | {"model_type": "clip_vision_model"}),
    "llava_next": ({"model_type": "mistral", "sliding_window": None}, _SIGHT | {"model_type": "clip_vision_model"}),
    "llava_next_video": ({"model_type": "llama"}, _SIGHT | {"model_type": "clip_vision_model"}),
    "llava_onevision": ({"model_type": "qwen2"}, _SIGHT | {"model_type": "siglip_vision_model"}),
}
VOCAB_SIZE = 300
_TOKENS = {
    "mistral3": {"image_token_index": 10}, "internvl": {"image_token_id": 299}, "llava": {"image_token_index": 299}
}  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = [
    "user assistant system the quick brown fox jumps over the lazy dog and then the other dog sleeps in the sun",
    "hello there, what is the answer to this question? the answer is that there are seven of them, not eleven",
    "one token after another the model writes a sentence that nobody has written before, and it means nothing",
]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 300 entries: 256 bytes, a few merges, ChatML's special tokens; <|im_end|> ends a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(family: str, **overrides: Any) -> Any:
    """transformers' config of a tiny model: 2 layers, hidden 64, 4 heads that share 2 key heads."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "pad_token_id": SPECIAL.index("<|endoftext|>"),
    }
    if family == "gemma3":  # text beside pictures
        text = {**values, **FAMILIES["gemma3_text"], **overrides}
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14}  # fmt: skip
        ends = {key: text.pop(key) for key in ("tie_word_embeddings", "eos_token_id", "pad_token_id", "bos_token_id")}
        return AutoConfig.for_model(
            family, text_config=deepcopy(text), vision_config=vision, mm_tokens_per_image=4, image_token_index=299,
            boi_token_index=298, eoi_token_index=297, **ends,
        )  # fmt: skip
    sight = overrides.pop("vision", {})  # keys of what looks at pictures
    if family in ("qwen3_5", "qwen3_5_moe"):  # the same
        text = {**values, **FAMILIES[f"{family}_text"], **overrides}
        ends = {key: text[key] for key in ("tie_word_embeddings", "eos_token_id", "pad_token_id", "bos_token_id")}
        return AutoConfig.for_model(
            family, text_config=deepcopy(text), vision_config=_beside(text, _QWEN3_SIGHT | sight), **ends, **QWEN_TOKENS
        )
    if family in PICTURES:
        text = {**values, **PICTURES[family][0], **overrides}
        sight = _beside(text, PICTURES[family][1] | sight)
        outer = {key: text.pop(key) for key in ("tie_word_embeddings",)}
        outer |= QWEN_TOKENS if family.startswith("qwen") else _TOKENS.get(family, {})
        return AutoConfig.for_model(family, text_config=deepcopy(text), vision_config=sight, **outer)
    if family.startswith("granitemoe"):
        del values["head_dim"]
    # A copy, for config classes write into what they are given.
    return AutoConfig.for_model(family, **deepcopy(values | FAMILIES.get(family, {}) | overrides))


def _beside(text: dict[str, Any], sight: dict[str, Any]) -> dict[str, Any]:
    """A copy whose features are as wide as the text."""
    width = {key: text["hidden_size"] for key in ("out_hidden_size",) if key in sight}
    return deepcopy(sight | width)


def _auto_class(model_type: str) -> Any:
    """Of transformers; Mistral 4 it lists with those of pictures. Qwen 3.5 would be the text alone."""
    pictures = model_type in PICTURES or model_type in ("mistral4", "qwen3_5", "qwen3_5_moe")
    return AutoModelForImageTextToText if pictures else AutoModelForCausalLM


def _as_published(folder: Path) -> None:
    """transformers writes other names of Kimi's layers and class than the published ones, which it reads."""
    file = folder / "model.safetensors"
    before, after = "language_model.model.blocks.", "language_model.model.layers."
    save_file({name.replace(before, after): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Kimi_K25ForCond", "KimiK25ForCond"))


def tiny_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
    kind: Any = None,
    **overrides: Any,
) -> Path:
    """Write a random model of `family` and its tokenizer into `folder`; overrides are keys of its config.json.

    dtype ("bfloat16", …) is what the weights are stored in; kind: the auto class of transformers, which says what is
    behind the layers; None: text.
    """
    dtype = getattr(torch, overrides.pop("dtype", "float32"))
    config = tiny_config(family, **overrides)
    kind = kind or _auto_class(family)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind.from_config(config)
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias"):
                torch.nn.init.normal_(weight, 0.0, 0.5)
            elif name.endswith("A_log"):  # states remember some tens of tokens
                torch.nn.init.normal_(weight, -3.0, 1.0)
            elif name.endswith("sinks"):
                torch.nn.init.normal_(weight, 0.0, 2.0)
            elif "norm" in name or name.endswith(("router.scale", "per_expert_scale", "layer_scalar")):
                torch.nn.init.normal_(weight, 1.0, 0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if family == "kimi_k25":
        _as_published(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


def reference(folder: Path, **keys: Any) -> Any:
    """transformers' own model of a folder that it wrote; keys: of its from_pretrained."""
    return _auto_class(AutoConfig.from_pretrained(folder).model_type).from_pretrained(folder, **keys)
