"""A smaller model with the target's tokens, which drafts by itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ..layers.attention import Attention, AttentionBatch
from ..models.blocks import CausalLM
from ..models.features import Features


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
