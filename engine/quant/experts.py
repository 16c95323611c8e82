"""Experts whose matrices keep the checkpoint's codes: multiplied on the CPU, or packed as a GPU's kernels read them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from ...kernels.experts.expert_codes import ExpertCodes
from ...kernels.experts.moe import expert_mlp, sum_of_experts
from ...kernels.experts.moe_codes import experts_codes
from ...kernels.experts.moe_fp8 import experts_fp8, experts_take_fp8, fp8_expert_tile
from ...kernels.experts.moe_lora import ExpertLora
from ...kernels.linear.planes import Packed, unpacked
from .codes import Codes, joined
from .matrix import FloatMatrix, PackedMatrix, make_matrix, packed
from .weights import Placement, frozen

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
        """The call that brings the second half of gate and up makes their matrix."""
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


PARTS = {"gate": ("gate_up", 0), "up": ("gate_up", 1), "down": ("down", 0)}  # of which matrix, and which of its parts


class PackedExperts(nn.Module):
    """All experts' gate and up one ExpertCodes, all their down another. Where some are stored unlike the others, or
    in a way that no kernel takes (columns in an order of their own, say), all become numbers: `plain`."""

    gate_up_codes: ExpertCodes
    down_codes: ExpertCodes

    def __init__(
        self, num_experts: int, of: int, place: Placement, limit: float, plain: Callable[[], ExpertsMethod]
    ) -> None:
        """num_experts of all ranks' `of`. plain: makes the method that keeps numbers."""
        super().__init__()
        self.num_experts, self.of, self.limit, self.dtype = num_experts, of, limit, place.dtype
        self._make_plain = plain
        self.plain: ExpertsMethod | None = None
        self._codes: dict[str, ExpertCodes] = {}
        self._taken: list[tuple[int, str]] = []
        self._lock = threading.Lock()

    def take(self, expert: int, part: str, matrix: Tensor | Codes) -> None:
        made = None
        if self.plain is None and isinstance(matrix, Codes) and matrix.order is None:
            made = packed(matrix) if PackedMatrix.takes(matrix, self.dtype) else None
        with self._lock:
            if self.plain is None and (made is None or not self._keep(expert, part, made)):
                self._become_plain()
            if self.plain is not None:
                self.plain.take(expert, part, matrix)

    def finish(self) -> None:
        if self.plain is not None:
            self.plain.finish()
            return
        for name, codes in self._codes.items():
            kept = nn.ParameterList(frozen(tensor) for tensor in codes[:3] if tensor is not None)
            self.register_module(name, kept)
        self.gate_up_codes, self.down_codes = self._codes["gate_up"], self._codes["down"]
        self.fp8 = experts_take_fp8(self.gate_up_codes, self.down_codes)

    def products(self) -> Counter[str]:
        if self.plain is not None:
            return self.plain.products()
        found = Counter[str]()
        for codes in self._codes.values():
            name = f"{codes.kind} codes: experts' kernels" + (", FP8 products for many rows" if self.fp8 else "")
            found[name] += self.num_experts
        return found

    @property
    def kinds(self) -> set[str]:
        """Of codes; none where there are only numbers."""
        return set() if self.plain is not None else {codes.kind for codes in self._codes.values()}

    def mix(
        self, x: Tensor, ids: Tensor, weights: Tensor, biases: tuple[Tensor | None, Tensor | None],
        beside: Tensor | None, lora: ExpertLora | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if self.plain is not None:
            return self.plain.mix(x, ids, weights, biases, beside, lora, residual)
        matrices, rows = (self.gate_up_codes, self.down_codes), x.shape[0] * ids.shape[1] / self.of
        if lora is None and self.fp8 and fp8_expert_tile("gate_up", rows) is not None:  # adapters want 16-bit rows
            return experts_fp8(
                x, ids, weights, *matrices, *biases, limit=self.limit, beside=beside, of=self.of, residual=residual
            )
        return experts_codes(
            x, ids, weights, *matrices, *biases, limit=self.limit, beside=beside, of=self.of, lora=lora,
            residual=residual,
        )  # fmt: skip

    def _keep(self, expert: int, part: str, made: Packed) -> bool:
        """Whether it is stored as the others."""
        name, place = PARTS[part]
        codes = self._codes.get(name)
        if codes is None:
            codes = ExpertCodes.empty(self.num_experts, 2 if name == "gate_up" else 1, made)
        elif not codes.holds(made):
            return False
        self._codes[name] = codes = codes.fitting(made)
        target = codes.of(expert, place)
        target.words.copy_(made.words)
        target.scales.copy_(made.scales)
        if target.shifts is not None:
            target.shifts.zero_() if made.shifts is None else target.shifts.copy_(made.shifts)
        self._taken.append((expert, part))
        return True

    def _become_plain(self) -> None:
        """With what was taken so far."""
        plain = self._make_plain()
        for expert, part in self._taken:
            name, place = PARTS[part]
            plain.take(expert, part, unpacked(self._codes[name].of(expert, place), self.dtype))
        self._codes, self._taken, self.plain = {}, [], plain
