"""The blocks decoder-only models are built from, as the specs of their layers say."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ...kernels.attention_inputs import Scoring
from ..layer_spec import AttentionSpec, KVSpec, LatentAttentionSpec, LayerSpec, MLPSpec, MoESpec
from ..layers.attention import Attention, AttentionBatch
from ..layers.embedding import Embedding, LMHead
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..layers.rope import RotaryEmbedding
from ..layers.weights import Placement, WeightMap
from ..model_config import ModelConfig
from .latent_attention import LatentAttentionBlock


class AttentionBlock(nn.Module):
    """Fused q, k, v projection; attention, with head norms where the spec has them; output projection."""

    def __init__(
        self, spec: AttentionSpec, config: ModelConfig, layer: int, rotary: RotaryEmbedding, place: Placement
    ) -> None:
        super().__init__()
        dim = spec.head_dim
        self.qkv = Linear(
            config.hidden_size,
            {"q": spec.num_heads * dim, "k": spec.num_kv_heads * dim, "v": spec.num_kv_heads * dim},
            place=place,
            rule="column",
            unit=dim,
            bias=spec.qkv_bias,
        )
        self.heads = [size // dim for _, size in self.qkv.shape.spans.values()]  # of this rank: q, k, v
        self.head_dim = dim
        self.attention = Attention(
            self.heads[0],
            self.heads[1],
            dim,
            layer,
            rotary,
            Scoring(dim**-0.5, spec.window),
            q_norm=RMSNorm(dim, config.norm_eps, place) if spec.qk_norm else None,
            k_norm=RMSNorm(dim, config.norm_eps, place) if spec.qk_norm else None,
        )
        self.output = Linear(
            spec.num_heads * dim,
            {"out": config.hidden_size},
            place=place,
            rule="row",
            unit=dim,
            bias=spec.output_bias,
        )

    def weight_map(self, prefix: str) -> WeightMap:
        found: WeightMap = {f"{prefix}.{part}_proj": (self.qkv, part) for part in self.qkv.shape.parts}
        found[f"{prefix}.o_proj"] = (self.output, "out")
        q_norm, k_norm = self.attention.q_norm, self.attention.k_norm
        if q_norm is not None and k_norm is not None:
            found |= {f"{prefix}.q_norm": (q_norm, ""), f"{prefix}.k_norm": (k_norm, "")}
        return found

    def forward(
        self, x: Tensor, residual: Tensor, positions: Tensor, batch: AttentionBatch, wanted: Tensor | None
    ) -> Tensor | None:
        """→ what is to be added to residual; None: it has been."""
        query, key, value = self.qkv(x).view(x.shape[0], -1, self.head_dim).split(self.heads, dim=1)
        attended = self.attention(query, key, value, positions, batch, last_only=wanted is not None)
        if wanted is not None:
            return self.output(attended.index_select(0, wanted))
        return self.output.add_to(residual, attended)


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), gate and up fused into one product."""

    def __init__(self, spec: MLPSpec, hidden: int, place: Placement) -> None:
        super().__init__()
        inner, bias = spec.inner, spec.bias
        self.gate_up = Linear(hidden, {"gate": inner, "up": inner}, place=place, rule="column", bias=bias)
        self.down = Linear(inner, {"out": hidden}, place=place, rule="row", bias=bias)

    def weight_map(self, prefix: str) -> WeightMap:
        return {
            f"{prefix}.gate_proj": (self.gate_up, "gate"),
            f"{prefix}.up_proj": (self.gate_up, "up"),
            f"{prefix}.down_proj": (self.down, "out"),
        }

    def forward(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """→ what is to be added to residual; None: it has been."""
        return self.down.add_to(residual, self.gate_up.silu_mul(x))


def make_attention(
    spec: AttentionSpec | LatentAttentionSpec,
    config: ModelConfig,
    layer: int,
    rotary: RotaryEmbedding,
    place: Placement,
) -> AttentionBlock | LatentAttentionBlock:
    if isinstance(spec, LatentAttentionSpec):
        return LatentAttentionBlock(spec, config, layer, rotary, place)
    return AttentionBlock(spec, config, layer, rotary, place)


def make_mlp(spec: MLPSpec | MoESpec, hidden: int, place: Placement) -> MLP:
    assert isinstance(spec, MLPSpec), "there are no mixtures yet"
    return MLP(spec, hidden, place)


class DecoderLayer(nn.Module):
    """Pre-norm residual layer: attention, then MLP. The residual stream travels beside the activations, so that each
    addition is fused with the norm that follows it, or with the product before."""

    def __init__(
        self, spec: LayerSpec, config: ModelConfig, layer: int, rotary: RotaryEmbedding, place: Placement
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, place)
        self.attention = make_attention(spec.attention, config, layer, rotary, place)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, place)
        self.mlp = make_mlp(spec.mlp, config.hidden_size, place)

    def weight_map(self, prefix: str) -> WeightMap:
        return {
            f"{prefix}.input_layernorm": (self.attention_norm, ""),
            f"{prefix}.post_attention_layernorm": (self.mlp_norm, ""),
            **self.attention.weight_map(f"{prefix}.self_attn"),
            **self.mlp.weight_map(f"{prefix}.mlp"),
        }

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """x: what is still to be added to residual [T, hidden], which is updated in place; → the same of the next.

        `wanted` int32 [N], last tokens of requests: only they go on once the cache has all keys and values.
        """
        normed, residual = self.attention_norm(x, residual)
        x = self.attention(normed, residual, positions, batch, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        normed, residual = self.mlp_norm(x, residual)
        return self.mlp(normed, residual), residual


class CausalLM(nn.Module):
    """Embedding, layers, final norm; the output matrix is a call of its own because only sampled rows need logits.

    Built without weights; what differs between families, the specs of its layers say. `max_len` is the longest context
    served: the rotary tables end there.
    """

    def __init__(self, config: ModelConfig, place: Placement, max_len: int) -> None:
        super().__init__()
        self.config, self.place = config, place
        rotations = {(spec.attention.rope, spec.attention.rotary_dim) for spec in config.layers}
        self.rotary = {pair: RotaryEmbedding(*pair, max_len, place.device) for pair in rotations}
        self.embedding = Embedding(config.vocab_size, config.hidden_size, place)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, config, index, self.rotary[spec.attention.rope, spec.attention.rotary_dim], place)
            for index, spec in enumerate(config.layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, place)
        tied = self.embedding if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, place, tied)
        self._layers = tuple(self._decoder_layers())  # indexing a ModuleList is slow
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        embeddings: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """As Model has it. With `wanted`, the last layer has to do no more for other tokens than to cache them, and
        saves most of its work."""
        # The residual stream is updated in place from here on, so the caller's embeddings are copied.
        residual = self.embedding(input_ids) if embeddings is None else embeddings.clone()
        x: Tensor | None = None
        *layers, last = self._layers
        for layer in layers:
            x, residual = layer(x, residual, positions, batch)
        x, residual = last(x, residual, positions, batch, wanted)
        return self.norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → fp32 [N, vocab]."""
        return self.lm_head(hidden)

    def kv_specs(self) -> list[KVSpec]:
        """What each layer of this rank keeps in the KV cache."""
        return [attention.spec for attention in self.attention_layers()]

    def attention_layers(self) -> list[Attention]:
        return [layer.attention.attention for layer in self._layers]

    def weight_map(self) -> WeightMap:
        """Every module path of the checkpoint whose tensors must be loaded."""
        found: WeightMap = {"model.embed_tokens": (self.embedding, ""), "model.norm": (self.norm, "")}
        for index, layer in enumerate(self._layers):
            found |= layer.weight_map(f"model.layers.{index}")
        return found | {"lm_head": (self.lm_head, "out")}

    def is_ignorable(self, name: str) -> bool:
        """Tensors some checkpoints carry that nothing needs: rotary tables, a copy of the tied output matrix."""
        return name.endswith(".rotary_emb.inv_freq") or (self.config.tie_word_embeddings and name == "lm_head.weight")

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer
