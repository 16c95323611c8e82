"""What a checkpoint's config.json says of its model, with transformers' defaults for what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .model_file import ModelError, read_config
from .quant.scheme import make_scheme, read_quantization

if TYPE_CHECKING:
    import torch  # at run time where a dtype is made: who only looks at the file should not wait for it

    from .quant.format import Scheme

__all__ = ["KVSpec", "ModelConfig", "ModelError", "RopeConfig", "check_model", "parse_model_config"]

from .overrides import overridden

MAX_LAYERS = 4096


@dataclass(frozen=True)
class KVSpec:
    """What one layer keeps of a token: `num_kv_heads` keys of `head_dim` and values of `value_dim` elements."""

    kind: str  # "full"; a layer with a sliding window keeps all keys too and masks them
    num_kv_heads: int
    head_dim: int
    value_dim: int
    group: int = 0  # index of the KV group: layers of a group share block tables


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the formulas are in layers/rope.py. Fields a type does not use keep their defaults."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_length: int = 0  # positions the model knew before it was stretched
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with gated MLPs, as its config.json describes it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # a layer: a query sees the last `window` keys, its own included; 0 = all
    rope: RopeConfig
    max_position_embeddings: int
    dtype: torch.dtype  # of the checkpoint
    eos_token_ids: tuple[int, ...]
    longest: int = 0  # tokens that a context may have at most, 0: as many as the positions allow
    quantization: Scheme | None = None  # how the checkpoint stores what it has quantised

    @classmethod
    def from_folder(
        cls, folder: Path, source: Path | None = None, changes: Mapping[str, Any] = {}, quantization: str | None = None
    ) -> ModelConfig:
        """Read config.json of `source` (default: `folder`, where the weights are), and put `changes` into it.

        `quantization`: what --quantization says.

        Raises ModelError if it is missing, broken, or describes a model we cannot run.
        """
        from .checkpoint import stored_dtype  # it imports torch

        raw = overridden(read_config(Path(source or folder)), changes)
        config = replace(parse_model_config(raw), quantization=_scheme(Path(folder), raw, quantization))
        if raw.get("dtype") is None and raw.get("torch_dtype") is None:
            config = replace(config, dtype=stored_dtype(Path(folder)) or config.dtype)
        return config

    @property
    def max_model_len(self) -> int:
        """Tokens the model can handle by its own word: linear and dynamic RoPE stretch max_position_embeddings, yarn
        stretches the original length; llama3 configs already name the stretched one."""
        length = self.max_position_embeddings
        if self.rope.type in ("linear", "dynamic", "yarn"):
            length = int(self.rope.original_length * self.rope.factor)
        return min(length, self.longest or length)

    @property
    def num_parameters(self) -> int:
        """Exact; a tied output matrix counts once."""
        hidden, query, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = 2 * hidden  # norms
        layer += hidden * (query + 2 * kv) + (query + 2 * kv) * self.qkv_bias
        layer += query * hidden + hidden * self.output_bias
        layer += 3 * hidden * self.intermediate_size + (2 * self.intermediate_size + hidden) * self.mlp_bias
        layer += 2 * self.head_dim * self.qk_norm
        return self.num_layers * layer + hidden + self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)


# What transformers' config classes hold where config.json leaves a key out.
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # None: as many as query heads
    "head_dim": None,  # None: hidden_size / num_attention_heads
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
_QWEN2: dict[str, Any] = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": {**_QWEN2, "head_dim": 128},
}
_MODEL_TYPES = {  # for a config.json that names no architecture
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUPPORTED_ARCHITECTURES = tuple(_DEFAULTS)
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_model(folder: Path, changes: Mapping[str, Any] = {}, quantization: str | None = None) -> None:
    """Raises ModelError as ModelConfig.from_folder does, within milliseconds."""
    raw = overridden(read_config(folder), changes)
    _dtype_name(raw)
    _parse(raw, None)
    _scheme(folder, raw, quantization)


def _scheme(folder: Path, raw: Mapping[str, Any], asked: str | None) -> Scheme | None:
    return make_scheme(read_quantization(folder, raw), asked)


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """The content of a config.json → ModelConfig. Raises ModelError for what we cannot run, naming key and value."""
    import torch

    return _parse(raw, getattr(torch, _dtype_name(raw)))


def _parse(raw: dict[str, Any], dtype: Any) -> ModelConfig:
    architecture = _architecture(raw)
    if raw.get("is_causal") is False:
        raise ModelError("config.json: is_causal is false, only causal attention is supported: use another model")
    defaults = _DEFAULTS[architecture]
    activation = raw.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act is {activation!r}, supported is silu: use another model")

    hidden = _count(raw, "hidden_size", defaults)
    layers = _count(raw, "num_hidden_layers", defaults)
    if layers > MAX_LAYERS:  # before anything is made a layer
        raise ModelError(f"config.json: num_hidden_layers is {layers}, at most {MAX_LAYERS} are run: correct the file")
    heads = _count(raw, "num_attention_heads", defaults)
    kv_heads = _optional_count(raw, "num_key_value_heads", defaults) or heads
    head_dim = _optional_count(raw, "head_dim", defaults) or hidden // heads
    max_position = _count(raw, "max_position_embeddings", defaults)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}: correct "
            "the file"
        )
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim is {head_dim}, rotary embedding needs an even one: correct the file")

    llama, qwen2 = architecture == "LlamaForCausalLM", architecture == "Qwen2ForCausalLM"
    configurable_bias = llama or architecture == "Qwen3ForCausalLM"
    attention_bias = configurable_bias and bool(raw.get("attention_bias"))
    eos = raw.get("eos_token_id", defaults["eos_token_id"])
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(raw, "vocab_size", defaults),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size", defaults),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or attention_bias,  # qwen2's q, k and v always have one, its output projection never
        output_bias=attention_bias,
        mlp_bias=llama and bool(raw.get("mlp_bias")),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(raw, architecture, defaults, layers),
        rope=_rope(raw, max_position),
        max_position_embeddings=max_position,
        dtype=dtype,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or [_MODEL_TYPES.get(raw.get("model_type", ""), raw.get("model_type"))]
    for name in names:
        if name in _DEFAULTS:
            return name
        if (with_head := f"{str(name).removesuffix('Model')}ForCausalLM") in _DEFAULTS:  # an embedding model's
            return with_head
    raise ModelError(
        f"architecture {names[0] or 'unnamed'} is not supported: serve one of {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _dtype_name(raw: dict[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype")  # transformers 5 writes the first, older ones the second
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"config.json: dtype is {dtype!r}, supported are {', '.join(_DTYPES)}: correct the file")
    return name


def _windows(raw: dict[str, Any], architecture: str, defaults: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Mistral: every layer where sliding_window is set. Qwen: only with use_sliding_window, and then the layers that
    layer_types names, or those from max_window_layers on."""
    if architecture == "LlamaForCausalLM":
        return (0,) * num_layers
    window = _optional_count(raw, "sliding_window", defaults) or 0
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        window = 0
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", defaults["max_window_layers"])
        return tuple(window if index >= first else 0 for index in range(num_layers))
    if len(layer_types) != num_layers:
        raise ModelError(
            f"config.json: layer_types has {len(layer_types)} entries for {num_layers} layers: correct the file"
        )
    for name in layer_types:
        if name not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"config.json: layer type {name!r} is not supported (full_attention, sliding_attention are): "
                "use another model"
            )
    if "sliding_attention" in layer_types and not window:
        raise ModelError(
            "config.json: layer_types has sliding_attention but no window is on: set use_sliding_window and "
            "sliding_window"
        )
    return tuple(window if name == "sliding_attention" else 0 for name in layer_types)


