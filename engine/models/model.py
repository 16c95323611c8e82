"""What the engine asks of a model, whatever it is built from, and the hidden states that drafting heads read of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from ..describe.model_config import ModelConfig
from ..families.layer_spec import KVSpec
from ..layers.attention import Attention, AttentionBatch
from ..layers.head import Head
from ..layers.state import StateLayer
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
        """What each layer of this rank with attention keeps in the KV cache."""
        ...

    def state_layers(self) -> list[StateLayer]:
        """All that want memory for states bound, in the order of layers."""
        ...

    def modules(self) -> Iterator[nn.Module]: ...


class Features:
    """Residual streams as they enter some layers, one beside the other; or, of no layers, hidden states after the final
    norm. One buffer for all steps: CUDA graphs write where the others do."""

    def __init__(self, layers: tuple[int, ...], hidden_size: int, place: Placement) -> None:
        """layers: counted from 0; empty: the hidden states at the end."""
        self.layers, self.hidden_size, self.place = layers, hidden_size, place
        self.of_end = not layers
        self.width = max(1, len(layers)) * hidden_size
        self.is_captured = False  # CUDA graphs know where the rows lie: what they know is kept
        self._all = [torch.empty(0, self.width, dtype=place.dtype, device=place.device)]

    def reserve(self, num_tokens: int) -> None:
        """Room for steps of so many tokens."""
        if num_tokens > len(self._rows):
            self._all.append(torch.empty(num_tokens, self.width, dtype=self.place.dtype, device=self.place.device))
            if not self.is_captured:
                del self._all[:-1]

    @property
    def _rows(self) -> Tensor:
        return self._all[-1]

    def of_step(self, num_tokens: int) -> Tensor:
        """[T, width], of the last forward."""
        return self._rows[:num_tokens]

    def before_layer(self, layer: int, x: Tensor | None, residual: Tensor) -> None:
        """The residual stream [T, hidden] is about to enter this layer; x is still to be added."""
        self.reserve(len(residual))
        for index, wanted in enumerate(self.layers):
            if wanted == layer:
                start = index * self.hidden_size
                rows = self._rows[: len(residual), start : start + self.hidden_size]
                rows.copy_(residual if x is None else residual + x)

    def at_end(self, hidden: Tensor) -> None:
        """[T, hidden], after the final norm."""
        self._rows[: len(hidden)].copy_(hidden)
