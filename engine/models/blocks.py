"""The decoder-only models that are served: what stands around mixer and MLP, as the specs of the layers say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.sampling.argmax import best_of_pieces, of_pieces
from ..describe.model_config import ModelConfig
from ..families.layer_spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    KVSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    PairSpec,
    ScanSpec,
)
from ..families.rope_config import RopeConfig
from ..layers.attention import Attention, AttentionBatch
from ..layers.embedding import Embedding, LMHead
from ..layers.head import Head
from ..layers.norm import NoNorm, Norm, make_norm
from ..layers.rope import RotaryEmbedding
from ..layers.routing import watch
from ..layers.state import StateLayer
from ..parallel.group import ALONE, Group
from ..quant.weights import Placement, WeightMap, keep_at_hand
from ..vision.towers import make_tower
from .attention_block import AttentionBlock
from .conv_block import ConvBlock
from .delta_block import DeltaBlock
from .latent_attention import LatentAttentionBlock
from .mixture_apart import ApartMixture
from .mlp import MLP, Mixture
from .model import Features
from .scan_block import PairBlock, ScanBlock
from .token_vectors import LayerEnd, TokenVectors

StateBlock = DeltaBlock | ConvBlock | ScanBlock
Mixer = AttentionBlock | LatentAttentionBlock | StateBlock | PairBlock
_KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm", "v_norm")
_AFTER = ("post", "both")  # places of norms, where what is added to the residual stream is normed first


Rotations = dict[tuple[RopeConfig | None, int], RotaryEmbedding]  # by how, and how many elements of a head


def make_mixer(
    spec: LayerSpec, config: ModelConfig, layer: int, rotations: Rotations, place: Placement
) -> Mixer | None:
    mixer = spec.mixer
    if mixer is None:
        return None
    if isinstance(mixer, DeltaSpec):
        return DeltaBlock(mixer, config, place)
    if isinstance(mixer, ConvSpec):
        return ConvBlock(mixer, config, place)
    if isinstance(mixer, ScanSpec):
        return ScanBlock(mixer, config, place)
    assert spec.attention is not None
    rotary = rotations[spec.attention.rope, spec.attention.rotary_dim]
    if isinstance(mixer, PairSpec):
        return PairBlock(mixer, config, layer, rotary, place)
    if isinstance(mixer, LatentAttentionSpec):
        return LatentAttentionBlock(mixer, config, layer, rotary, place)
    return AttentionBlock(mixer, config, layer, rotary, place)


def make_mlp(
    spec: MLPSpec | MoESpec | None, config: ModelConfig, place: Placement
) -> MLP | Mixture | ApartMixture | None:
    if spec is None:
        return None
    if isinstance(spec, MLPSpec):
        return MLP(spec, config.hidden_size, place)
    return ApartMixture(spec, config, place) if spec.apart else Mixture(spec, config.hidden_size, place)


class DecoderLayer(nn.Module):
    """Mixer, then MLP, each added to the residual stream, which travels beside the activations: so each addition
    is fused with the norm that follows it, or with the product before where no norm comes between."""

    def __init__(
        self, spec: LayerSpec, config: ModelConfig, layer: int, rotations: Rotations, place: Placement
    ) -> None:
        super().__init__()
        before = config.layers[layer - 1].residual_scale if layer else 1.0  # of what comes in to be added

        def norm(wanted: bool, scale: float, group: Group) -> Norm | NoNorm:
            return _norm(config, place, scale, group) if wanted else NoNorm(scale, group)

        scale, parallel = spec.residual_scale, spec.norms == "parallel"
        first, after = spec.norms != "post", spec.norms in _AFTER
        alone = None in (spec.mixer, spec.mlp)  # a mixer without an MLP, or the reverse: one norm, of the layer before
        assert not alone or (spec.norms == "pre" and scale == 1.0), "no model has it so"
        # A product may add to the residual stream itself, where it is no summand of this rank.
        self.adds_to_residual = not after and scale == 1.0 and place.tp_size == 1
        self.index, self.group = layer, place.group if after else ALONE
        self.mixer_norm = norm(first, before, summands(config, layer - 1, place))
        self.mixer = make_mixer(spec, config, layer, rotations, place)
        self.mixer_after = _norm(config, place) if after else None
        self.mlp_norm = None if parallel or alone else norm(first, scale, summands(config, layer, place))
        self.mlp = make_mlp(spec.mlp, config, place)
        self.mlp_after = _norm(config, place) if after else None
        self.apart = isinstance(self.mlp, ApartMixture)  # which reads the residual stream, and sums over the ranks
        self.mlp_group = ALONE if self.apart else self.group
        self.end = LayerEnd(spec, config, place) if spec.token_vector or spec.scaled else None
        self.token_vector = bool(spec.token_vector)
        # A router norms what it reads where nothing is left to be added before.
        mixer = self.mixer
        if mixer is not None and not isinstance(mixer, PairBlock):
            mixer.output.adds_few_rows = isinstance(self.mlp, Mixture)
        # The modules that alone, or first, read what each norm makes.
        of_mixer = mixer.qkv if isinstance(mixer, AttentionBlock) and mixer.gate is None and not parallel else None
        dense = self.mlp.shared if isinstance(self.mlp, ApartMixture) else self.mlp
        of_mlp = None if dense is None else dense.gate_up if isinstance(dense, MLP) else dense.router
        self._readers = (of_mlp if mixer is None else of_mixer, of_mlp)
        keep_at_hand(self)

    @property
    def attention(self) -> Attention | None:
        return None if self.mixer is None or isinstance(self.mixer, StateBlock) else self.mixer.attention

    @property
    def state(self) -> StateLayer | None:
        return self.mixer.state if isinstance(self.mixer, StateBlock | PairBlock) else None

    def weight_map(self, prefix: str) -> WeightMap:
        norms = {
            "input_layernorm": self.mixer_norm,
            "post_self_attn_layernorm": self.mixer_after,
            "post_attention_layernorm": self.mlp_norm,
            "post_mlp_layernorm": self.mlp_after,
        }
        return {
            **{f"{prefix}.{name}": (norm, "") for name, norm in norms.items() if isinstance(norm, Norm)},
            **({} if self.mixer is None else self.mixer.weight_map(f"{prefix}.{self.mixer.name}")),
            **({} if self.mlp is None else self.mlp.weight_map(f"{prefix}.mlp")),
            **({} if self.end is None else self.end.weight_map(prefix)),
        }

    def forward(
        self, x: Tensor | None, residual: Tensor, positions: Tensor, batch: AttentionBatch, wanted: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """x: what is still to be added to residual [T, hidden], which is updated in place; → the same of the next.
        Where ranks share the model, x is a summand of what is added, until a norm comes.

        `wanted` int32 [N], last tokens of requests: only they go on once the cache, or the state, has all tokens.
        """
        of_mixer, of_mlp = self._readers
        if self.mixer is None and wanted is not None:
            x, residual = None if x is None else x.index_select(0, wanted), residual.index_select(0, wanted)
        normed, residual = self.mixer_norm(x, residual, of_mixer)
        if self.mixer is None:
            assert self.mlp is not None
            return self.mlp(normed, residual if self.adds_to_residual else None), residual
        x = self.mixer(normed, residual if self.adds_to_residual else None, positions, batch, wanted)
        if self.mixer_after is not None:
            x = self.group.all_reduce(x)
            self.mixer_after.in_place(x)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        if self.mlp is None:
            return x, residual
        if self.mlp_norm is None:  # of what the mixer has seen, too
            normed = normed if wanted is None else normed.index_select(0, wanted)
        else:
            normed, residual = self.mlp_norm(x, residual, of_mlp)
            x = None
        y = self.mlp(normed, residual if self.adds_to_residual or self.apart else None)
        if self.mlp_after is not None:
            y = self.mlp_group.all_reduce(y)
            self.mlp_after.in_place(y)
        if self.end is not None:
            residual.add_(y)
            vectors = batch.token_vectors
            vector = vectors[:, self.index] if self.token_vector and vectors is not None else None
            self.end(residual, vector if wanted is None or vector is None else vector.index_select(0, wanted))
            return None, residual
        return (x if y is None else y if x is None else x + y), residual


def _norm(config: ModelConfig, place: Placement, scale: float = 1.0, group: Group = ALONE) -> Norm:
    return make_norm(config.frame.norm, (config.hidden_size,), config.norm_eps, place, scale=scale, group=group)


def summands(config: ModelConfig, layer: int, place: Placement) -> Group:
    """The ranks that each have a summand of what this layer's mixer or MLP adds to the residual stream, where it
    has not been normed, and therefore summed, before."""
    return ALONE if config.layers[layer].norms in _AFTER else place.group


def _bind_readers(layers: Iterable[tuple[AttentionSpec | LatentAttentionSpec, Attention]]) -> None:
    """Layers without keys and values of their own are told to the last one before them whose they read."""
    keeping: dict[Any, Attention] = {}
    for spec, attention in layers:
        kind = spec.rope, spec.window, spec.kv.head_dim
        if not attention.reads_earlier:
            keeping[kind] = attention
        elif kind in keeping:  # it is not where a few layers alone are looked at
            keeping[kind].readers.append(attention)


class CausalLM(nn.Module):
    """Embedding, layers, final norm; the output matrix is a call of its own because only sampled rows need logits.

    Built without weights; what differs between families, the specs of its layers say. `max_len` is the longest context
    served: the rotary tables end there. A stage has some of the layers, the first one the embedding before them, the
    last one what is behind.
    """

    def __init__(self, config: ModelConfig, place: Placement, max_len: int) -> None:
        super().__init__()
        self.config, self.place = config, place
        self.stage, self.indices = place.stage, place.stage.indices(len(config.layers))
        specs = [config.layers[index] for index in self.indices]
        rotations = {(spec.rope, spec.rotary_dim) for layer in specs if (spec := layer.attention) is not None}
        self.rotary: Rotations = {pair: RotaryEmbedding(*pair, max_len, place.device) for pair in rotations}
        self.embedding: Embedding | None = None
        if self.stage.is_first or (self.stage.is_last and config.tie_word_embeddings):
            self.embedding = Embedding(config.vocab_size, config.hidden_size, place, config.frame.embedding_scale)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, config, index, self.rotary, place)
            for index, spec in zip(self.indices, specs, strict=True)
        )
        last, scale = self.indices[-1], specs[-1].residual_scale
        self.norm: Norm | NoNorm = NoNorm(scale, summands(config, last, place))  # the next stage begins with a norm
        self.lm_head: LMHead | None = None
        self.pooling_head: Head | None = None
        if self.stage.is_last:
            self.norm = _norm(config, place, scale, summands(config, last, place))
            tied = self.embedding if config.tie_word_embeddings else None
            if config.generates:
                self.lm_head = LMHead(config.vocab_size, config.hidden_size, place, tied)
            if config.head is not None:
                self.pooling_head = Head(config.head, config.vocab_size, place, tied)
        self._layers = tuple(self._decoder_layers())  # indexing a ModuleList is slow
        self.token_vectors = TokenVectors(config, place) if config.frame.token_vectors else None
        _bind_readers(
            (spec.attention, layer.attention)
            for spec, layer in zip(specs, self._layers, strict=True)
            if spec.attention is not None and layer.attention is not None
        )
        self._elsewhere = tuple(self._other_stages())  # beginnings of names in the checkpoint
        # What looks at pictures, in the stage that has the embedding.
        self.tower = None if config.vision is None or not self.stage.is_first else make_tower(config.vision, place)
        self.features: Features | None = None  # hidden states that a drafting head reads; None: none does
        routers = [
            layer.mlp.router if isinstance(layer.mlp, Mixture | ApartMixture) else None for layer in self._layers
        ]
        self.expert_load = watch(routers, place.device)
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
        saves most of its work. Stages before the last return the residual stream of all tokens instead, and those
        behind the first take it as `embeddings`, and overwrite it."""
        # The residual stream is updated in place from here on, so the caller's embeddings are copied; what a stage has
        # been sent is its own.
        if embeddings is None:
            assert self.embedding is not None
            residual = self.embedding(input_ids)
        else:
            residual = embeddings.clone() if self.stage.is_first else embeddings
        x: Tensor | None = None
        pictures = batch.pictures
        if pictures is not None and self.stage.is_first:
            pictures.embed(residual)
        if self.token_vectors is not None:
            batch.token_vectors = self.token_vectors(input_ids, residual)
        if self.expert_load is not None:
            self.expert_load.query_start = batch.query_start
        if (features := self.features) is not None:
            return self._with_features(features, x, residual, positions, batch, wanted)
        if not self.stage.is_last:
            wanted = None
        # Behind so many layers pictures add something (DeepStack, arXiv:2406.04334): those leave no token out.
        deep = 0 if pictures is None else pictures.num_layers(self.config.hidden_size)
        of_last = None if (last := self._layers[-1]).index < deep else wanted
        for layer in self._layers:
            x, residual = layer(x, residual, positions, batch, of_last if layer is last else None)
            if pictures is not None and layer.index < deep:
                pictures.add_behind(layer.index, residual)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden if wanted is None or of_last is not None else hidden.index_select(0, wanted)

    def _with_features(
        self, features: Features, x: Tensor | None, residual: Tensor, positions: Tensor, batch: AttentionBatch,
        wanted: Tensor | None,
    ) -> Tensor:  # fmt: skip
        pictures = batch.pictures
        deep = 0 if pictures is None else pictures.num_layers(self.config.hidden_size)
        for index, layer in enumerate(self._layers):
            if x is not None and index in features.layers and (group := layer.mixer_norm.group).size > 1:
                residual.add_(group.all_reduce(x))  # of all ranks' summands
                x = None
            features.before_layer(index, x, residual)
            last = index == len(self._layers) - 1
            x, residual = layer(x, residual, positions, batch, wanted if last and not features.of_end else None)
            if pictures is not None and index < deep and not last:
                pictures.add_behind(index, residual)
        hidden: Tensor = self.norm(x, residual)[0]
        if not features.of_end:
            return hidden
        features.at_end(hidden)
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → fp32 [N, vocab]; zeros where nothing is ever sampled."""
        if self.lm_head is None:
            return hidden.new_zeros(hidden.shape[0], self.config.vocab_size, dtype=torch.float32)
        return self.lm_head.whole(self._logits(self.lm_head, hidden))

    def greatest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As Model has it."""
        if self.lm_head is None:
            return of_pieces(best_of_pieces(self.logits(hidden)))
        return self.lm_head.greatest(self._logits(self.lm_head, hidden))

    def _logits(self, lm_head: LMHead, hidden: Tensor) -> Tensor:
        """This rank's."""
        logits, frame = lm_head.part(hidden), self.config.frame
        if frame.logit_scale != 1.0:
            logits *= frame.logit_scale
        if frame.logit_cap:
            logits.div_(frame.logit_cap).tanh_().mul_(frame.logit_cap)
        return logits

    def kv_specs(self) -> list[KVSpec]:
        """What each layer of this rank with attention keeps in the KV cache."""
        return [attention.spec for attention in self.attention_layers()]

    def attention_layers(self) -> list[Attention]:
        """Those that keep keys and values."""
        found = (layer.attention for layer in self._layers)
        return [attention for attention in found if attention is not None and not attention.reads_earlier]

    def state_layers(self) -> list[StateLayer]:
        return [state for layer in self._layers if (state := layer.state) is not None]

    def weight_map(self) -> WeightMap:
        """Every module path of the checkpoint whose tensors must be loaded."""
        found: WeightMap = {}
        if self.embedding is not None:
            found["model.embed_tokens"] = (self.embedding, "")
        if isinstance(self.norm, Norm):
            found["model.norm"] = (self.norm, "")
        for index, layer in zip(self.indices, self._layers, strict=True):
            found |= layer.weight_map(f"model.layers.{index}")
        if self.token_vectors is not None:
            found |= self.token_vectors.weight_map()
        if self.lm_head is not None:
            found["lm_head"] = (self.lm_head, "out")
        if self.pooling_head is not None:
            found |= self.pooling_head.weight_map()
        named = {self.config.named(path): target for path, target in found.items()}
        return named if self.tower is None else named | self.tower.weight_map()

    def is_ignorable(self, name: str) -> bool:
        """Tensors some checkpoints carry that nothing needs: rotary tables, a copy of the tied output matrix, what
        looks at pictures, what is behind the hidden states where something else is asked of them, other stages'."""
        if name.startswith(self._elsewhere):
            return True
        if name.endswith(".rotary_emb.inv_freq") or name.startswith(self.config.ignored):
            return True
        if not self.config.generates and name.startswith((self.config.named("lm_head."), "score.")):
            return True
        return self.config.tie_word_embeddings and name == self.config.named("lm_head.weight")

    def _other_stages(self) -> Iterator[str]:
        """And what layers have for keys and values that they read of earlier ones."""
        named = self.config.named
        for index, layer in enumerate(self.config.layers):
            if isinstance(layer.attention, AttentionSpec) and layer.attention.reads_earlier:
                yield from (named(f"model.layers.{index}.self_attn.{part}.") for part in _KEYS_AND_VALUES)
        for index in range(len(self.config.layers)):
            if index not in self.indices:
                yield named(f"model.layers.{index}.")
        if self.embedding is None:
            yield named("model.embed_tokens.")
        if not self.stage.is_last:
            yield from (named("model.norm."), named("lm_head."), "score.", "classifier.")

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer
