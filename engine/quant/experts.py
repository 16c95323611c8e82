"""Experts whose matrices keep the codes that the checkpoint has, multiplied on the CPU."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from ...kernels.experts.moe import expert_mlp, sum_of_experts
from ...kernels.experts.moe_lora import ExpertLora
from .codes import Codes, joined
from .matrix import FloatMatrix, make_matrix
from .weights import Placement

Biases = tuple[Tensor | None, Tensor | None]  # of gate and up [E, 2I], of down [E, H]


class ExpertsMethod(Protocol):
    """How the experts' matrices are kept, and multiplied by: an nn.Module."""

    def take(self, expert: int, part: str, matrix: Tensor | Codes) -> None:
        """This rank's share of one matrix [N, K]; each comes once, from any thread."""
        ...

    def finish(self) -> None: ...

    def products(self) -> Counter[str]:
        """What multiplies by quantised matrices, for people, by how many have it."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def mix(
        self, x: Tensor, ids: Tensor, weights: Tensor, biases: Biases, beside: Tensor | None,
        lora: ExpertLora | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As kernels.moe.experts; biases [E, 2I] and [E, H]."""
        ...


class QuantizedExperts(nn.Module):
    """Two products an expert: gate and up are one matrix where they are stored alike, as in Quantized."""

    def __init__(self, num_experts: int, place: Placement, limit: float) -> None:
        super().__init__()
        self.place, self.limit = place, limit
        self.gate_up = nn.ModuleList(nn.ModuleList() for _ in range(num_experts))
        self.down = nn.ModuleList(nn.ModuleList() for _ in range(num_experts))
        self._halves: dict[int, dict[str, Tensor | Codes]] = {}
        self._lock = threading.Lock()

    def take(self, expert: int, part: str, matrix: Tensor | Codes) -> None:
        """Whoever brings the second half of gate and up makes their matrix."""
        if isinstance(matrix, Tensor):
            matrix = matrix.to(self.place.device, self.place.dtype)
        if part == "down":
            self._make(self.down, expert, [matrix])
            return
        with self._lock:
            halves = self._halves.setdefault(expert, {})
            halves[part] = matrix
            if len(halves) < 2:
                return
            del self._halves[expert]
        self._make(self.gate_up, expert, [halves["gate"], halves["up"]])

    def finish(self) -> None:
        both = zip(self.gate_up.children(), self.down.children(), strict=True)
        self._products = [(tuple(first.children()), tuple(second.children())) for first, second in both]

    def products(self) -> Counter[str]:
        return Counter(str(matrix.name) for pair in self._products for matrices in pair for matrix in matrices)

    def mix(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        biases: tuple[Tensor | None, Tensor | None],
        beside: Tensor | None,
        lora: ExpertLora | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        def product(matrices: tuple[nn.Module, ...], rows: Tensor, bias: Tensor | None, expert: int) -> Tensor:
            results = [matrix(rows, rows.dtype) for matrix in matrices]
            y: Tensor = results[0] if len(results) == 1 else torch.cat(results, dim=1)
            return y if bias is None else y.add_(bias[expert])

        def first(expert: int, rows: Tensor) -> Tensor:
            return product(self._products[expert][0], rows, biases[0], expert)

        def second(expert: int, gates: Tensor) -> Tensor:
            return product(self._products[expert][1], gates, biases[1], expert)

        mlp = expert_mlp(first, second, self.limit, lora)
        return sum_of_experts(x, ids, weights, mlp, beside, residual)

    def _make(self, matrices: nn.ModuleList, expert: int, parts: list[Tensor | Codes]) -> None:
        place = self.place
        matrices[expert] = nn.ModuleList(
            make_matrix(part, place.dtype, place.exact) if isinstance(part, Codes) else FloatMatrix(part)
            for part in joined(parts)
        )
