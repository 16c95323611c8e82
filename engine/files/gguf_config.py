"""What the keys of a GGUF file say of its model, as a config.json would say it. Torch is not needed."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from ..errors import ModelError, unreadable
from ..quant.ggml_types import BLOCKS
from .gguf_families import FAMILIES, GGUFFamily
from .gguf_file import GGUFFile, GGUFTensor, Keys, Strings, is_number

SHOWN = 8  # architectures in an error
_CONTROL = 3  # of tokenizer.ggml.token_type
# Control tokens that end an answer, whether a key names them or not: older files name only one.
_ENDS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>",
    "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|call|>",
))  # fmt: skip
_MESSAGE_END, _ANSWER_END = "<|end|>", "<|return|>"  # where a vocabulary has both, the first ends no answer (gpt-oss)
_FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SAMPLING = {  # general.sampling.* → generation_config.json
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_LLAMA3 = (1.0, 4.0, 8192)  # low and high frequency factor, original length: those of all models that were seen
_ROPE_ERROR = 1e-4  # relative, of fp32 factors computed in another order


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Raises ModelError naming the key for what is missing or cannot be run."""
    keys = Keys(file)
    name = _architecture(file)
    family = FAMILIES[name]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight: {keys.remedy}")
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    eps, eps_name = family.norm_eps
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": _head_dim(keys, family, hidden // heads),
        "max_position_embeddings": keys.count("context_length"),
        eps_name: keys.number(eps),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": eos_token_ids(file.metadata) or None,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": _dtype(file),
        **_biases(file, family),
    }
    config["rope_parameters"] = _rope(file, keys, config["head_dim"])
    if file.metadata.get(f"{name}.attention.causal") is False:
        config["is_causal"] = False
    window = keys.number("attention.sliding_window", 0)
    if 0 < window < config["max_position_embeddings"] and not family.layers_with_windows:
        raise ModelError(  # only some layers have it, and the file does not say which
            f"{file.path}: {name}.attention.sliding_window is {window:g}, windows are read of "
            f"{', '.join(name for name, family in FAMILIES.items() if family.layers_with_windows)} only: use the "
            "Hugging Face checkpoint"
        )
    config |= family.settings(keys, config)
    if keys.number("expert_count", 0) and "num_experts" not in config:
        raise ModelError(
            f"{file.path}: {name}.expert_count is {keys.number('expert_count'):g}, of this architecture mixtures of "
            "experts are not read from GGUF files: pass the folder of the same model in safetensors"
        )
    if (kind := main_type(file)) is not None:
        config["quantization_config"] = {"quant_method": "gguf_file", "type": kind}
    return config


def read_generation_config(file: GGUFFile) -> dict[str, Any]:
    """Defaults of sampling that newer files carry, under the names of generation_config.json."""
    found = {ours: file.metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    # fp32 0.6 is 0.6000000238…: seven digits say what was meant
    return {name: v if isinstance(v, int) else float(f"{v:.7g}") for name, v in found.items() if is_number(v)}


def main_type(file: GGUFFile) -> str | None:
    """The block format that most of the model is in, None where there is none."""
    sizes = {kind: 0 for kind in BLOCKS}
    for tensor in file.tensors.values():
        if tensor.type.name in sizes:
            sizes[tensor.type.name] += tensor.num_bytes
    kind = max(sizes, key=lambda kind: sizes[kind])
    return kind if sizes[kind] else None


def eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer: those of the keys first."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    kinds, tokens = metadata.get("tokenizer.ggml.token_type"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(kinds, tuple) or not isinstance(tokens, Strings):  # the tokenizer will say it
        kinds = tokens = ()
    by_text = {
        token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _ENDS
    }  # fmt: skip
    not_one = by_text.get(_MESSAGE_END) if _ANSWER_END in by_text else None
    found = dict.fromkeys([*named, *by_text.values()])
    return [token for token in found if isinstance(token, int) and token != not_one]


def read_floats(tensor: GGUFTensor) -> tuple[float, ...]:
    """Of a small F32 tensor. Raises ModelError."""
    if tensor.type.name != "F32":
        raise ModelError(
            f"{tensor.file}: tensor {tensor.name} has type {tensor.type.name}, F32 belongs there: download it again"
        )
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            return struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes))
    except PermissionError:
        raise unreadable(tensor.file) from None
    except (OSError, struct.error) as error:
        raise ModelError(f"cannot read {tensor.name} from {tensor.file} ({error}): download it again") from None


def _architecture(file: GGUFFile) -> str:
    name, kind = file.metadata.get("general.architecture"), file.metadata.get("general.type", "model")
    if kind == "adapter":
        raise ModelError(
            f"{file.path} is a LoRA adapter: merge it into its base model (llama-export-lora), and pass that"
        )
    if name is None:
        raise ModelError(f"{file.path} lacks the key general.architecture: download it again")
    if name not in FAMILIES:
        raise ModelError(
            f"{file.path} has the architecture {name!r:.60}, served are {', '.join([*FAMILIES][:SHOWN])} and "
            f"{len(FAMILIES) - SHOWN} more: use another model"
        )
    if not file.tensors:
        raise ModelError(f"{file.path} has no tensors, only a vocabulary: pass the file with the weights")
    return str(name)


def _head_dim(keys: Keys, family: GGUFFamily, default: int) -> int:
    if family.rotates_a_part:
        return keys.count("attention.key_length", default)
    head_dim = keys.count("attention.key_length", keys.count("rope.dimension_count", default))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := keys.count(key, head_dim)) != head_dim:
            raise ModelError(
                f"{keys.file.path}: {keys.prefix}.{key} is {found}, heads have {head_dim} dimensions; that they differ "
                "is not supported: use another model"
            )
    return head_dim