def _rope(raw: dict[str, Any], max_position: int) -> RopeConfig:
    """`rope_scaling` with `rope_theta` beside it (old), or `rope_parameters` with it inside (transformers 5)."""
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise ModelError("config.json: rope parameters that differ by layer are not supported: use another model")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise ModelError(f"config.json: rope type {kind!r}, supported are {', '.join(_ROPE_TYPES)}: use another model")
    if values.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported: use another model")
    theta = _number(values, "rope_theta", _number(raw, "rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, _number(values, "factor"), original_length=max_position)
    # A top-level original_max_position_embeddings wins, as in transformers.
    lengths = {**values, **{key: raw[key] for key in ("original_max_position_embeddings",) if raw.get(key)}}
    original = _count(lengths, "original_max_position_embeddings", {"original_max_position_embeddings": max_position})
    if kind == "llama3":
        return RopeConfig(
            kind,
            theta,
            _number(values, "factor"),
            original,
            low_freq_factor=_number(values, "low_freq_factor"),
            high_freq_factor=_number(values, "high_freq_factor"),
        )
    return RopeConfig(
        kind,
        theta,
        _number(values, "factor", max_position / original),
        original,
        attention_factor=values.get("attention_factor"),
        beta_fast=values.get("beta_fast") or 32.0,
        beta_slow=values.get("beta_slow") or 1.0,
        mscale=values.get("mscale"),
        mscale_all_dim=values.get("mscale_all_dim"),
        truncate=values.get("truncate", True),
    )


def _optional_count(raw: dict[str, Any], key: str, defaults: dict[str, Any]) -> int | None:
    value = raw[key] if key in raw else defaults[key]
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ModelError(f"config.json: {key} is {value!r}, a whole number above 0 belongs there: correct the file")
    return value


def _count(raw: dict[str, Any], key: str, defaults: dict[str, Any]) -> int:
    return _optional_count(raw, key, defaults) or defaults[key]


def _number(values: dict[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"config.json: {key} is {value!r}, a number above 0 belongs there: correct the file")
    return float(value)
