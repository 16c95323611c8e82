"""What an encoder is, and which one a config.json describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import ModelError
from .family import layer_count
from .layer_spec import AttentionSpec, LayerSpec, MLPSpec
from .raw_config import RawConfig, architectures, number
from .rope_config import RopeConfig, read_rope, read_ropes

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
# Our name of a module → its path in the checkpoint, behind the prefix; those of layers stand behind the layer's.
Paths = Mapping[str, str]


@dataclass(frozen=True)
class EncoderLayerSpec:
    """What differs between layers."""

    rope: RopeConfig | None = None  # how positions are rotated; None: not at all
    window: int = 0  # a token sees those less than `window` away, on both sides; 0: all


@dataclass(frozen=True)
class EncoderSpec:
    """A stack of attention (every token sees every other one) and MLP, each with a LayerNorm."""

    prefix: str  # of names in the checkpoint, which those of a bare body lack
    paths: Paths
    num_heads: int
    head_dim: int
    inner: int  # of the MLP
    layers: tuple[EncoderLayerSpec, ...]
    activation: Activation
    gated: bool = False  # down(act(gate(x)) · up(x)), without: down(act(up(x)))
    norm_first: bool = False  # before attention and MLP, on a stream that is not normed; without: of each sum
    positions: int = 0  # rows of the table of learned positions; 0: none
    first_position: int = 0  # the row of a text's first token
    token_types: int = 0  # rows of the table that tells the first text of a pair from the second
    norm_bias: bool = True
    qkv_bias: bool = True
    output_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True


_ENDS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification")
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "silu": "silu", "swish": "silu", "swiglu": "silu", "relu": "relu",
}  # fmt: skip


@dataclass(frozen=True)
class EncoderFamily:
    """Encoders whose config.json is read in one way."""

    name: str  # what its architectures begin with
    model_type: str
    prefix: str  # of names in the checkpoint
    defaults: Mapping[str, Any]  # every key that is read of its config.json, as transformers has it where it is not
    read: Callable[[RawConfig, str], EncoderSpec]  # raises ModelError for what cannot be run
    longest: Callable[[RawConfig], int] = lambda raw: raw.count("max_position_embeddings")  # tokens of a text
    norm_eps: str = "layer_norm_eps"  # its key

    def described(self, raw: Mapping[str, Any]) -> RawConfig:
        """config.json under the names that are read."""
        known = {ours: raw[theirs] for theirs, ours in _NOMIC_KEYS.items() if theirs in raw and ours not in raw}
        return RawConfig({**raw, **known} if self.model_type == "nomic_bert" else raw, self.defaults)


def find_encoder(raw: Mapping[str, Any]) -> EncoderFamily | None:
    """By architecture; by model_type where none is named. None: it is none of ours."""
    names = architectures(raw)
    if not names:
        return next((family for family in ENCODERS if family.model_type == raw.get("model_type")), None)
    bases = {name.removesuffix(end) for name in names for end in _ENDS if name.endswith(end)}
    return next((family for family in ENCODERS if family.name in bases), None)


def layers_of(spec: EncoderSpec) -> tuple[LayerSpec, ...]:
    """As memory counts them."""
    attention = AttentionSpec(spec.num_heads, spec.num_heads, spec.head_dim, None)
    mlp = MLPSpec(spec.inner, gated=spec.gated)
    return tuple(LayerSpec(replace(attention, rope=layer.rope, window=layer.window), mlp) for layer in spec.layers)


def _common(raw: RawConfig, prefix: str, paths: Paths, activation: str = "hidden_act") -> EncoderSpec:
    hidden, heads, name = raw.count("hidden_size"), raw.count("num_attention_heads"), raw.get(activation)
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"config.json: {activation} is {name!r}, supported are {known}: use another model")
    if hidden % heads:
        raise ModelError(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}: correct the file"
        )
    layers = (EncoderLayerSpec(),) * layer_count(raw)
    return EncoderSpec(
        prefix, paths, heads, hidden // heads, raw.count("intermediate_size"), layers, _ACTIVATIONS[name]
    )


def _rotated(spec: EncoderSpec, rope: RopeConfig) -> EncoderSpec:
    """The same with one rotation of all layers."""
    if spec.head_dim % 2:
        raise ModelError(
            f"config.json: heads have {spec.head_dim} elements, rotary embedding needs an even number: correct the file"
        )
    return replace(spec, layers=tuple(replace(layer, rope=rope) for layer in spec.layers))


def _expect(raw: RawConfig, **wanted: Any) -> None:
    """Raises ModelError for settings whose other values nothing computes."""
    for key, value in wanted.items():
        if (found := raw.get(key)) != value:
            raise ModelError(f"config.json: {key} is {found!r}, supported is {value!r}: use another model")


# ---- BERT and those that differ by names and positions ----
_BERT_KEYS: dict[str, Any] = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "pad_token_id": 0, "is_decoder": False, "position_embedding_type": "absolute",
}  # fmt: skip
_BERT_PATHS = {
    "words": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm", "layer": "encoder.layer",
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "out": "attention.output.dense", "norm1": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "norm2": "output.LayerNorm",
}  # fmt: skip


def _bert(raw: RawConfig, prefix: str) -> EncoderSpec:
    """Devlin et al., arXiv:1810.04805."""
    _expect(raw, is_decoder=False, position_embedding_type="absolute")
    spec = _common(raw, prefix, _BERT_PATHS)
    return replace(spec, positions=raw.count("max_position_embeddings"), token_types=raw.count("type_vocab_size"))


def _roberta(raw: RawConfig, prefix: str) -> EncoderSpec:
    """BERT whose positions begin behind the padding token's id (Liu et al., arXiv:1907.11692)."""
    return replace(_bert(raw, prefix), first_position=_padding(raw) + 1)


def _padding(raw: RawConfig) -> int:
    found = raw.get("pad_token_id")
    found = 1 if found is None else found
    if not isinstance(found, int) or not 0 <= found < raw.count("max_position_embeddings") - 1:
        raise ModelError(f"config.json: pad_token_id is {found!r}, positions begin behind it: correct the file")
    return found


def _after_padding(raw: RawConfig) -> int:
    return raw.count("max_position_embeddings") - _padding(raw) - 1


def _electra(raw: RawConfig, prefix: str) -> EncoderSpec:
    """BERT that was trained to find replaced words (Clark et al., arXiv:2003.10555)."""
    size = raw.optional_count("embedding_size")
    if size not in (None, raw.count("hidden_size")):
        raise ModelError(
            f"config.json: embedding_size is {size}, supported is hidden_size ({raw.count('hidden_size')}): use "
            "another model"
        )
    return _bert(raw, prefix)


# ---- rotated positions ----
_NOMIC_PATHS = {
    "words": "embeddings.word_embeddings", "types": "embeddings.token_type_embeddings", "norm": "emb_ln",
    "layer": "encoder.layers", "qkv": "attn.Wqkv", "out": "attn.out_proj", "norm1": "norm1", "gate": "mlp.fc12",
    "up": "mlp.fc11", "down": "mlp.fc2", "norm2": "norm2",
}  # fmt: skip
_NOMIC_KEYS = {  # of its own files → of transformers'
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers", "n_positions": "max_position_embeddings", "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
}  # fmt: skip


def _nomic(raw: RawConfig, prefix: str) -> EncoderSpec:
    """BERT with a gated MLP and rotated positions, without biases (Nussbaum et al., arXiv:2402.01613)."""
    _expect(
        raw, prenorm=False, qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, parallel_block=False,
        use_rms_norm=False, rotary_emb_fraction=1.0, rotary_emb_interleaved=False, num_experts=0,
    )  # fmt: skip
    spec = replace(
        _common(raw, prefix, _NOMIC_PATHS), gated=True, token_types=raw.count("type_vocab_size"),
        qkv_bias=False, output_bias=False, up_bias=False, down_bias=False,
    )  # fmt: skip
    return _rotated(spec, read_rope(raw.values, raw.count("max_position_embeddings"), raw.default_theta))


def _nomic_longest(raw: RawConfig) -> int:
    return min(raw.count("max_position_embeddings"), raw.optional_count("max_trained_positions") or 1 << 30)


_GTE_PATHS = {
    "words": "embeddings.word_embeddings", "types": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm",
    "layer": "encoder.layer", "qkv": "attention.qkv_proj", "out": "attention.o_proj", "norm1": "attn_ln",
    "up_gate": "mlp.up_gate_proj", "down": "mlp.down_proj", "norm2": "mlp_ln",
}  # fmt: skip


def _gte(raw: RawConfig, prefix: str) -> EncoderSpec:
    """mGTE (Zhang et al., arXiv:2407.19669)."""
    _expect(raw, position_embedding_type="rope", layer_norm_type="layer_norm", logn_attention_scale=False)
    types = raw.get("type_vocab_size")
    spec = replace(
        _common(raw, prefix, _GTE_PATHS), gated=True, up_bias=False,
        token_types=raw.count("type_vocab_size") if types else 0,
    )  # fmt: skip
    return _rotated(spec, _gte_rope(raw, spec.head_dim))


