"""4-bit floats e2m1, two in a byte: NVFP4 (e4m3 scales of 16 columns, a factor above them), MXFP4 (e8m0 scales of 32).

The meanings: OCP Microscaling Formats 1.0, 5.3.3, and NVIDIA's model optimizer. Inputs stay 16-bit: what checkpoints
say of theirs is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .eight_bits import one_number
from .format import DUMMY_STD, EXPONENTS, Scales, Stored, beside, powers_of_two, refuse_scaled_inputs
from .settings import Headers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SPREAD = (sum(value * value for value in E2M1) / 16) ** 0.5  # of uniform codes


@dataclass(frozen=True)
class Fp4:
    """w = e2m1 · weight_scale · factor; NVFP4's factor is a tensor of its own, or divides (`divisor`)."""

    weight: str  # suffix: "weight_packed" of compressed-tensors, "weight" of others
    factor: str | None = None  # suffix; None: MXFP4, whose scales are powers of two
    divisor: bool = False
    shape: tuple[int, ...] = (1,)  # of the factor, as stored
    beside: tuple[tuple[str, Stored], ...] = ()

    @property
    def name(self) -> str:
        return "MXFP4" if self.factor is None else "NVFP4"

    @property
    def scales(self) -> Scales:
        if self.factor is None:
            return Scales("weight_scale", (1, 32), dtypes=EXPONENTS)
        return Scales("weight_scale", (1, 16), dtypes=("F8_E4M3",))

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        group = self.scales.block[1]
        if columns % group:
            raise ModelError(
                f"a matrix with {columns} columns has no whole groups of {group}, as {self.name} stores them: use the "
                "unquantized model"
            )
        tensors = {
            self.weight: Stored((rows, columns // 2), ("U8",)),
            "weight_scale": self.scales.stored(rows, columns),
            **dict(self.beside),
        }
        if self.factor is not None:
            tensors[self.factor] = Stored(self.shape, ("F32",))
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        scales = self.scales.read(tensors, rows, columns)
        if self.factor is not None:
            factor = one_number(tensors[self.factor], self.factor)
            scales = scales / factor if self.divisor else scales * factor
        return _codes(unpack_nibbles(tensors[self.weight]), scales, self.scales.block[1])

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        import torch

        device, group = generator.device, self.scales.block[1]
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device, generator=generator)
        return _codes(codes, torch.full((rows, -(-columns // group)), DUMMY_STD / _SPREAD, device=device), group)


def _codes(codes: Tensor, scales: Tensor, group: int) -> Codes:
    import torch

    from .codes import Codes

    return Codes(codes, scales, group, bits=4, table=torch.tensor(E2M1, device=codes.device))


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., K / 2] → uint8 [..., K]: the low nibble is the even column."""
    import torch

    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def find_fp4(path: str, stored: Headers) -> Fp4:
    """How the module at `path` is stored, by its headers. Raises ModelError where it is no such FP4."""
    refuse_scaled_inputs(path, stored)
    weight = "weight_packed" if "weight_packed" in stored else "weight"
    known = (("weight_global_scale", True), ("weight_scale_2", False))
    for suffix, divisor in known:
        if suffix in stored:
            return Fp4(weight, suffix, divisor, stored[suffix][1], beside(stored))
    if "weight_scale" in stored and stored["weight_scale"][0] in EXPONENTS:
        return Fp4(weight, beside=beside(stored))
    raise ModelError(
        f"{path}.{weight} holds 4-bit floats, without the scales of NVFP4 (weight_global_scale or weight_scale_2) or "
        "MXFP4 (weight_scale in bytes): download the checkpoint again"
    )


def decode_experts(blocks: Tensor, scales: Tensor, alternating: bool = False) -> list[Codes]:
    """gpt-oss' experts, uint8 [E, N, K/32, 16] and uint8 [E, N, K/32] → a matrix [N, K] an expert.

    `alternating`: rows are those of gate and up in turn (gate_up_proj); all rows of gate come first in the result.
    """
    experts = []
    for packed, exponents in zip(blocks, scales, strict=True):
        codes, factors = unpack_nibbles(packed).flatten(1), powers_of_two(exponents)
        if alternating:
            codes, factors = (rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) for rows in (codes, factors))
        experts.append(_codes(codes, factors, 32))
    return experts


class Mxfp4Scheme:
    """quant_method mxfp4, of gpt-oss: experts alone are quantised, in tensors of all of them (`decode_experts`)."""

    method = "mxfp4"

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass  # modules_to_not_convert names all but the experts

    def format(self, path: str, stored: Headers | None) -> Fp4 | None:
        if path.endswith(".experts") and (stored is None or any(suffix.endswith("_blocks") for suffix in stored)):
            return Fp4("weight")
        if stored is not None and any(stored.get(suffix, ("",))[0] == "U8" for suffix in ("weight", "weight_packed")):
            return find_fp4(path, stored)
        return None
