"""Token ids → vectors, and vectors → logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .linear import DUMMY_STD, Linear, TiedMethod
from .staging import copy_weight
from .weights import Placement


class Embedding(nn.Module):
    """A row of the table for each id. Every rank holds the whole table: it is small beside the layers."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.weight = place.empty(vocab_size, hidden_size)

    def expected(self, part: str) -> dict[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    def load(self, part: str, tensor: Tensor, kind: str = "weight") -> None:
        copy_weight(self.weight, tensor)

    def finish(self) -> None:
        pass

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(0.0, DUMMY_STD, generator=generator)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[T] int32 or int64 → [T, hidden]."""
        return functional.embedding(input_ids, self.weight)


class LMHead(Linear):
    """Hidden states → logits, in fp32 because sampling sums over the whole vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement, tied: Embedding | None = None) -> None:
        method = None if tied is None else TiedMethod(tied.weight)
        super().__init__(hidden_size, {"out": vocab_size}, place=place, rule="column", method=method)

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] of the selected rows → fp32 [N, vocab]."""
        y = self.method.apply_fp32(self, x)
        return y if self.adapter is None else self.adapter(self, x, y)
