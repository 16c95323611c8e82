"""What a model thinks of each token of a step, kept for a head that drafts by it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant.weights import Placement


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
        for place, wanted in enumerate(self.layers):
            if wanted == layer:
                start = place * self.hidden_size
                rows = self._rows[: len(residual), start : start + self.hidden_size]
                rows.copy_(residual if x is None else residual + x)

    def at_end(self, hidden: Tensor) -> None:
        """[T, hidden], after the final norm."""
        self._rows[: len(hidden)].copy_(hidden)
