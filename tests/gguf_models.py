"""Checkpoints of a folder written as GGUF files by the package gguf, as llama.cpp's converter does it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file

# Where a block has fp16 numbers.
HALVES: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "IQ1_S": (0,),
    "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "TQ1_0": (52,),
    "TQ2_0": (64,), "NVFP4": (),
}  # fmt: skip
# transformers' model_type → llama.cpp's architecture, where they differ.
ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
    "cohere": "command-r", "gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2", "glm4_moe": "glm4moe",
}  # fmt: skip
# What converters call the pre-tokenisers of these architectures; any of them reads the tiny tokenizer.
PRE = {
    "llama": "llama-bpe",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "gpt-oss": "gpt-4o",
    "minimax-m2": "minimax-m2",
    "glm4moe": "glm4",
}
PERMUTED = ("llama", "granite")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def random_blocks(name: str, rows: int, columns: int, seed: int = 0, sizes: Sequence[float] = (1.0,)) -> np.ndarray:
    """uint8 [rows, bytes of a row]: any bytes, with fp16 numbers of either sign and about one of the `sizes`."""
    random = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = random.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    for at in HALVES[name]:
        scales = random.choice(sizes, (*blocks.shape[:2], 1))
        halves = (random.standard_normal((*blocks.shape[:2], 1)) * scales).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    if name == "IQ1_M":  # its fp16 lies in the highest nibbles of four scales
        blocks[..., 55] = 0x30 | (blocks[..., 55] & 15)
    return blocks.reshape(rows, -1)


def quantized(values: torch.Tensor, kind: str, seed: int) -> np.ndarray:
    """In numpy as the writer takes it. Types that the package cannot quantise to become random blocks of this shape."""
    array = values.float().numpy()
    try:
        return quants.quantize(array, GGMLQuantizationType[kind])
    except NotImplementedError:
        rows = random_blocks(kind, array[..., 0].size, array.shape[-1], seed=seed, sizes=(0.002,))
        return rows.reshape(*array.shape[:-1], -1)


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """What the converter does to the rows of query and key for "llama"."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    folder: Path,
    path: Path,
    kind: Callable[[str], str] = lambda name: "F32",
    keys: Mapping[str, Any] | None = None,
    rope_freqs: Sequence[float] | None = None,
    shards: int = 1,
    json_tokenizer: bool = False,
) -> Path:
    """The model of `folder` in `path`; `kind` of a matrix by its name in the file, `keys` of the architecture added or
    changed (None: left out). With `shards` the path of the first."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    arch = ARCHITECTURES.get(family, family)
    tensors = stacked(load_file(folder / "model.safetensors"))
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), layers)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=-(-len(tensors) // shards) if shards > 1 else 0)
    rope = config["rope_parameters"]
    values: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": layers,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "vocab_size": config["vocab_size"],
        **own_keys(arch, config),
        **(keys or {}),
    }
    for key, value in values.items():
        if value is not None:
            add_key(writer, f"{arch}.{key}", value)
    add_tokenizer(writer, folder, config["vocab_size"], PRE.get(arch, "llama-bpe"), json_tokenizer)
    for seed, (name, tensor) in enumerate(tensors.items()):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if arch in PERMUTED and (".q_proj" in name or ".k_proj" in name):
            tensor = permuted(tensor, heads if ".q_proj" in name else config["num_key_value_heads"])
        matrix = tensor.dim() > 1 and not any(part in stored for part in ("ffn_gate_inp", "norm", ".bias"))
        chosen = kind(stored) if matrix else "F32"
        writer.add_tensor(stored, quantized(tensor, chosen, seed), raw_dtype=GGMLQuantizationType[chosen])
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    for length in ("long", "short") if "long_factor" in rope else ():
        writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if shards == 1 else path.with_name(f"{path.stem}-00001-of-{shards:05}.gguf")


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts' matrices as one tensor a layer, under the names that the package knows."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    found |= {name: torch.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}
    for name in [name for name in found if ".mlp.experts." in name and name.endswith(("proj", "proj_bias"))]:
        found |= separated(name, found.pop(name))  # of gpt-oss
    return {f"{name}.weight" if name.endswith(".sinks") else name: tensor for name, tensor in found.items()}


def separated(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """gpt-oss's [E, K, N] and biases [E, N] as llama.cpp has them: rows first, those of gate and up, which take turns,
    in a tensor each."""
    kind = "bias" if name.endswith("_bias") else "weight"
    path, _, part = name.removesuffix("_bias").rpartition(".")
    rows = tensor if kind == "bias" else tensor.transpose(1, 2)
    parts = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]} if part == "gate_up_proj" else {part: rows}
    return {f"{path}.{part}.{kind}": one.contiguous() for part, one in parts.items()}


def one_each(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts' tensors apart, under the names that most families of transformers have."""
    found = {}
    for name, tensor in stacked(tensors).items():
        if match := re.fullmatch(r"(.*\.experts)\.(.*)", name):
            found |= {f"{match[1]}.{expert}.{match[2]}": one for expert, one in enumerate(tensor)}
        else:
            found[name.replace(".sinks.weight", ".sinks").replace("correction.bias", "correction_bias")] = tensor
    return found


