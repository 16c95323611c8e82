"""Heads of EAGLE: a small layer on top of what the target thinks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..families.layer_spec import AttentionSpec, MLPSpec
from ..layers.attention import Attention, AttentionBatch
from ..layers.embedding import Embedding, LMHead
from ..layers.linear import Linear
from ..layers.norm import Norm, make_norm
from ..layers.rope import RotaryEmbedding
from ..models.attention_block import AttentionBlock
from ..models.blocks import CausalLM
from ..models.features import Features
from ..models.mlp import MLP
from ..parallel.group import ALONE, Group
from ..quant.weights import Placement, WeightMap
from .draft_config import HeadConfig


class EagleHead(nn.Module):
    """One decoder layer. At position p it reads the token at p + 1 and what is thought at p, and says what p + 2 is."""

    shifted = True
    token_ids: Tensor | None = None  # int64 [draft_vocab]: which tokens of the target its own are; None: the same

    def __init__(self, head: HeadConfig, target: CausalLM, max_len: int, place: Placement) -> None:
        super().__init__()
        config = head.config
        (spec,) = config.layers
        assert isinstance(spec.attention, AttentionSpec) and isinstance(spec.mlp, MLPSpec)
        self.head, self.config, self.place = head, config, place
        self._target = (target,)  # no module of this one
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

    @property
    def target(self) -> CausalLM:
        return self._target[0]

    @property
    def table(self) -> Embedding:
        embedding = self.target.embedding if self.embedding is None else self.embedding
        assert embedding is not None, "the target is whole: resolve() refuses stages"
        return embedding

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
        embedding = self.target.embedding if self.embedding is None else self.embedding
        assert embedding is not None and hidden is not None
        embeddings = embedding(input_ids)
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

    def finish(self) -> None:
        """Once everything is loaded: an embedding that is the target's takes no room of its own."""
        mine, theirs = self.embedding, self.target.embedding
        assert theirs is not None, "targets are not cut into stages"
        if mine is not None and mine.scale == theirs.scale and torch.equal(mine.weight, theirs.weight):
            self.embedding = None
