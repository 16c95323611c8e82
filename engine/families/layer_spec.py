"""What one layer of a model is: numbers that a family reads of config.json, and all that blocks are built from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .rope_config import RopeConfig

StateDtype = Literal["float32", "float16", "bfloat16"]  # of recurrent states
DTYPES: dict[str, StateDtype] = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
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
class DraftingSpec:
    """A layer behind a model's last one that drafts (multi-token prediction), by its names in a checkpoint."""

    prefix: str  # of them all
    layer: str = ""  # behind that, where a dot follows: of the decoder layer
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    join: str = "eh_proj"  # of embedding and hidden state
    norm: str = "shared_head.norm"  # before the output matrix
    embedding: str = "embed_tokens"  # where it has one of its own
    lm_head: str = "shared_head.head"  # the same; "": it never has
    goes_on_normed: bool = False  # with what that norm makes it drafts the next token, else with what goes into it


@dataclass(frozen=True)
class StateSpec:
    """What one layer keeps of a request, however long it is: a matrix [rows, columns] a head, where there are
    heads, and of the newest tokens `channels` inputs of a convolution over `conv_width` of them, with `gates` numbers
    beside them."""

    num_heads: int
    rows: int
    columns: int
    channels: int
    conv_width: int
    gates: int = 0
    dtype: StateDtype = "float32"  # of the matrices, as the checkpoint asks for it

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
    state_dtype: StateDtype = "float32"

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

    def share(self, size: int) -> DeltaSpec:
        """Of each of so many ranks, which have as many heads."""
        return replace(self, num_key_heads=self.num_key_heads // size, num_value_heads=self.num_value_heads // size)

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
class ConvSpec:
    """A short convolution of `channels` gated inputs, whose result is gated, too (LFM2)."""

    channels: int
    conv_width: int
    bias: bool = False  # of the convolution and of the products around it

    @property
    def state(self) -> StateSpec:
        """What is kept of a request: inputs of the convolution alone."""
        return StateSpec(0, 0, 0, self.channels, self.conv_width)

    @property
    def width(self) -> int:
        return 6 * self.channels


@dataclass(frozen=True)
class MLPSpec:
    """A gated MLP: down(act(gate(x)) · up(x)) with `inner` gates; without gate: down(act(up(x)))."""

    inner: int
    bias: bool = False  # of all
    activation: Activation = "silu"
    gated: bool = True
    fused: bool = False  # the file has gate and up in one matrix, in this order
    multipliers: tuple[float, float] = (1.0, 1.0)  # of gate(x) and of the result

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
    """A mixture of experts, each a gated MLP of `inner`; `shared_inner`: of the expert that every token goes to."""

    inner: int
    routing: RoutingSpec
    shared_inner: int = 0
    shared_gate: bool = False  # the shared expert's result is multiplied by the sigmoid of one more product
    shared_fused: bool = False  # the file has its gate and up in one matrix
    bias: bool = False  # of all products of the experts
    activation: Literal["silu", "clamped", "gelu_tanh", "relu2"] = "silu"  # clamped: gpt-oss's
    gated: bool = True  # else experts, the shared one too, are down(act(up(x)))
    latent: int = 0  # experts read a product of this length, and another one makes their sum as wide as the stream
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

    def expert_size(self, hidden: int) -> int:
        """Parameters of an expert, but for biases."""
        return (2 + self.gated) * self.inner * (self.latent or hidden)

    @property
    def width(self) -> int:
        return 3 * (self.routing.top_k * self.inner + self.shared_inner)


@dataclass(frozen=True)
class ScanSpec:
    """Mamba-2 (arXiv 2405.21060) behind a short convolution: each head has a state [state_dim, head_dim], and
    neighbours of them share what is written into it and read of it."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int  # of heads
    conv_width: int
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    # A norm of each group of channels behind the output gate or before it; "": there is none.
    norm: Literal["", "gate_first", "norm_first"] = "gate_first"
    limits: tuple[float, float] = (0.0, float("inf"))  # of a token's time step
    # Of what the input makes: output gates, values, what is written, what is read, time steps. (): of none.
    multipliers: tuple[float, ...] = ()
    state_dtype: StateDtype = "float32"

    @property
    def inner(self) -> int:
        """Of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Of what is written, or read, by all groups."""
        return self.num_groups * self.state_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.group_size

    @property
    def state(self) -> StateSpec:
        """What is kept of a request."""
        return StateSpec(
            self.num_heads, self.state_dim, self.head_dim, self.channels, self.conv_width, self.num_heads,
            self.state_dtype,
        )  # fmt: skip

    @property
    def width(self) -> int:
        return 2 * self.channels + 3 * self.inner + self.num_heads


@dataclass(frozen=True)
class PairSpec:
    """Attention and Mamba-2 beside each other, whose results are added up (Falcon-H1)."""

    attention: AttentionSpec
    scan: ScanSpec
    scales: tuple[float, float] = (1.0, 1.0)  # of the two results

    @property
    def width(self) -> int:
        return self.attention.width + self.scan.width


StateMixer = DeltaSpec | ConvSpec | ScanSpec  # which keep a state in the place of keys and values
MixerSpec = AttentionSpec | LatentAttentionSpec | StateMixer | PairSpec


@dataclass(frozen=True)
class LayerSpec:
    """Of one decoder layer. Another kind of mixer, by which tokens see each other, or of MLP is another type in its
    place; a layer may have one of the two alone."""

    mixer: MixerSpec | None
    mlp: MLPSpec | MoESpec | None
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
        """The mixer, or what of it keeps keys and values; None: it keeps a state alone, or nothing."""
        if isinstance(self.mixer, PairSpec):
            return self.mixer.attention
        return None if isinstance(self.mixer, StateMixer) else self.mixer

    @property
    def state(self) -> StateSpec | None:
        """What the mixer keeps of a request beside keys and values, or in their place."""
        mixer = self.mixer.scan if isinstance(self.mixer, PairSpec) else self.mixer
        return mixer.state if isinstance(mixer, StateMixer) else None

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of a token that mixer and MLP have at most at one moment, beside the residual stream."""
        mixer, mlp = self.mixer, self.mlp
        return 0 if mixer is None else mixer.width, 0 if mlp is None else mlp.width


@dataclass(frozen=True)
class FrameSpec:
    """What stands around the layers, and is alike in all of them."""

    norm: NormKind = "rms"
    embedding_scale: float = 1.0  # rounded to the activations' dtype
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # logits become cap · tanh(logit / cap), once they are scaled; 0: they do not
    token_vectors: int = 0  # rows of the table of what each token has for each layer (token_vector); 0: there is none
