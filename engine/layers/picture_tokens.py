"""Tokens of a step that pictures stand for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """tokens: int64 [N], indexes of them among the step's T. features [N, hidden · (1 + layers)]: what takes the place
    of their embeddings, and behind it, for each of the first layers, what is added to the residual stream behind it."""

    tokens: Tensor
    features: Tensor

    def num_layers(self, hidden_size: int) -> int:
        """Behind which something is added."""
        return self.features.shape[1] // hidden_size - 1

    def embed(self, embeddings: Tensor) -> None:
        """embeddings [T, hidden], overwritten where there is a picture."""
        embeddings.index_copy_(0, self.tokens, self.features[:, : embeddings.shape[1]])

    def add_behind(self, layer: int, residual: Tensor) -> None:
        """residual [T, hidden], as it leaves this layer, counted from 0."""
        size = residual.shape[1]
        start = size * (1 + layer)
        if start < self.features.shape[1]:
            residual.index_add_(0, self.tokens, self.features[:, start : start + size])
