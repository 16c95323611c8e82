"""The decoder-only models that are served: what stands around the layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.sampling.argmax import best_of_pieces, of_pieces
from ..describe.model_config import ModelConfig
from ..families.layer_spec import (
    AttentionSpec,
    KVSpec,
    LatentAttentionSpec,
)
from ..layers.attention import Attention, AttentionBatch
from ..layers.embedding import Embedding, LMHead
from ..layers.head import Head
from ..layers.norm import NoNorm, Norm
from ..layers.rope import RotaryEmbedding
from ..layers.routing import watch
from ..layers.state import StateLayer
from ..quant.weights import Placement, WeightMap
from ..vision.towers import make_tower
from .decoder_layer import DecoderLayer, Rotations, layer_norm, summands
from .mixture_apart import ApartMixture
from .mlp import Mixture
from .model import Features
from .token_vectors import TokenVectors

_KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm", "v_norm")


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
            self.norm = layer_norm(config, place, scale, summands(config, last, place))
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
