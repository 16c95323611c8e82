"""What one layer of a model is: numbers that a family reads of config.json, and all that blocks are built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .rope_config import RopeConfig

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]
# Pieces of our names (llama's) → of a checkpoint's, each put into what those before it have made of a name.
Names = tuple[tuple[str, str], ...]
# Root mean square; the same with weights that are stored less one; with a mean taken off first; and with a bias added.
NormKind = Literal["rms", "rms_less_one", "layer", "layer_bias"]


@dataclass(frozen=True)
class KVSpec:
    """What one layer keeps of a token: `num_kv_heads` keys of `head_dim` and values of `value_dim` elements."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0  # a query sees the last `window` keys, its own included; 0 = all
    shared: bool = False  # the values are the first elements of the keys, and stored once (latent attention)

    @property
    def token_elements(self) -> int:
        return self.num_kv_heads * (self.head_dim + (0 if self.shared else self.value_dim))


@dataclass(frozen=True)
class StateSpec:
    """What one layer keeps of a request, however long it is: a matrix [rows, columns] a head, and of the newest tokens
    `channels` inputs of a convolution over `conv_width` of them, with `gates` numbers beside them."""

    num_heads: int
    rows: int
    columns: int
    channels: int
    conv_width: int
    gates: int = 0
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"  # of the matrices, as the checkpoint asks for it

    @property
    def elements(self) -> int:
        """Of the matrices."""
        return self.num_heads * self.rows * self.columns


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention, `num_heads` queries over `num_kv_heads` keys and values, all of `head_dim`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # how positions are rotated; None: not at all
    window: int = 0  # a query sees the last `window` keys, its own included; 0 = all
    qkv_bias: bool = False
    output_bias: bool = False
    # A norm before the rotation: over every query and key head with the same weights ("head"), with weights of its own
    # ("each"), or over all queries and over all keys ("width").
    # A norm without weights over each ("unit") is the same before and after it.
    qk_norm: Literal["", "head", "each", "width", "unit"] = ""
    scale: float = 0.0  # of the scores; 0: 1 / sqrt(head_dim)
    soft_cap: float = 0.0  # scores become cap · tanh(score / cap); 0: they do not
    clip: float = 0.0  # queries, keys and values are clamped to ±clip before the rotation; 0: they are not
    sinks: bool = False  # a learned logit a head in the softmax's denominator
    fused: bool = False  # the file has q, k and v in one matrix, in this order
    rotated: int = 0  # elements of a head that are rotated, from its first on; 0: all
    interleaved: bool = False  # rotated pairs are neighbours in the file: 0 and 1, 2 and 3, …
    value_dim: int = 0  # of values, where they are smaller or larger than keys; 0: head_dim
    # The result is multiplied by the sigmoid of a gate, which the file has behind each head's query.
    output_gate: bool = False
    value_norm: bool = False  # an RMS norm without weights over every value head
    value_scale: float = 1.0  # of values
    keys_are_values: bool = False  # values are what makes the keys, before their norm and rotation
    # It reads what the last layer before it with the same rotation, heads and window keeps, and keeps nothing.
    reads_earlier: bool = False
    chunked: bool = False  # a query sees the keys of its own `window` positions, counted from 0, not the last ones
    # Queries at position p are multiplied by 1 + rate · log(1 + floor((p + 1) / length)): (rate, length).
    temperature: tuple[float, int] | None = None
    gate: Literal["", "head", "element"] = ""  # softplus of one more product multiplies each head, or each element
    sinks_name: str = "sinks"  # in the checkpoint

    @property
    def kv(self) -> KVSpec:
        """What is kept of a token, by all ranks together."""
        heads = 0 if self.reads_earlier else self.num_kv_heads
        return KVSpec(heads, self.head_dim, self.value_dim or self.head_dim, self.window)

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.rotated or self.head_dim

    @property
    def width(self) -> int:
        """Numbers that a token takes at most at one moment, beside the residual stream."""
        return ((3 if self.output_gate else 2) * self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all heads read one compressed key a token."""

    num_heads: int
    q_rank: int  # of the compressed query; 0: queries are projected at once
    kv_rank: int
    nope_dim: int  # of a query head: what is not rotated
    rope_dim: int
    value_dim: int
    rope: RopeConfig
    scale: float
    bias: bool = False  # of the products down to the compressed query and key, and of the output
    window: int = 0
    interleaved: bool = True  # pairs that are rotated together are neighbours in the file, not half a head apart

    @property
    def kv(self) -> KVSpec:
        return KVSpec(1, self.kv_rank + self.rope_dim, self.kv_rank, self.window, shared=True)

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    @property
    def width(self) -> int:
        head = self.nope_dim + self.rope_dim + self.kv_rank + self.rope_dim + self.kv_rank + self.value_dim
        return self.q_rank + self.num_heads * head


@dataclass(frozen=True)
class DeltaSpec:
    """A gated delta net (arXiv 2412.06464) behind a short convolution: each head of values has a state
    [key_dim, value_dim], and neighbours of them share a head of queries and keys."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    gate: Literal["silu", "sigmoid"] = "silu"  # of the output, behind its norm
    # The file has queries, keys, values and output gates of a key head one behind the other in one matrix, and what
    # decides of decay and strength in a second one.
    by_head: bool = False
    state_dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    @property
    def key_size(self) -> int:
        """Of all heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_size + self.value_size

    @property
    def state(self) -> StateSpec:
        """What is kept of a request."""
        gates = 2 * self.num_value_heads
        return StateSpec(
            self.num_value_heads, self.key_dim, self.value_dim, self.channels, self.conv_width, gates, self.state_dtype
        )

    @property
    def width(self) -> int:
        return 2 * (self.channels + self.value_size + self.num_value_heads)


@dataclass(frozen=True)
class MLPSpec:
    """A gated MLP: down(act(gate(x)) · up(x)) with `inner` gates; without gate: down(act(up(x)))."""

    inner: int
    bias: bool = False  # of all
    activation: Activation = "silu"
    gated: bool = True
    fused: bool = False  # the file has gate and up in one matrix, in this order

    @property
    def width(self) -> int:
        return 3 * self.inner


@dataclass(frozen=True)
class RoutingSpec:
    """Which experts a token goes to, and with which weights."""

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "none"] = "softmax"  # of the router's logits, before the choice
    bias: bool = False  # of the router's product
    correction: bool = False  # a bias an expert, fp32, that counts for the choice and not for the weights
    num_groups: int = 1  # of experts, of which only the best kept_groups may be chosen from
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # a group's best expert, or the sum of its best two
    softmax_chosen: bool = False  # the weights are a softmax over what was chosen
    renormalize: bool = False  # the weights are divided by their sum + epsilon
    epsilon: float = 0.0
    factor: float = 1.0  # and multiplied by this
    fp32: bool = False  # the router's product is one of fp32 numbers
    logit_cap: float = 0.0  # logits become cap · tanh(logit / cap); 0: they do not
    correction_name: str = "e_score_correction_bias"  # in the file, behind the router's path
    correction_apart: bool = False  # behind the path of what has router and experts, instead


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts, each an MLP of `inner` gates; `shared_inner`: of the expert that every token goes to."""

    inner: int
    routing: RoutingSpec
    shared_inner: int = 0
    shared_gate: bool = False  # the shared expert's result is multiplied by the sigmoid of one more product
    shared_fused: bool = False  # the file has its gate and up in one matrix
    bias: bool = False  # of all products of the experts
    activation: Literal["silu", "clamped", "gelu_tanh"] = "silu"  # clamped: gpt-oss's
    # The weights multiply what experts read, not what they make. Of one expert a token, by the sigmoid of its logit.
    weighs_input: bool = False
    # Router and experts read the residual stream beside the shared expert, each after a norm of its own; the router's
    # weights are multiplied by a number an expert, and both results are normed before they are added (Gemma 4).
    apart: bool = False
    limit: float = 7.0  # of the clamped activation
    # The file has all experts of a layer in one tensor: "stacked" [E, N, K], "transposed" [E, K, N], or, in "blocks",
    # MXFP4's codes uint8 [E, N, K / 32, 16] ("_blocks") and exponents uint8 [E, N, K / 32] ("_scales"). Its headers
    # decide, this is for a model without files.
    stored: Literal["", "stacked", "transposed", "blocks"] = ""
    stacked_names: tuple[str, str] = ("gate_up_proj", "down_proj")  # behind the path of the experts
    interleaved: bool = False  # where gate and up are one tensor: their rows in turn, not all of gate first

    @property
    def width(self) -> int:
        return 3 * (self.routing.top_k * self.inner + self.shared_inner)


@dataclass(frozen=True)
class LayerSpec:
    """Of one decoder layer. Another kind of mixer, by which tokens see each other, or of MLP is another type in its
    place."""

    mixer: AttentionSpec | LatentAttentionSpec | DeltaSpec
    mlp: MLPSpec | MoESpec
    # Where norms are: before mixer and MLP ("pre"), after each ("post"), before and after ("both"), or one before
    # both, which are added to the residual together ("parallel").
    norms: Literal["pre", "post", "both", "parallel"] = "pre"
    residual_scale: float = 1.0  # of what mixer and MLP add to the residual stream
    # Behind the MLP: a gated product with a vector of this length that the token has for this layer is added (0: none),
    # and a learned number multiplies the residual stream.
    token_vector: int = 0
    scaled: bool = False

    @property
    def attention(self) -> AttentionSpec | LatentAttentionSpec | None:
        """The mixer, where it keeps keys and values; None: it keeps a state."""
        return None if isinstance(self.mixer, DeltaSpec) else self.mixer

    @property
    def state(self) -> StateSpec | None:
        """What the mixer keeps of a request, where that is no keys and values."""
        return self.mixer.state if isinstance(self.mixer, DeltaSpec) else None


@dataclass(frozen=True)
class FrameSpec:
    """What stands around the layers, and is alike in all of them."""

    norm: NormKind = "rms"
    embedding_scale: float = 1.0  # rounded to the activations' dtype
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # logits become cap · tanh(logit / cap), once they are scaled; 0: they do not
    token_vectors: int = 0  # rows of the table of what each token has for each layer (token_vector); 0: there is none
