"""The block formats of ggml as codes, scales and minima: the layouts are those of ggml-common.h and ggml-quants.c.

A row of a matrix is a row of blocks, so rows are cut and permuted as packed bytes. What a code book or ternary packing
makes of three bits or fewer is dequantised when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from .codes import Codes
from .format import Stored
from .ggml_types import BLOCKS, BY_NAME, CODE_BOOKS, GGMLType

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled, as ggml has them
_DUMMY_DEVIATION = 0.02

# codes [N, B, elements of a block], scales [N, B, groups of a block], minima as scales or None
Unpacked = tuple[Tensor, Tensor, Tensor | None]


@dataclass(eq=False)
class BlockFormat:
    """A `Format`: the matrix is one tensor "weight" of bytes [N, bytes of a row]."""

    ggml: GGMLType
    bits: int
    group: int
    unpack: Callable[[Tensor], Unpacked]  # of blocks, uint8 [N, B, bytes of a block]
    least: int = 0  # code; below 0: int8 codes
    table: tuple[int, ...] | None = None
    has_minima: bool = False

    def __post_init__(self) -> None:
        self.name = f"GGUF {self.ggml.name}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        if columns % self.ggml.elements:
            raise ModelError(
                f"a matrix of {rows} x {columns} cannot be stored as {self.ggml.name}, whose blocks have "
                f"{self.ggml.elements} columns: get the model in another type (Q8_0, F16)"
            )
        return {"weight": Stored((rows, self.ggml.row_bytes(columns)), (self.ggml.name,))}

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        raw, wanted = tensors["weight"], self.expected(rows, columns)["weight"].shape
        if raw.dtype != torch.uint8 or tuple(raw.shape) != wanted:
            raise ModelError(
                f"blocks of {self.ggml.name} are {raw.dtype} {list(raw.shape)}, expected are torch.uint8 "
                f"{list(wanted)}: the weights do not fit the file's keys, download it again"
            )
        codes, scales, minima = self.unpack(raw.reshape(rows, -1, self.ggml.bytes))
        return self._codes(
            codes.reshape(rows, columns), scales.reshape(rows, -1), None if minima is None else minima.reshape(rows, -1)
        )

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        self.expected(rows, columns)
        device, dtype = generator.device, torch.int8 if self.least < 0 else torch.uint8
        end = self.least + 2**self.bits
        codes = torch.randint(self.least, end, (rows, columns), generator=generator, device=device, dtype=dtype)
        values = torch.tensor(self.table or range(self.least, end), dtype=torch.float32)
        scale = _DUMMY_DEVIATION / values.std(correction=0).item()
        scales = torch.full((rows, columns // self.group), scale, device=device)
        return self._codes(codes, scales, scales * values.mean().item() if self.has_minima else None)

    def _codes(self, codes: Tensor, scales: Tensor, minima: Tensor | None) -> Codes:
        table = None if self.table is None else torch.tensor(self.table, dtype=torch.float32, device=codes.device)
        return Codes(codes, scales, self.group, self.bits, minima=minima, table=table)


def dequantized(raw: Tensor, ggml: GGMLType) -> Tensor:
    """Blocks on the CPU, uint8 [N, bytes of a row], as fp32 [N, K]: of types that have no `BlockFormat`.

    Needs the package gguf, which has their code books.
    """
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType[ggml.name]))


def format_of(kind: str, path: str) -> BlockFormat:
    """Raises ModelError for a type that has none."""
    if kind not in FORMATS:
        raise ModelError(
            f"{path}.weight has type {kind}, which is not served: get the model in one of {', '.join(FORMATS)}"
        )
    return FORMATS[kind]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 at byte `at` of each block, as fp32 [N, B, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[…, n] → [… , 2, n]: low ones, then high ones."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """[…, n] → […, 8 / bits, n]: the lowest `bits` of each byte, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-2) >> shifts[:, None]) & (2**bits - 1)


def _signed(codes: Tensor, offset: int) -> Tensor:
    return codes.view(torch.int8) - offset


def _q4_0(blocks: Tensor) -> Unpacked:
    return _signed(_nibbles(blocks[..., 2:]).flatten(-2), 8), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Unpacked:
    return _nibbles(blocks[..., 4:]).flatten(-2), _half(blocks, 0), -_half(blocks, 2)


