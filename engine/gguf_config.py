"""What the keys of a GGUF file say of its model, as a config.json would say it. Torch is not needed."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from .ggml_types import BLOCKS
from .gguf_file import GGUFFile, GGUFTensor, Strings
from .model_file import ModelError, unreadable

# llama.cpp's name → transformers' class and model_type. Mistral's models are "llama" too.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_CONTROL = 3  # of tokenizer.ggml.token_type
# Control tokens that end an answer, whether a key names them or not: older files name only one.
_ENDS = frozenset(("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"))
_FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SAMPLING = {  # general.sampling.* → generation_config.json
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_LLAMA3 = (1.0, 4.0, 8192)  # low and high frequency factor, original length: those of all models that were seen
_ROPE_ERROR = 1e-4  # relative, of fp32 factors computed in another order


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Raises ModelError naming the key for what is missing or cannot be run."""
    keys = _Keys(file)
    name = _architecture(file)
    model_class, model_type = ARCHITECTURES[name]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight: {keys.remedy}")
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    length = keys.count("context_length")
    head_dim = keys.count("attention.key_length", keys.count("rope.dimension_count", hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := keys.count(key, head_dim)) != head_dim:
            raise ModelError(
                f"{file.path}: {name}.{key} is {found}, heads have {head_dim} dimensions; that they differ is not "
                "supported: use another model"
            )
    if experts := keys.number("expert_count", 0):
        raise ModelError(
            f"{file.path}: {name}.expert_count is {experts:g}, mixtures of experts are not read from GGUF files: pass "
            "the folder of the same model in safetensors"
        )
    config: dict[str, Any] = {
        "architectures": [model_class],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": length,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, keys, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": eos_token_ids(file.metadata) or None,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": _dtype(file),
        **_biases(file, name),
    }
    if file.metadata.get(f"{name}.attention.causal") is False:
        config["is_causal"] = False
    if (window := keys.number("attention.sliding_window", 0)) and window < length:
        if name != "llama":  # only some layers have it, and the file does not say which
            raise ModelError(
                f"{file.path}: {name}.attention.sliding_window is {window:g}, windows are read of Mistral's models "
                "only: use the Hugging Face checkpoint"
            )
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": int(window)}
    if (kind := main_type(file)) is not None:
        config["quantization_config"] = {"quant_method": "gguf_file", "type": kind}
    return config


def read_generation_config(file: GGUFFile) -> dict[str, Any]:
    """Defaults of sampling that newer files carry, under the names of generation_config.json."""
    found = {ours: file.metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    # fp32 0.6 is 0.6000000238…: seven digits say what was meant
    return {name: v if isinstance(v, int) else float(f"{v:.7g}") for name, v in found.items() if _is_number(v)}


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
    by_text = [
        index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _ENDS
    ]  # fmt: skip
    return [token for token in dict.fromkeys([*named, *by_text]) if isinstance(token, int)]


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


class _Keys:
    """The keys of the model's architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = file.metadata.get("general.architecture")
        self.remedy = "download it again, or convert the model with a current llama.cpp"

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, tuple) and value and len(set(value)) == 1:  # one a layer
            value = value[0]
        if value is None:
            raise ModelError(f"{self.file.path} lacks the key {self.prefix}.{key}: {self.remedy}")
        if not _is_number(value) or not math.isfinite(value) or value < 0:
            raise ModelError(
                f"{self.file.path}: {self.prefix}.{key} is {value!r:.60}, a number from 0 on belongs there, one for "
                f"all layers: {self.remedy}"
            )
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not value or value != int(value):
            raise ModelError(
                f"{self.file.path}: {self.prefix}.{key} is {value!r}, a whole number above 0 belongs there: "
                f"{self.remedy}"
            )
        return int(value)

    def positive(self, key: str, default: float) -> float:
        if not (value := self.number(key, default)):
            raise ModelError(
                f"{self.file.path}: {self.prefix}.{key} is 0, a number above 0 belongs there: {self.remedy}"
            )
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _architecture(file: GGUFFile) -> str:
    name, kind = file.metadata.get("general.architecture"), file.metadata.get("general.type", "model")
    if kind == "adapter":
        raise ModelError(
            f"{file.path} is a LoRA adapter: merge it into its base model (llama-export-lora), and pass that"
        )
    if name is None:
        raise ModelError(f"{file.path} lacks the key general.architecture: download it again")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} has the architecture {name!r:.60}, served are {', '.join(ARCHITECTURES)}: use another model"
        )
    if not file.tensors:
        raise ModelError(f"{file.path} has no tensors, only a vocabulary: pass the file with the weights")
    return str(name)


def _biases(file: GGUFFile, name: str) -> dict[str, bool]:
    """Which projections have a bias: the first layer's tell for all of them, and loading finds what is missing."""
    query, output = (f"blk.0.{part}.bias" in file.tensors for part in ("attn_q", "attn_output"))
    if name == "qwen2":  # always of query, key and value
        return {}
    if query != output:
        raise ModelError(
            f"{file.path}: the {'query' if query else 'output'} projections have a bias, the "
            f"{'output' if query else 'query'} projections none, which {ARCHITECTURES[name][0]} has not: use another "
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


def _rope(file: GGUFFile, keys: _Keys, head_dim: int) -> dict[str, Any]:
    """As rope_parameters of config.json."""
    theta = keys.positive("rope.freq_base", 10_000.0)
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