def own_keys(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes of one architecture."""
    eps = config.get("rms_norm_eps", config.get("layer_norm_eps"))
    found: dict[str, Any] = {f"attention.layer_norm_{'' if arch == 'command-r' else 'rms_'}epsilon": float(eps)}
    experts = config.get("num_local_experts", config.get("num_experts", config.get("n_routed_experts")))
    if experts is not None:
        found |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    if "moe_intermediate_size" in config:
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in config:
        found["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if arch in ("gemma2", "gemma3"):
        found["attention.sliding_window"] = config["sliding_window"]
    if arch == "gemma2":
        found |= {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    if arch == "granite":
        found |= {
            "attention.scale": float(config["attention_multiplier"]),
            "embedding_scale": float(config["embedding_multiplier"]),
            "residual_scale": float(config["residual_multiplier"]),
            "logit_scale": float(config["logits_scaling"]),
        }
    if arch == "gpt-oss":
        rope = config["rope_parameters"]
        found |= {
            "attention.sliding_window": config["sliding_window"],
            "expert_feed_forward_length": config["intermediate_size"],
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if arch in ("minimax-m2", "glm4moe"):
        found |= {
            "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
            "expert_gating_func": 2,
        }
    if arch == "minimax-m2":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if arch == "glm4moe":
        found |= {
            "expert_shared_count": config["n_shared_experts"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": config["norm_topk_prob"],
        }
    if arch == "command-r":
        found["logit_scale"] = float(config["logit_scale"])
    if arch == "phi3":
        rope = config["rope_parameters"]
        found["rope.dimension_count"] = int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        found["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        if config.get("sliding_window"):
            found["attention.sliding_window"] = config["sliding_window"]
    return found


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int, pre: str, json_tokenizer: bool = False) -> None:
    """Byte-level BPE of a tokenizer.json; `size`: rows of the embedding, more than tokens perhaps."""
    text = (folder / "tokenizer.json").read_text()
    content = json.loads(text)
    tokens = {index: (token, NORMAL) for token, index in content["model"]["vocab"].items()}
    for added in content["added_tokens"]:
        tokens[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    table = [tokens.get(index, (f"[PAD{index}]", UNUSED)) for index in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in table])
    writer.add_token_types([kind for _, kind in table])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    if json_tokenizer:
        writer.add_string("tokenizer.huggingface.json", text)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = {token: index for index, (token, _) in tokens.items()}
    for name, add in (("eos_token", writer.add_eos_token_id), ("bos_token", writer.add_bos_token_id),
                      ("pad_token", writer.add_pad_token_id)):  # fmt: skip
        if settings.get(name) is not None:
            add(ids[settings[name]])
    writer.add_add_bos_token(settings.get("bos_token") is not None)
    if (folder / "chat_template.jinja").is_file():
        writer.add_chat_template((folder / "chat_template.jinja").read_text())