def _with_fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """From byte `at` on 4 bytes with the highest bits, the i-th bit of element i, then nibbles."""
    high = _fields(blocks[..., at : at + 4], 1).mT.flatten(-2)
    return _nibbles(blocks[..., at + 4 :]).flatten(-2) | (high << 4)


def _q5_0(blocks: Tensor) -> Unpacked:
    return _signed(_with_fifth_bits(blocks, 2), 16), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Unpacked:
    return _with_fifth_bits(blocks, 4), _half(blocks, 0), -_half(blocks, 2)


def _q8_0(blocks: Tensor) -> Unpacked:
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _two_bits(packed: Tensor) -> Tensor:
    """64 bytes → 256 codes: each half of 32 bytes has 4 sub-blocks of 32."""
    return _fields(packed.unflatten(-1, (2, 32)), 2).flatten(-3)


def _q2_k(blocks: Tensor) -> Unpacked:
    steps = blocks[..., :16]
    scales, minima = _half(blocks, 80) * (steps & 15).float(), _half(blocks, 82) * (steps >> 4).float()
    return _two_bits(blocks[..., 16:80]), scales, minima


def _q3_k(blocks: Tensor) -> Unpacked:
    low = _nibbles(blocks[..., 96:104]).flatten(-2)
    high = _fields(blocks[..., 104:108], 2).flatten(-2)
    scales = _half(blocks, 108) * _signed(low | (high << 4), 32).float()
    third = _fields(blocks[..., :32], 1).flatten(-2)  # set where nothing is to be taken off
    return _signed(_two_bits(blocks[..., 32:96]) | (third << 2), 4), scales, None


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K, [N, B, 8]: six bits each in bytes 4 to 16, times the fp16 before them."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()


def _q4_k(blocks: Tensor) -> Unpacked:
    return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-3), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> Unpacked:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-3)
    return low | (_fields(blocks[..., 16:48], 1).flatten(-2) << 4), *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> Unpacked:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-3)
    high = _two_bits(blocks[..., 128:192])
    steps = blocks[..., 192:208].contiguous().view(torch.int8)
    return _signed(low | (high << 4), 32), _half(blocks, 208) * steps.float(), None


def _iq4_nl(blocks: Tensor) -> Unpacked:
    return _nibbles(blocks[..., 2:]).flatten(-2), _half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> Unpacked:
    low, high = _nibbles(blocks[..., 4:8]).mT.flatten(-2), _fields(blocks[..., 2:4], 2).mT.flatten(-2)
    scales = _half(blocks, 0) * _signed(low | (high << 4), 32).float()
    return _nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-3), scales, None


def _mxfp4(blocks: Tensor) -> Unpacked:
    exponents = blocks[..., :1].int()  # scale 2^(e - 128), half of what e8m0 means, for the table is doubled
    subnormal = torch.full_like(exponents, 1 << 21) << exponents.clamp(max=1)
    scales = torch.where(exponents < 2, subnormal, (exponents - 1) << 23).view(torch.float32)
    return _nibbles(blocks[..., 1:]).flatten(-2), scales, None


def _format(name: str, bits: int, group: int, unpack: Callable[[Tensor], Unpacked], **rest: Any) -> BlockFormat:
    return BlockFormat(BY_NAME[name], bits, group, unpack, **rest)


FORMATS = {
    one.ggml.name: one
    for one in (
        _format("Q4_0", 4, 32, _q4_0, least=-8),
        _format("Q4_1", 4, 32, _q4_1, has_minima=True),
        _format("Q5_0", 5, 32, _q5_0, least=-16),
        _format("Q5_1", 5, 32, _q5_1, has_minima=True),
        _format("Q8_0", 8, 32, _q8_0, least=-128),
        _format("Q2_K", 2, 16, _q2_k, has_minima=True),
        _format("Q3_K", 3, 16, _q3_k, least=-4),
        _format("Q4_K", 4, 32, _q4_k, has_minima=True),
        _format("Q5_K", 5, 32, _q5_k, has_minima=True),
        _format("Q6_K", 6, 16, _q6_k, least=-32),
        _format("IQ4_NL", 4, 32, _iq4_nl, table=_IQ4),
        _format("IQ4_XS", 4, 32, _iq4_xs, table=_IQ4),
        _format("MXFP4", 4, 32, _mxfp4, table=_E2M1),
    )
}
assert tuple(FORMATS) == BLOCKS and not set(FORMATS) & set(CODE_BOOKS)
