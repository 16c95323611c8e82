"""The layer behind a model's last one that drafts: multi-token prediction, as DeepSeek-V3 and GLM-4.5 have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..describe.model_config import ModelConfig
from ..errors import ModelError
from ..files.tensor_info import TensorInfo
from ..layers.attention import Attention, AttentionBatch
from ..layers.embedding import Embedding, LMHead
from ..layers.linear import Linear
from ..layers.norm import NoNorm, Norm, make_norm
from ..models.blocks import CausalLM, DecoderLayer, summands
from ..models.features import Features
from ..quant.weights import Placement, WeightMap


class MTPHead(nn.Module):
    """One more decoder layer (arXiv 2412.19437, 2.2). At position p it reads the token at p + 1 and the target's hidden
    state at p, and says what p + 2 is; then it goes on with its own."""

    shifted = True

    def __init__(
        self, config: ModelConfig, target: CausalLM, headers: Mapping[str, TensorInfo], place: Placement
    ) -> None:
        """config: of the target with all of its layers."""
        super().__init__()
        self.config, self.place = config, place
        self._target = (target,)  # no module of this one
        hidden, spec = config.hidden_size, config.layers[-1]
        self.prefix = f"model.layers.{len(config.layers)}"

        def norm() -> Norm:
            return make_norm(config.frame.norm, (hidden,), config.norm_eps, place)

        self.features = Features((), hidden, place)
        self.embedding_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.join = Linear(2 * hidden, {"out": hidden}, place=place)
        rotary = target.rotary[spec.attention.rope, spec.attention.rotary_dim]
        self.layer = DecoderLayer(spec, config, len(config.layers) - 1, rotary, place)
        self.end = NoNorm(spec.residual_scale, summands(config, len(config.layers) - 1, place))
        has = {name: f"{self.prefix}.{name}.weight" in headers for name in ("embed_tokens", "shared_head.head")}
        self.embedding = Embedding(config.vocab_size, hidden, place) if has["embed_tokens"] else None
        self.lm_head = LMHead(config.vocab_size, hidden, place) if has["shared_head.head"] else None
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
        return self.end(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → fp32 [N, vocab]."""
        normed, _ = self.norm(None, hidden)
        assert isinstance(normed, Tensor)
        return self.target.logits(normed) if self.lm_head is None else self.lm_head(normed)

    def attention_layers(self) -> list[Attention]:
        return [self.layer.attention.attention]

    def weight_map(self) -> WeightMap:
        prefix = self.prefix
        found: WeightMap = {
            f"{prefix}.enorm": (self.embedding_norm, ""),
            f"{prefix}.hnorm": (self.hidden_norm, ""),
            f"{prefix}.eh_proj": (self.join, "out"),
            f"{prefix}.shared_head.norm": (self.norm, ""),
            **self.layer.weight_map(prefix),
        }
        if self.embedding is not None:
            found[f"{prefix}.embed_tokens"] = (self.embedding, "")
        if self.lm_head is not None:
            found[f"{prefix}.shared_head.head"] = (self.lm_head, "out")
        return {self.config.named(path): holder for path, holder in found.items()}

    def is_ignorable(self, name: str) -> bool:
        """What is the target's, or of further layers like this one."""
        return not name.startswith(f"{self.prefix}.") or name.endswith(".rotary_emb.inv_freq")

    def finish(self) -> None:
        """Once everything is loaded: what is the target's takes no room of its own."""
        mine, theirs = self.embedding, self.target.embedding
        if mine is not None and theirs is not None and torch.equal(mine.weight, theirs.weight):
            self.embedding = None


def check_has_layer(folder: Path, headers: Mapping[str, TensorInfo], target: ModelConfig) -> None:
    """Raises ModelError where nothing stands behind the last layer."""
    prefix = f"model.layers.{len(target.layers)}."
    if prefix not in target.ignored:
        raise ModelError(
            f"{target.architecture} has no layers for multi-token prediction, or config.json names none "
            "(num_nextn_predict_layers): use another method"
        )
    if f"{prefix}eh_proj.weight" not in headers:
        raise ModelError(
            f"{folder} lacks {prefix}eh_proj.weight, the layer that drafts: download the whole model, or "
            "use another method"
        )