def _biases(file: GGUFFile, family: GGUFFamily) -> dict[str, bool]:
    """Which projections have a bias: the first layer's tell for all of them, and loading finds what is missing."""
    query, output = (f"blk.0.{part}.bias" in file.tensors for part in ("attn_q", "attn_output"))
    if family.qkv_bias:
        return {}
    if query != output:
        raise ModelError(
            f"{file.path}: the {'query' if query else 'output'} projections have a bias, the "
            f"{'output' if query else 'query'} projections none, which {family.architecture} has not: use another "
            "model"
        )
    return {"attention_bias": query, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


def _dtype(file: GGUFFile) -> str:
    """What to compute in: the type of the matrices where they are not quantised."""
    if main_type(file) is not None or file.tensors["token_embd.weight"].type.name not in _FLOAT_TYPES:
        return "bfloat16"
    sizes = {kind: 0 for kind in _FLOAT_TYPES}
    for tensor in file.tensors.values():
        if tensor.type.name in sizes:
            sizes[tensor.type.name] += tensor.num_bytes
    return _FLOAT_TYPES[max(sizes, key=lambda kind: sizes[kind])]


def _rope(file: GGUFFile, keys: Keys, head_dim: int) -> dict[str, Any]:
    """As rope_parameters of config.json."""
    theta = keys.positive("rope.freq_base", 10_000.0)
    if "rope_factors_long.weight" in file.tensors:
        return _longrope(file, keys, theta)
    kind = file.metadata.get(f"{keys.prefix}.rope.scaling.type", "none")
    factor = keys.positive("rope.scaling.factor", keys.positive("rope.scale_linear", 1.0))
    if kind == "none" and f"{keys.prefix}.rope.scale_linear" in file.metadata:  # of before there were types
        kind = "linear"
    freqs = file.tensors.get("rope_freqs.weight")
    if freqs is not None and kind != "none" and factor != 1:
        raise ModelError(
            f"{file.path} has both rope_freqs.weight and rope scaling {kind!r:.40}, of which one is read: use another "
            "model"
        )
    if freqs is not None:
        return {"rope_theta": theta, **llama3_parameters(file, freqs, theta, head_dim)}
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "yarn":
        raise ModelError(
            f"{file.path}: {keys.prefix}.rope.scaling.type is {kind!r:.40}, read are none, linear and yarn: use "
            "another model"
        )
    yarn = {
        "rope_type": "yarn", "rope_theta": theta, "factor": factor,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }  # fmt: skip
    for ours in ("beta_fast", "beta_slow"):
        if f"{keys.prefix}.rope.scaling.yarn_{ours}" in file.metadata:
            yarn[ours] = keys.number(f"rope.scaling.yarn_{ours}")
    for key in ("attn_factor", "yarn_attn_factor"):
        if (found := keys.number(f"rope.scaling.{key}", 1.0)) != 1:  # ggml multiplies its own magnitude by it
            yarn["attention_factor"] = found * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return yarn


def _longrope(file: GGUFFile, keys: Keys, theta: float) -> dict[str, Any]:
    """Phi's: divisors of the frequencies for contexts within the original one, and for longer ones."""
    found: dict[str, Any] = {
        "rope_type": "longrope", "rope_theta": theta,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }  # fmt: skip
    for length in ("long", "short"):
        tensor = file.tensors.get(f"rope_factors_{length}.weight")
        if tensor is None:
            raise ModelError(f"{file.path} lacks the tensor rope_factors_{length}.weight: {keys.remedy}")
        found[f"{length}_factor"] = list(read_floats(tensor))
    if "rope.scaling.attn_factor" in keys:
        found["attention_factor"] = keys.positive("rope.scaling.attn_factor")
    return found


def llama3_parameters(file: GGUFFile, freqs: GGUFTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters that make these divisors of the frequencies, `freqs` [head_dim / 2].

    Between the two bounds a divisor is 1 / ((1 - s) / factor + s) with s = (turns - low) / (high - low) and turns =
    original length / wavelength, so two of them give low and high as multiples of the original length; which of the
    three is 1 makes no difference. Raises ModelError where no parameters do.
    """
    divisors = read_floats(freqs)
    wavelengths = [2 * math.pi * theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
    factor = max(divisors)
    candidates = [_LLAMA3]
    between = [
        (1 / wavelength, (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for wavelength, divisor in zip(wavelengths, divisors, strict=False)
        if 1 < divisor < factor
    ]
    if len(between) > 1:
        (x1, s1), (x2, s2) = between[0], between[-1]
        slope = (s2 - s1) / (x2 - x1)  # original length / (high - low)
        below = slope * x1 - s1  # low / (high - low)
        if slope > 0 and below > 0:
            candidates.append((1.0, 1 + 1 / below, round(slope / below)))
    for low, high, length in candidates:
        expected = [_llama3_divisor(wavelength, factor, low, high, length) for wavelength in wavelengths]
        if len(divisors) == len(expected) and all(
            abs(one - other) <= _ROPE_ERROR * other for one, other in zip(divisors, expected, strict=True)
        ):
            if factor == 1:
                return {"rope_type": "default"}
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }  # fmt: skip
    raise ModelError(
        f"{file.path}: {freqs.name} ({len(divisors)} values up to {factor:g}) is not made by Llama 3's formula for "
        f"{head_dim // 2} frequencies, and others are not supported: use the Hugging Face checkpoint"
    )


def _llama3_divisor(wavelength: float, factor: float, low: float, high: float, length: float) -> float:
    turns = length / wavelength
    smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
