"""Checkpoints of a folder written as GGUF files by the package gguf, as llama.cpp's converter does it."""

from __future__ import annotations

import json
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
# What converters call the pre-tokenisers of these families.
PRE = {"llama": "llama-bpe", "mistral": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}
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
        return random_blocks(kind, *array.shape, seed=seed, sizes=(0.002,))


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
    arch = "llama" if family == "mistral" else family
    tensors = load_file(folder / "model.safetensors")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), layers)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=-(-len(tensors) // shards) if shards > 1 else 0)
    values: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": layers,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "vocab_size": config["vocab_size"],
        **(keys or {}),
    }
    for key, value in values.items():
        if value is not None:
            add_key(writer, f"{arch}.{key}", value)
    add_tokenizer(writer, folder, config["vocab_size"], PRE[family], json_tokenizer)
    for seed, (name, tensor) in enumerate(tensors.items()):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if arch == "llama" and (".q_proj" in name or ".k_proj" in name):
            tensor = permuted(tensor, heads if ".q_proj" in name else config["num_key_value_heads"])
        chosen = kind(stored) if tensor.dim() == 2 else "F32"
        writer.add_tensor(stored, quantized(tensor, chosen, seed), raw_dtype=GGMLQuantizationType[chosen])
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if shards == 1 else path.with_name(f"{path.stem}-00001-of-{shards:05}.gguf")


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
