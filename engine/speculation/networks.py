"""The networks that draft: heads of EAGLE, the layer behind a model's last one (MTP), a smaller model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..describe.model_config import ModelConfig
from ..errors import ModelError
from ..families.layer_spec import AttentionSpec, MLPSpec
from ..layers.attention import Attention, AttentionBatch
from ..layers.embedding import Embedding, LMHead
from ..layers.linear import Linear
from ..layers.norm import NoNorm, Norm, make_norm
from ..layers.rope import RotaryEmbedding
from ..models.attention_block import AttentionBlock
from ..models.blocks import CausalLM
from ..models.decoder_layer import DecoderLayer, summands
from ..models.mlp import MLP, with_stored_experts
from ..models.model import Features
from ..parallel.group import ALONE, Group
from ..quant.format import TensorInfo
from ..quant.weights import Placement, WeightMap
from .draft_config import HeadConfig


class OnTarget(nn.Module):
    """What reads the target's hidden states, and its embedding where it has none of its own."""

    embedding: Embedding | None
    shifted = True

    def __init__(self, target: CausalLM, place: Placement) -> None:
        super().__init__()
        self._target, self.place = (target,), place  # in a tuple the target is no module of this one

    @property
    def target(self) -> CausalLM:
        return self._target[0]

    @property
    def table(self) -> Embedding:
        embedding = self.target.embedding if self.embedding is None else self.embedding
        assert embedding is not None, "the target is whole: resolve() refuses stages"
        return embedding

    def finish(self) -> None:
        """Once everything is loaded: an embedding that is the target's takes no room of its own."""
        mine, theirs = self.embedding, self.target.embedding
        if mine is not None and theirs is not None and mine.scale == theirs.scale:
            self.embedding = None if torch.equal(mine.weight, theirs.weight) else mine