def _gte_rope(raw: RawConfig, head_dim: int) -> RopeConfig:
    """Its own files stretch by "ntk": the base is multiplied by the factor, and what comes of it divided by
    factor^(2 / head_dim)."""
    length, scaling = raw.count("max_position_embeddings"), raw.values.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) != "ntk":
        return read_rope(raw.values, length, raw.default_theta)
    if scaling.get("mixed_b") is not None:
        raise ModelError("config.json: rope_scaling has mixed_b, which is not supported: use another model")
    factor, theta = number(scaling, "factor"), number(raw.values, "rope_theta", raw.default_theta)
    # Divided frequencies are what "linear" has; the context stays as long as the file says.
    return RopeConfig("linear", theta * factor, factor ** (2 / head_dim), original_length=length)


_MODERN_PATHS = {
    "words": "embeddings.tok_embeddings", "norm": "embeddings.norm", "layer": "layers", "qkv": "attn.Wqkv",
    "out": "attn.Wo", "norm1": "attn_norm", "gate_up": "mlp.Wi", "down": "mlp.Wo", "norm2": "mlp_norm",
    "last_norm": "final_norm",
}  # fmt: skip


def _modern(raw: RawConfig, prefix: str) -> EncoderSpec:
    """ModernBERT (Warner et al., arXiv:2412.13663): norms first, and two layers of three see near tokens only."""
    attention, mlp = bool(raw.get("attention_bias")), bool(raw.get("mlp_bias"))
    spec = replace(
        _common(raw, prefix, _MODERN_PATHS, "hidden_activation"), gated=True, norm_first=True,
        norm_bias=bool(raw.get("norm_bias")), qkv_bias=attention, output_bias=attention, up_bias=mlp, down_bias=mlp,
    )  # fmt: skip
    full_theta = number(raw.values, "global_rope_theta", raw.default_theta)
    near_theta = number(raw.values, "local_rope_theta", raw.number("local_rope_theta"))
    full, near = read_ropes(raw.values, raw.count("max_position_embeddings"), full_theta, near_theta)
    every, window = raw.count("global_attn_every_n_layers"), raw.count("local_attention") // 2 + 1
    kinds = raw.optional_list("layer_types") or [
        "sliding_attention" if index % every else "full_attention" for index in range(len(spec.layers))
    ]
    if len(kinds) != len(spec.layers) or any(kind not in ("sliding_attention", "full_attention") for kind in kinds):
        raise ModelError(f"config.json: layer_types is {kinds!r:.80}, one of two kinds a layer belongs there")
    layers = tuple(
        EncoderLayerSpec(near, window) if kind == "sliding_attention" else EncoderLayerSpec(full) for kind in kinds
    )
    return replace(_rotated(spec, full), layers=layers)


_ROBERTA_KEYS = {**_BERT_KEYS, "pad_token_id": 1, "vocab_size": 50265}
_NOMIC_DEFAULTS: dict[str, Any] = {
    **_BERT_KEYS, "vocab_size": 30528, "hidden_act": "silu", "max_position_embeddings": 2048, "rope_theta": 1000.0,
    "max_trained_positions": None, "prenorm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "parallel_block": False, "use_rms_norm": False, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "num_experts": 0,
}  # fmt: skip
_GTE_DEFAULTS: dict[str, Any] = {
    **_BERT_KEYS, "vocab_size": 250048, "max_position_embeddings": 8192, "type_vocab_size": 1, "pad_token_id": 1,
    "rope_theta": 160_000.0, "position_embedding_type": "rope", "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
}  # fmt: skip
_MODERN_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
    "num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings": 8192, "norm_eps": 1e-5,
    "norm_bias": False, "attention_bias": False, "mlp_bias": False, "layer_types": None, "local_attention": 128,
    "global_attn_every_n_layers": 3, "rope_theta": 160_000.0, "local_rope_theta": 10_000.0,
}  # fmt: skip

ENCODERS = (
    EncoderFamily("Bert", "bert", "bert.", _BERT_KEYS, _bert),
    EncoderFamily("Roberta", "roberta", "roberta.", _ROBERTA_KEYS, _roberta, _after_padding),
    EncoderFamily("XLMRoberta", "xlm-roberta", "roberta.", _ROBERTA_KEYS, _roberta, _after_padding),
    EncoderFamily("Camembert", "camembert", "roberta.", _ROBERTA_KEYS, _roberta, _after_padding),
    EncoderFamily("Electra", "electra", "electra.", {**_BERT_KEYS, "embedding_size": None}, _electra),
    EncoderFamily("NomicBert", "nomic_bert", "nomic_bert.", _NOMIC_DEFAULTS, _nomic, _nomic_longest),
    EncoderFamily("New", "new", "new.", _GTE_DEFAULTS, _gte),
    EncoderFamily("Gte", "gte", "gte.", _GTE_DEFAULTS, _gte),
    EncoderFamily("ModernBert", "modernbert", "model.", _MODERN_DEFAULTS, _modern, norm_eps="norm_eps"),
)
