"""Tokens of a step that pictures stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
        """residual [T, hidden], as it leaves this layer, counted from 0: one of the first `num_layers`."""
        residual.index_add_(0, self.tokens, _of_layer(self.features, layer, residual))


@dataclass(frozen=True, slots=True)
class PictureRows:
    """The same as graphs read it, in whose steps any token may be of a picture. seen: bool [T], those that are.
    features [T, hidden · (1 + layers)]: zeros for all others."""

    seen: Tensor
    features: Tensor

    def num_layers(self, hidden_size: int) -> int:
        return self.features.shape[1] // hidden_size - 1

    def embed(self, embeddings: Tensor) -> None:
        embeddings.copy_(torch.where(self.seen[:, None], self.features[:, : embeddings.shape[1]], embeddings))

    def add_behind(self, layer: int, residual: Tensor) -> None:
        residual.add_(_of_layer(self.features, layer, residual))


def _of_layer(features: Tensor, layer: int, residual: Tensor) -> Tensor:
    size = residual.shape[1]
    return features[:, size * (1 + layer) : size * (2 + layer)]