class EagleHead(OnTarget):
    """One decoder layer. At position p it reads the token at p + 1 and what is thought at p, and says what p + 2 is."""

    token_ids: Tensor | None = None  # int64 [draft_vocab]: which tokens of the target its own are; None: the same

    def __init__(self, head: HeadConfig, target: CausalLM, max_len: int, place: Placement) -> None:
        super().__init__(target, place)
        config = head.config
        (spec,) = config.layers
        assert isinstance(spec.attention, AttentionSpec) and isinstance(spec.mlp, MLPSpec)
        self.head, self.config = head, config
        hidden = config.hidden_size

        def norm(group: Group = ALONE) -> Norm:
            return make_norm(config.frame.norm, (hidden,), config.norm_eps, place, group=group)

        self.features = Features(head.taps, head.target_size, place)
        inputs = self.features.width + (0 if head.is_third else hidden)
        self.fc = Linear(inputs, {"out": hidden}, place=place, bias=head.has_bias)
        self.embedding = Embedding(config.vocab_size, hidden, place) if head.has_embedding else None
        rotary = RotaryEmbedding(spec.attention.rope, spec.attention.rotary_dim, max_len, place.device)
        self.embedding_norm = norm() if head.is_third else None
        self.hidden_norm = norm() if head.is_third else None
        width = 2 * hidden if head.is_third else hidden
        self.attention = AttentionBlock(spec.attention, config, 0, rotary, place, width)
        self.mlp_norm = norm(place.group)
        self.mlp = MLP(spec.mlp, hidden, place)
        self.norm = norm() if head.is_third else None
        self.lm_head = LMHead(head.draft_vocab, hidden, place) if head.draft_vocab else None
        self.eval()

    def read_features(self, features: Tensor) -> Tensor:
        """[T, width] → [T, h or the target's], what the first pass takes as `hidden`."""
        y = self.fc(features) if self.head.is_third else features
        assert isinstance(y, Tensor)
        return y

    def forward(
        self, input_ids: Tensor, hidden: Tensor | None, positions: Tensor, batch: AttentionBatch,
        wanted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """input_ids int [T]: of the tokens behind `positions`; hidden [T, h], of these → [T, h], or of the wanted."""
        assert hidden is not None
        embeddings = self.table(input_ids)
        if self.embedding_norm is not None and self.hidden_norm is not None:
            normed, _ = self.hidden_norm(None, hidden)
            residual = normed if self.head.normed_residual else hidden
            x = torch.cat((self.embedding_norm(None, embeddings)[0], normed), dim=-1)
        else:
            residual = x = self.fc(torch.cat((embeddings, hidden), dim=-1))
        added = self.attention(x, None, positions, batch, wanted)
        residual = residual.clone() if wanted is None else residual.index_select(0, wanted)
        normed, residual = self.mlp_norm(added, residual)
        y = self.mlp(normed, None)
        assert y is not None
        return residual.add_(self.place.group.all_reduce(y))

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, h] → fp32 [N, vocab of the target]; -inf for tokens that the head does not know."""
        if self.norm is not None:
            hidden = self.norm(None, hidden)[0]
        if self.lm_head is None:
            return self.target.logits(hidden)
        logits = self.lm_head(hidden)
        if self.token_ids is None:
            return logits
        every = logits.new_full((len(logits), self.target.config.vocab_size), float("-inf"))
        return every.index_copy_(1, self.token_ids, logits)

    def attention_layers(self) -> list[Attention]:
        return [self.attention.attention]

    def weight_map(self) -> WeightMap:
        prefix = self.head.prefix
        layer = f"{prefix}{self.head.layer}"
        found: WeightMap = {f"{prefix}fc": (self.fc, "out")}
        norms = {
            f"{layer}.input_layernorm": self.embedding_norm,
            f"{layer}.hidden_norm": self.hidden_norm,
            f"{layer}.post_attention_layernorm": self.mlp_norm,
            f"{prefix}norm": self.norm,
        }
        found |= {name: (norm, "") for name, norm in norms.items() if norm is not None}
        found |= {**self.attention.weight_map(f"{layer}.self_attn"), **self.mlp.weight_map(f"{layer}.mlp")}
        if self.embedding is not None:
            found[f"{prefix}embed_tokens"] = (self.embedding, "")
        if self.lm_head is not None:
            found["lm_head"] = (self.lm_head, "out")
        return found

    def is_ignorable(self, name: str) -> bool:
        if name.endswith(".rotary_emb.inv_freq") or name in ("t2d", "d2t"):
            return True
        return self.lm_head is None and name == "lm_head.weight"


class MTPHead(OnTarget):
    """One more decoder layer (arXiv 2412.19437, 2.2). At position p it reads the token at p + 1 and the target's hidden
    state at p, and says what p + 2 is; then it goes on with its own."""

    def __init__(
        self, config: ModelConfig, target: CausalLM, headers: Mapping[str, TensorInfo], place: Placement
    ) -> None:
        """config: of the target with all of its layers, of which the last with attention is like this one. headers: of
        the checkpoint, or of what stands under the layer's prefix."""
        super().__init__(target, place)
        names = config.drafting
        assert names is not None, "checked before"
        index = max(index for index, layer in enumerate(config.layers) if layer.attention is not None)
        alone = replace(config, layers=(config.layers[index],), ignored=())
        own = {name: info.shape for name, info in headers.items() if name.startswith(config.named(names.prefix))}
        self.config, self.names = config, names
        hidden, (spec,) = config.hidden_size, with_stored_experts(alone, own).layers

        def norm() -> Norm:
            return make_norm(config.frame.norm, (hidden,), config.norm_eps, place)

        self.features = Features((), hidden, place)
        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.join = Linear(2 * hidden, {"out": hidden}, place=place)
        self.layer = DecoderLayer(spec, config, index, target.rotary, place)
        scale, group = spec.residual_scale, summands(config, index, place)
        self.end: Norm | NoNorm = NoNorm(scale, group)
        self.norm: Norm | None = norm()
        if names.goes_on_normed:
            self.end, self.norm = make_norm(
                config.frame.norm, (hidden,), config.norm_eps, place, scale=scale, group=group
            ), None  # fmt: skip

        def has(name: str) -> bool:
            return bool(name) and f"{config.named(names.prefix + name)}.weight" in headers

        self.embedding = Embedding(config.vocab_size, hidden, place) if has(names.embedding) else None
        self.lm_head = LMHead(config.vocab_size, hidden, place) if has(names.lm_head) else None
        self.eval()

    def read_features(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, input_ids: Tensor, hidden: Tensor | None, positions: Tensor, batch: AttentionBatch,
        wanted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As EagleHead has it."""
        assert hidden is not None
        embeddings = self.table(input_ids)
        both = (self.embedding_norm(None, embeddings)[0], self.hidden_norm(None, hidden)[0])
        residual = self.join(torch.cat(both, dim=-1))
        x, residual = self.layer(None, residual, positions, batch, wanted)
        hidden = self.end(x, residual)[0]
        assert isinstance(hidden, Tensor)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → fp32 [N, vocab]."""
        normed = hidden if self.norm is None else self.norm(None, hidden)[0]
        assert isinstance(normed, Tensor)
        return self.target.logits(normed) if self.lm_head is None else self.lm_head(normed)

    def attention_layers(self) -> list[Attention]:
        attention = self.layer.attention
        assert attention is not None, "checked before"
        return [attention]

    def weight_map(self) -> WeightMap:
        names, norm = self.names, self.end if self.norm is None else self.norm
        assert isinstance(norm, Norm)
        found: WeightMap = {
            names.embedding_norm: (self.embedding_norm, ""),
            names.hidden_norm: (self.hidden_norm, ""),
            names.join: (self.join, "out"),
            names.norm: (norm, ""),
            **self.layer.weight_map(names.layer.removesuffix(".")),
        }
        if self.embedding is not None:
            found[names.embedding] = (self.embedding, "")
        if self.lm_head is not None:
            found[names.lm_head] = (self.lm_head, "out")
        return {self.config.named(f"{names.prefix}{path.removeprefix('.')}"): at for path, at in found.items()}

    def is_ignorable(self, name: str) -> bool:
        """What is the target's, or of further layers like this one."""
        prefix, layer = (self.config.named(path) for path in (self.names.prefix, self.names.prefix + self.names.layer))
        further = self.names.layer and name.startswith(f"{prefix}layers.") and not name.startswith(layer)
        return bool(further) or not name.startswith(prefix) or name.endswith(".rotary_emb.inv_freq")


def check_has_layer(folder: Path, headers: Mapping[str, TensorInfo], target: ModelConfig) -> None:
    """Raises ModelError where nothing stands behind the last layer."""
    names = target.drafting
    if names is None:
        raise ModelError(
            f"{target.architecture} has no layers for multi-token prediction that are computed here, or config.json "
            "names none (num_nextn_predict_layers): use another method"
        )
    if (join := f"{target.named(names.prefix + names.join)}.weight") not in headers:
        raise ModelError(
            f"{folder} lacks {join}, the layer that drafts: download the whole model, or use another method"
        )


class DraftModel:
    """At position p it reads the token there, and says what p + 1 is."""

    shifted = False
    features: Features | None = None

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def read_features(self, features: Tensor) -> Tensor:
        raise AssertionError("it has none")

    def __call__(
        self, input_ids: Tensor, hidden: Tensor | None, positions: Tensor, batch: AttentionBatch,
        wanted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.model(input_ids, positions, batch, wanted=wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def attention_layers(self) -> list[Attention]:
        return self.model.attention_layers()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()
