"""A Linear whose parts the checkpoint stores quantised, each in its own way: methods that keep the codes, or not."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.linear.fp8_rows import Fp8Rows, silu_mul_fp8
from ...kernels.norm.activation import silu_mul
from .codes import Codes, joined
from .decoded import decoded
from .format import DUMMY_STD, FLOATS, Format, Stored
from .matrix import FloatMatrix, PackedMatrix, make_matrix
from .unquantized import Unquantized
from .weights import LinearShape


def _decoded(shape: LinearShape, format: Format, part: str, tensors: Mapping[str, Tensor]) -> Codes:
    """Of the whole part, as the checkpoint orders its rows, on the device."""
    return decoded(format, tensors, shape.parts[part], shape.in_features, shape.place.device)


def _expected(shape: LinearShape, formats: Mapping[str, Format], part: str) -> dict[str, Stored]:
    rows, columns, format = shape.parts[part], shape.in_features, formats.get(part)
    found = {"weight": Stored((rows, columns), FLOATS)} if format is None else format.expected(rows, columns)
    return found | {"bias": Stored((rows,), FLOATS)} if shape.has_bias else found


class Dequantized(Unquantized):
    """Takes quantised parts and keeps the numbers that they mean, in the activations' dtype, which have fast products
    on every device."""

    def __init__(self, shape: LinearShape, formats: Mapping[str, Format]) -> None:
        super().__init__(shape)
        self.formats = dict(formats)

    def expected(self, part: str) -> dict[str, Stored]:
        return _expected(self.shape, self.formats, part)

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        if (format := self.formats.get(part)) is not None:
            place, bias = self.shape.place, {name: tensors[name] for name in ("bias",) if name in tensors}
            tensors = {"weight": _decoded(self.shape, format, part, tensors).numbers(place.dtype), **bias}
        super().load(part, tensors)


class Quantized(nn.Module):
    """y = x Wᵀ + b; neighbouring parts that are stored alike are one matrix, others are matrices of their own.

    From fp8_rows rows on x may come as FP8, with scales as fp8_by_group says (Linear.fp8_input).
    """

    add_up_to: int = 0
    add_rows: int | None = None
    fp8_rows: int | None = None
    fp8_by_group = False
    _packed: PackedMatrix | None = None  # where it is the only matrix

    def __init__(self, shape: LinearShape, formats: Mapping[str, Format]) -> None:
        super().__init__()
        self.shape, self.formats = shape, dict(formats)

    def expected(self, part: str) -> dict[str, Stored]:
        return _expected(self.shape, self.formats, part)

    def create(self) -> None:
        """The matrices come with their tensors: how large they are depends on the format."""
        self.bias = self.shape.place.empty(self.shape.rows) if self.shape.has_bias else None
        self._parts: dict[str, Codes | Tensor] = {}
        self._lock = threading.Lock()

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        place, format = self.shape.place, self.formats.get(part)
        if self.bias is not None:
            self.shape.load_bias(self.bias, part, tensors["bias"])
        if format is None:
            self._take(part, self._share(part, tensors["weight"]).to(place.device, place.dtype))
            return
        rows, columns, cut = self.shape.parts[part], self.shape.in_features, place.tp_size > 1
        codes = decoded(format, tensors, rows, columns, place.device, cut)
        if part in self.shape.row_order:
            codes = codes.in_order(self.shape.row_order[part])
        self._take(part, self._cut(part, codes).to(place.device))

    def randomize(self, generator: torch.Generator) -> None:
        for part, rows in self.shape.parts.items():
            format = self.formats.get(part)
            if format is None:
                whole = self.shape.place.empty(rows, self.shape.in_features).data
                self._take(part, self._share(part, whole.normal_(0.0, DUMMY_STD, generator=generator)))
            else:
                self._take(part, self._cut(part, format.dummy(rows, self.shape.in_features, generator)))
        if self.bias is not None:
            self.bias.normal_(0.0, DUMMY_STD, generator=generator)

    def finish(self) -> None:
        self._matrices = tuple(self.matrices)  # indexing a ModuleList is slow
        only = self._matrices[0] if len(self._matrices) == 1 else None
        if isinstance(only, PackedMatrix):
            self.__dict__["_packed"], self.add_up_to = only, only.add_up_to
            if only.fp8:
                self.fp8_rows, self.fp8_by_group = only.few_rows + 1, only.by_group
            if self.bias is None and self.shape.place.tp_size == 1:
                self.add_rows = only.add_rows

    def multiply(self, x: Tensor | Fp8Rows, residual: Tensor | None = None, late: bool = False) -> Tensor:
        if self._packed is not None:
            return self._packed(x, x.dtype, self.bias, residual)
        y = self._product(x, x.dtype)
        return y if residual is None else residual.add_(y)

    def silu_mul(self, x: Tensor | Fp8Rows, fp8_by_group: bool | None = None) -> Tensor | Fp8Rows:
        packed, joined = self._packed, None
        if fp8_by_group is None or packed is None:
            if packed is not None and self.bias is None and isinstance(x, Tensor):
                joined = packed.silu_mul(x)
            return silu_mul(self.multiply(x)) if joined is None else joined
        gates = self.fp8_rows is not None and x.shape[0] >= self.fp8_rows and self.bias is None
        return silu_mul_fp8(packed.gate(x) if gates else self.multiply(x), x.dtype, fp8_by_group)

    def silu_mul_adapted(self, x: Tensor, share: object) -> None:
        return None

    def multiply_fp32(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32)

    def _share(self, part: str, weight: Tensor) -> Tensor:
        weight = self.shape.ordered(part, weight)
        return weight.narrow(0, *self.shape.spans[part]).narrow(1, *self.shape.input_span)

    def _cut(self, part: str, codes: Codes) -> Codes:
        """This rank's share."""
        start, size = self.shape.input_span
        if size != codes.shape[1]:
            codes = codes.ordered().columns(start, size)
        return codes.rows(*self.shape.spans[part])

    def _take(self, part: str, share: Codes | Tensor) -> None:
        """With the last part the matrices are made: while others are loaded, no more than one layer a thread is there
        as it was decoded."""
        place = self.shape.place
        with self._lock:
            self._parts[part] = share
            if len(self._parts) == len(self.shape.parts):
                self.matrices = nn.ModuleList(
                    make_matrix(part, place.dtype, place.exact) if isinstance(part, Codes) else FloatMatrix(part)
                    for part in joined([self._parts.pop(name) for name in self.shape.parts])
                )

    def _product(self, x: Tensor | Fp8Rows, dtype: torch.dtype) -> Tensor:
        results = [matrix(x, dtype) for matrix in self._matrices]
        y: Tensor = results[0] if len(results) == 1 else torch.cat(results, dim=1)
        if self.bias is not None:
            y += self.bias
        return y
