"""compressed-tensors' integers for weights alone: `pack-quantized`, and `int-quantized` without activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ModelError
from .format import Stored
from .settings import SCALES, whole_groups

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes


@dataclass(frozen=True)
class PackedInts:
    """w = (code - zero) · weight_scale, where code and zero are signed numbers of `bits` bits.

    bits: 1 to 8. group: columns that share a scale (strategy group); None: the whole row (channel). packed: codes lie
    in int32 words (pack-quantized), all of them raised by 2 ** (bits - 1); else each in an int8 (int-quantized).
    per_tensor: one scale for the matrix (strategy tensor), `group` is None then.
    """

    bits: int
    group: int | None = None
    symmetric: bool = True
    packed: bool = True
    per_tensor: bool = False

    @property
    def name(self) -> str:
        group = "tensor" if self.per_tensor else "channel" if self.group is None else self.group
        return f"compressed-tensors int{self.bits} G={group}{'' if self.symmetric else ' asymmetric'}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        groups = 1 if self.group is None else -(-columns // self.group)
        scales = (1,) if self.per_tensor else (rows, groups)
        zeros = Stored(scales, ("I8",), optional=self.symmetric)
        if not self.packed:
            tensors = {"weight": Stored((rows, columns), ("I8",))}
        else:
            tensors = {
                "weight_packed": Stored((rows, -(-columns * self.bits // 32)), ("I32",)),
                "weight_shape": Stored((2,), ("I64", "I32"), optional=True),
            }
            if not self.per_tensor:  # along the output, unlike the codes
                zeros = Stored((-(-rows * self.bits // 32), groups), ("I32",), optional=self.symmetric)
        if self.group is not None:
            tensors["weight_g_idx"] = Stored((columns,), ("I32", "I64"), optional=True)
        return {**tensors, "weight_scale": Stored(scales, SCALES), "weight_zero_point": zeros}

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        import torch

        from .integers import integer_codes
        from .unpack import bit_stream

        half = 1 << (self.bits - 1)
        if self.packed:
            self._check(tensors, rows, columns)
            codes = bit_stream(tensors["weight_packed"], self.bits, columns)
        else:
            codes = tensors["weight"].view(torch.uint8) + half  # uint8 wraps around
            if self.bits < 8 and int(codes.max()) >= 2 * half:
                raise ModelError(
                    f"weight holds codes from {int(tensors['weight'].min())} to {int(tensors['weight'].max())}, "
                    f"config.json says {self.bits} bits: correct num_bits"
                )
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = bit_stream(zeros.t(), self.bits, rows).t()
        elif zeros is not None:
            zeros = zeros.view(torch.uint8) + half
        scales = tensors["weight_scale"]
        if self.per_tensor:
            scales = scales.view(1, 1).expand(rows, 1)
            zeros = None if zeros is None else zeros.view(1, 1).expand(rows, 1)
        groups = tensors.get("weight_g_idx")
        if groups is not None and bool((groups == -1).any()):  # never filled in: columns lie in their order
            groups = None
        if groups is None:
            whole_groups(columns, self.group)
        return integer_codes(codes, scales, zeros, self.group or columns, self.bits, self.symmetric, groups)

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        from .integers import random_codes

        return random_codes(rows, columns, self.bits, self.group or columns, self.symmetric, generator)

    @staticmethod
    def _check(tensors: Mapping[str, Tensor], rows: int, columns: int) -> None:
        if "weight_shape" in tensors and (shape := tensors["weight_shape"].tolist()) != [rows, columns]:
            raise ModelError(
                f"weight_shape is {shape} in the checkpoint, config.json makes the matrix {[rows, columns]}: the "
                "weights and the config are not of one model, download both again"
            )
