"""Model folders to measure with: shapes of models that people serve, with a tokenizer, and with weights where loading
counts."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from vserve.engine.describe.reading import read_folder

LLAMA_8B: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, hidden_size=4096, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, max_position_embeddings=131072,
    rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False, hidden_act="silu", dtype="bfloat16",
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
QWEN3_5: dict[str, Any] = dict(
    architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", vocab_size=248320, hidden_size=4096,
    num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4, head_dim=256, intermediate_size=12288,
    max_position_embeddings=262144, rms_norm_eps=1e-6, full_attention_interval=4, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25), mamba_ssm_dtype="float32",
    tie_word_embeddings=False, hidden_act="silu", dtype="bfloat16", bos_token_id=1, eos_token_id=2,
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_8B,
    "llama-70b": LLAMA_8B | dict(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672,
    ),
    "qwen3-8b": LLAMA_8B | dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=151936, num_hidden_layers=36, head_dim=128,
        intermediate_size=12288, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0,
    ),
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=151936, hidden_size=2048,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, intermediate_size=6144,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0,
        tie_word_embeddings=False, hidden_act="silu", dtype="bfloat16", bos_token_id=1, eos_token_id=2,
    ),
    "qwen3.5-9b": QWEN3_5,
    "qwen3.5-27b": QWEN3_5 | dict(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
        linear_num_value_heads=48,
    ),
    "qwen3.5-35b-a3b": QWEN3_5 | dict(
        architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40,
        num_key_value_heads=2, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "nemotron-3-nano": dict(
        architectures=["NemotronHForCausalLM"], model_type="nemotron_h", vocab_size=131072, hidden_size=2688,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, intermediate_size=1856, mamba_head_dim=64, mamba_num_heads=64, n_groups=8,
        ssm_state_size=128, conv_kernel=4, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
        n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=6, norm_topk_prob=True, routed_scaling_factor=2.5,
        max_position_embeddings=262144, layer_norm_epsilon=1e-5, tie_word_embeddings=False, dtype="bfloat16",
        bos_token_id=1, eos_token_id=2,
    ),
    "lfm2-8b-a1b": dict(
        architectures=["Lfm2MoeForCausalLM"], model_type="lfm2_moe", vocab_size=65536, hidden_size=2048,
        intermediate_size=7168, moe_intermediate_size=1792, num_hidden_layers=24, num_dense_layers=2, num_experts=32,
        num_experts_per_tok=4, use_expert_bias=True, norm_topk_prob=True, conv_L_cache=3, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=128000, norm_eps=1e-5, rope_theta=1000000.0, dtype="bfloat16",
        layer_types=["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
        bos_token_id=1, eos_token_id=2,
    ),
    "gpt-oss-20b": dict(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", vocab_size=201088, hidden_size=2880,
        num_hidden_layers=24, num_attention_heads=64, num_key_value_heads=8, head_dim=64, intermediate_size=2880,
        num_local_experts=32, num_experts_per_tok=4, sliding_window=128, swiglu_limit=7.0, attention_bias=True,
        layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0,
            truncate=False, original_max_position_embeddings=4096),
        quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn",
            "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]),
        tie_word_embeddings=False, hidden_act="silu", dtype="bfloat16", bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip
# Models of pictures and text: the shape of the text, its class, and what looks at pictures.
_QWEN_SIGHT = dict(
    depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=4096, patch_size=16,
    spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=2304, in_channels=3,
    hidden_act="gelu_pytorch_tanh",
)  # fmt: skip
SEEING: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3-vl-8b": (
        "qwen3-8b", "Qwen3VLForConditionalGeneration", "qwen3_vl",
        _QWEN_SIGHT | dict(deepstack_visual_indexes=[8, 16, 24], model_type="qwen3_vl"),
    ),
    "qwen3.5-9b": (
        "qwen3.5-9b", "Qwen3_5ForConditionalGeneration", "qwen3_5",
        _QWEN_SIGHT | dict(deepstack_visual_indexes=[], model_type="qwen3_5"),
    ),
}  # fmt: skip
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")  # with the last ids
SEEING_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
NOISE_BYTES = 64 << 20
BFLOAT16 = 2  # bytes


def write_model(folder: Path, shape: str = "llama-8b", layers: int | None = None) -> Path:
    """Writes config.json and a tokenizer, no weights: `--load-format dummy` serves it. `layers`: other than it has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    config = dict(SHAPES[shape])
    if layers:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = (config["layer_types"] * layers)[:layers]
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {character: i + 3 for i, character in enumerate(alphabet)}
    # Every id is text of a usual length: detokenising and streaming then cost what they cost with a real model.
    vocab |= {_word(i): i for i in range(len(vocab), SHAPES[shape]["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_seeing_model(folder: Path, name: str) -> Path:
    """The same of a model of pictures and text, with a chat template that shows them."""
    text, architecture, model_type, sight = SEEING[name]
    write_model(folder, text)
    inner = json.loads((folder / "config.json").read_text())
    if model_type == "qwen3_vl":
        inner["rope_parameters"] = dict(
            rope_type="default", rope_theta=5e6, mrope_section=[24, 20, 20], mrope_interleaved=True
        )
        inner["model_type"] = "qwen3_vl_text"
    else:
        inner["rope_parameters"] |= dict(mrope_section=[11, 11, 10], mrope_interleaved=True)
    first = inner["vocab_size"] - len(MARKS)
    start, image, end, video = range(first, inner["vocab_size"])
    config = dict(
        architectures=[architecture], model_type=model_type, text_config=inner, vision_config=sight, dtype="bfloat16",
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = {word: id for word, id in tokenizer["model"]["vocab"].items() if id < first}
    tokenizer["model"]["vocab"] = vocabulary | dict(zip(MARKS, range(first, inner["vocab_size"]), strict=True))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer["added_tokens"] = [flags | {"id": first + i, "content": mark} for i, mark in enumerate(MARKS)]
    file.write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": SEEING_TEMPLATE}))
    size = dict(shortest_edge=65536, longest_edge=16777216)
    processor = dict(
        size=size, patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        image_processor_type="Qwen2VLImageProcessorFast",
    )  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _word(number: int) -> str:
    """Two letters or more, other ones for each number; three of five begin a word."""
    letters, rest = "", number
    while rest:
        rest, digit = divmod(rest, 26)
        letters += string.ascii_lowercase[digit]
    return ("Ġ" if number % 5 < 3 else "") + letters


def add_weights(source: Path, folder: Path, num_shards: int = 4) -> int:
    """Copies the model in `source`, and writes what its config.json describes as bfloat16 noise, N(0, 0.02).

    Returns the bytes of the weights. Raises OSError, before it writes any, where they do not fit on the disk.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copy(path, folder)
    tensors = _expected_tensors(source)
    total = sum(map(_size, tensors.values()))
    if (free := shutil.disk_usage(folder).free) < 1.1 * total:
        raise OSError(f"{folder} has {free / 1e9:.1f} GB free, the weights take {total / 1e9:.1f}: name another folder")
    # Random bits would hold NaNs, with which no token can be sampled.
    noise = (0.02 * torch.randn(NOISE_BYTES // BFLOAT16)).bfloat16().view(torch.uint8).numpy().data
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(num_shards)]
    done = 0
    for name, shape in tensors.items():
        shards[min(done * num_shards // total, num_shards - 1)][name] = shape
        done += _size(shape)
    shards = [shard for shard in shards if shard]  # one matrix may be larger than a share
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (folder / file).open("wb") as stream:
            _write_shard(stream, shard, noise)
        index |= dict.fromkeys(shard, file)
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return total


def _expected_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor that vserve looks for in a checkpoint of this config.json."""
    import torch

    from vserve.engine.models.blocks import CausalLM
    from vserve.engine.quant.weights import Placement
    from vserve.engine.weights.matching import choose_formats

    model = CausalLM(read_folder(folder), Placement(torch.bfloat16, torch.device("meta")), 16)
    choose_formats(model)
    return {
        f"{path}.{suffix}": stored.shape
        for path, (holder, part) in model.weight_map().items()
        for suffix, stored in holder.expected(part).items()
    }


def _size(shape: Sequence[int]) -> int:
    return BFLOAT16 * prod(shape)


def _write_shard(stream: BinaryIO, tensors: dict[str, tuple[int, ...]], noise: memoryview) -> None:
    """A safetensors file: 8 bytes of little-endian length n, n bytes of JSON, then the data."""
    header, end = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (end, end + _size(shape))}
        end += _size(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    stream.write(len(text).to_bytes(8, "little") + text)
    start = 0  # in the noise; each tensor goes on where the last one ended
    for shape in tensors.values():
        left = _size(shape)
        while left:
            piece = noise[start : start + left]
            stream.write(piece)
            left -= len(piece)
            start = (start + len(piece)) % len(noise)
