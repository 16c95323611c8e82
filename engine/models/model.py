"""What the engine asks of a model, whatever it is built from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from ..describe.model_config import ModelConfig
from ..families.layer_spec import KVSpec
from ..layers.attention import Attention, AttentionBatch
from ..layers.head import Head
from ..quant.weights import Placement, WeightMap


class Loadable(Protocol):
    """An nn.Module that is built without weights; the loader gives them to the holders of `weight_map`."""

    config: ModelConfig
    place: Placement

    def weight_map(self) -> WeightMap:
        """Every module path of the checkpoint whose tensors must be loaded."""
        ...

    def is_ignorable(self, name: str) -> bool:
        """Whether nothing needs this tensor, which some checkpoints carry."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Model(Loadable, Protocol):
    """Token ids → hidden states → logits."""

    pooling_head: Head | None  # behind the pooled hidden state

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        embeddings: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """input_ids and positions int32 [T] → hidden states [T, hidden] after the final norm.

        `embeddings` [T, hidden] take the place of the ids' own; they are left unchanged.
        With `wanted`, int32 [N], the result is [N, hidden]: of these tokens, each the last of its request in this step.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → fp32 [N, vocab]."""
        ...

    def greatest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[N, hidden] → the tokens of the greatest logits, int32 [N], the lowest of several, and whether these logits
        are finite, bool [N]: what argmax says of `logits`."""
        ...

    def attention_layers(self) -> list[Attention]:
        """All that want a KV cache bound, in the order of layers."""
        ...

    def kv_specs(self) -> list[KVSpec]:
        """What each layer of this rank keeps in the KV cache."""
        ...

    def modules(self) -> Iterator[nn.Module]: ...
