"""The only place that multiplies by weights: its method says how, its rule how it is divided over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ...kernels.linear.fp8_rows import Fp8Rows
from ...kernels.linear.linear_hopper import Share
from ...kernels.norm.activation import gelu_tanh_mul
from ..families.layer_spec import Activation
from ..quant.format import Format, Stored
from ..quant.method import Dequantized, Quantized
from ..quant.unquantized import Unquantized
from ..quant.weights import LinearShape, Placement, ShardRule, keep_at_hand


class LinearMethod(Protocol):
    """How one Linear stores its weights and multiplies: an nn.Module with its tensors, tiles and tables.

    The first five are what WeightHolder has of these names.
    """

    add_up_to: int  # up to how many rows a product is one kernel that takes the residual, and can be late; 0: never
    add_rows: int | None  # from how many rows on it does so, too; None: never
    fp8_rows: int | None  # from how many rows on x may come as FP8; None: never
    fp8_by_group: bool  # then with a scale for 128 columns each, else with one a row

    def expected(self, part: str) -> dict[str, Stored]: ...

    def create(self) -> None: ...

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None: ...

    def finish(self) -> None: ...

    def randomize(self, generator: torch.Generator) -> None: ...

    def multiply(self, x: Tensor | Fp8Rows, residual: Tensor | None = None, late: bool = False) -> Tensor:
        """[T, in] → [T, out] of this rank. residual [T, out], given where it is taken: is added to, and returned. late,
        asked of up to add_up_to rows: the next kernel starts once x is there, as in kernels.linear.small_linear."""
        ...

    def silu_mul(self, x: Tensor | Fp8Rows, fp8_by_group: bool | None = None) -> Tensor | Fp8Rows:
        """[T, in] → [T, out / 2]: silu(gate) · up of the layer's two parts. fp8_by_group: the result may be FP8."""
        ...

    def silu_mul_adapted(self, x: Tensor, share: Callable[[Tensor], Share | None]) -> Tensor | None:
        """silu_mul of the products and what an adapter adds to them, in one pass; None: it takes several. share: as in
        Adapter, asked for where it is taken."""
        ...

    def multiply_fp32(self, x: Tensor) -> Tensor:
        """The same as multiply with a result in fp32, not rounded to the activations' dtype where the device can."""
        ...


class Adapter(Protocol):
    """What a low-rank adapter adds to a product; see engine/adapters/tables.py."""

    @property
    def active(self) -> bool:
        """Whether some row of the step under way has one."""
        ...

    def added(self, x: Tensor, multiply: Callable[[], Tensor], late: bool = False, gated: bool = False) -> Tensor:
        """multiply(), the product y [T, out] of this rank with x [T, in], += B A x, in place → y; gated: → silu of its
        first half times the second. Only where it is active. late: the product is."""
        ...

    def share(self, x: Tensor) -> Share | None:
        """B A x for a gated product of x [T, in] that comes next; None where it is for `added`."""
        ...


class Linear(nn.Module):
    """y = x Wᵀ + b for the shape that LinearShape describes."""

    method: LinearMethod

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        place: Placement,
        rule: ShardRule = "replicated",
        unit: int = 1,
        bias: bool = False,
        row_order: Mapping[str, Tensor] = {},
        pieces: Mapping[str, Sequence[int]] = {},
        units: Mapping[str, int] = {},
    ) -> None:
        super().__init__()
        self.shape = LinearShape(in_features, parts, place, rule, unit, bias, row_order, pieces, units)
        self.adapter: Adapter | None = None
        self.adds_few_rows = False  # to the residual, even of few rows, where a module behind it gains by that

    def choose(self, formats: Mapping[str, Format]) -> None:
        if not formats:
            self.method = Unquantized(self.shape)
        elif self.shape.place.device.type != "cuda" or self.shape.place.dtype.itemsize == 2:
            self.method = Quantized(self.shape, formats)
        else:  # no kernel multiplies codes by fp32
            self.method = Dequantized(self.shape, formats)
        keep_at_hand(self)

    def expected(self, part: str) -> dict[str, Stored]:
        return self.method.expected(part)

    def create(self) -> None:
        self.method.create()

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.method.load(part, tensors)

    def finish(self) -> None:
        self.method.finish()

    def randomize(self, generator: torch.Generator) -> None:
        self.method.randomize(generator)

    def norms(self, rows: int) -> bool:
        """Never: a norm of few rows is a launch of a microsecond beside the product, and would take each of its
        programs as long."""
        return False

    def fp8_input(self, rows: int) -> bool | None:
        """How input of so many rows is best given: as FP8 with a scale for 128 columns each (True), with one a row
        (False), or as it is (None)."""
        fp8_rows = self.method.fp8_rows
        return None if fp8_rows is None or rows < fp8_rows or self.is_adapted else self.method.fp8_by_group

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        """[T, in] → [T, out], in the activations' dtype; for the row rule this rank's summand."""
        return self._product(x)

    def _product(self, x: Tensor | Fp8Rows, residual: Tensor | None = None) -> Tensor:
        """residual: as in LinearMethod.multiply."""
        adapter = self.active_adapter
        return self.method.multiply(x, residual) if adapter is None else self._added(adapter, x, residual)

    def _added(
        self, adapter: Adapter, x: Tensor | Fp8Rows, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        assert isinstance(x, Tensor), "fp8_input asks for none in a step with adapters"
        late = len(x) <= self.method.add_up_to
        return adapter.added(x, lambda: self.method.multiply(x, residual, late=late), late, gated)

    @property
    def active_adapter(self) -> Adapter | None:
        """In this step."""
        return self.adapter if self.adapter is not None and self.adapter.active else None

    @property
    def is_adapted(self) -> bool:
        return self.active_adapter is not None

    def add_to(self, residual: Tensor | None, x: Tensor | Fp8Rows) -> Tensor | None:
        """[T, in] → [T, out] that is to be added to residual [T, out]; None: it has been. Where residual is None, the
        result is wanted itself."""
        if residual is None or not self._adds(x.shape[0]):
            return self._product(x)
        self._product(x, residual)
        return None

    def _adds(self, rows: int) -> bool:
        """What an adapter adds to is rounded once more: of few rows it has to be, for rows without one to keep their
        bits."""
        add_rows = self.method.add_rows
        few = self.adds_few_rows and rows <= self.method.add_up_to
        return few or (add_rows is not None and rows >= add_rows and not self.is_adapted)

    def silu_mul(self, x: Tensor | Fp8Rows, reader: Linear | None = None) -> Tensor | Fp8Rows:
        """[T, in] → [T, out / 2] of this rank: silu of the first part, times the second; as `reader` takes it best."""
        if (adapter := self.active_adapter) is not None:
            assert isinstance(x, Tensor), "fp8_input asks for none in a step with adapters"
            joined = self.method.silu_mul_adapted(x, adapter.share)
            return self._added(adapter, x, gated=True) if joined is None else joined
        return self.method.silu_mul(x, None if reader is None else reader.fp8_input(x.shape[0]))

    def activate(self, x: Tensor | Fp8Rows, activation: Activation, reader: Linear | None = None) -> Tensor | Fp8Rows:
        """[T, in] → [T, out / 2] of this rank: the first half activated, times the second; as `reader` takes it."""
        if activation == "silu":
            return self.silu_mul(x, reader)
        assert activation == "gelu_tanh", f"there is no kernel for {activation} yet"
        return gelu_tanh_mul(self(x))


class TowerLinear(Linear):
    """A product of what looks at pictures: no adapter adds to it, and only files quantise it, no option."""
