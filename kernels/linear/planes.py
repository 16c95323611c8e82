"""Matrices of 4- and 8-bit codes as products on a GPU read them: packed, and how a register of codes becomes numbers.

A block of a row's columns is as many 16-bit words as a *plane* has columns. Word i holds column i of every plane: four
codes of 4 bits, the first lowest, or two of 8. So a tile of words becomes a whole tile of numbers a plane with a shift
and a mask for two neighbours, and what tensor cores take is contiguous in the activations: nothing is shuffled.

    4 bits, planes of 32: word i of a block of 128 columns holds those of columns i, 32 + i, 64 + i, 96 + i
    8 bits, planes of 64: word i of a block of 128 columns holds those of columns i, 64 + i

Words of 4-bit codes lie tile by tile, [N / 64, blocks, 64 rows, plane], so that each load is of whole lines. Those of 8
bits lie row by row: bytes that FP8 products can read as they are, where the activations' columns have the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

TILE = 64  # rows that stand together
WIDEST = 128  # columns of a block, at most

# kind → bits of a code. int4: less 8; int8, e4m3, e5m2: as their names say; e2m1: 4-bit floats; table: any 16 numbers.
BITS = {"int4": 4, "e2m1": 4, "table": 4, "int8": 8, "e4m3": 8, "e5m2": 8}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Packed(NamedTuple):
    """w[n, k] = scales[g, n] · value(code) - shifts[g, n], g = k // group; without groups one scale a row."""

    words: torch.Tensor  # int16, [N / 64, blocks, 64, plane] of 4-bit codes, [N rounded up to 64, blocks, plane] of 8
    scales: torch.Tensor  # fp16 or fp32 [groups, N rounded up to 64]
    shifts: torch.Tensor | None  # like scales
    kind: str  # of BITS
    table: tuple[float, ...]  # of kind "table": what the 16 codes mean
    group: int  # columns; 0: a row's all; it divides a block's, or is a multiple of them
    rows: int  # N
    columns: int  # K

    @property
    def plane(self) -> int:
        return self.words.shape[-1]

    @property
    def blocks(self) -> int:
        return self.words.shape[1]

    @property
    def block_columns(self) -> int:
        return self.plane * planes_of(self.kind)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Words from a row, a block, a tile of 64 rows to the next."""
        if BITS[self.kind] == 4:
            return self.plane, TILE * self.plane, self.blocks * TILE * self.plane
        return self.blocks * self.plane, self.plane, TILE * self.blocks * self.plane

    @property
    def device(self) -> torch.device:
        return self.words.device


def planes_of(kind: str) -> int:
    return 16 // BITS[kind]


def plane_width(kind: str, group: int) -> int:
    """Columns of a plane: of one group, and whole lines of memory where groups are large enough. 0: groups are such
    that no plane is of one."""
    widest = 32 if BITS[kind] == 4 else 64
    if group == 0:
        return widest
    return next((width for width in (widest, 32, 16) if width <= widest and group % width == 0), 0)


def pack(
    codes: torch.Tensor, scales: torch.Tensor, kind: str, group: int = 0, shifts: torch.Tensor | None = None,
    table: Sequence[float] = (),
) -> Packed:  # fmt: skip
    """codes uint8 [N, K], as bits (of int8: two's complement; of int4: what is to be less 8); scales and shifts [N,
    groups], kept as they are; but a group that blocks would straddle (48, 96, 192 columns) becomes several smaller ones
    of one scale. Rows and columns that fill up the last tile and block mean nothing: x is zero there, and their results
    are dropped."""
    rows, columns = codes.shape
    width, planes = plane_width(kind, group), planes_of(kind)
    if width == 0 or (group and scales.shape[1] != -(-columns // group)):
        raise ValueError(f"groups of {group} columns cannot be packed: multiples of 16 can")
    if group % WIDEST and (parts := group // gcd(group, WIDEST)) > 1:
        group //= parts
        width = plane_width(kind, group)
        scales = scales.repeat_interleave(parts, dim=1)
        shifts = None if shifts is None else shifts.repeat_interleave(parts, dim=1)
    codes = F.pad(codes, (0, -columns % (width * planes), 0, -rows % TILE))
    blocks = codes.shape[1] // (width * planes)
    split = codes.view(len(codes), blocks, planes, width)
    words = torch.zeros(len(codes), blocks, width, dtype=torch.int16, device=codes.device)
    for plane in range(planes):
        words |= split[:, :, plane].to(torch.int16) << (plane * BITS[kind])
    if BITS[kind] == 4:
        words = words.view(-1, TILE, blocks, width).transpose(1, 2).contiguous()

    def by_group(values: torch.Tensor) -> torch.Tensor:
        return F.pad(values.t(), (0, -rows % TILE)).contiguous()

    return Packed(
        words, by_group(scales), None if shifts is None else by_group(shifts), kind, tuple(table), group, rows, columns
    )


def unpacked(matrix: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[N, K]: what it means, computed in fp32."""
    kind, planes = matrix.kind, planes_of(matrix.kind)
    words = matrix.words.int()
    if BITS[kind] == 4:
        words = words.transpose(1, 2).flatten(0, 1)
    mask = (1 << BITS[kind]) - 1
    codes = torch.stack([words >> (plane * BITS[kind]) & mask for plane in range(planes)], dim=2)
    codes = codes.flatten(1)[: matrix.rows, : matrix.columns]
    values = value_of(kind, matrix.table, codes.device)[codes]

    def by_column(of_groups: torch.Tensor) -> torch.Tensor:
        of_groups = of_groups.t()[: matrix.rows].float()
        return of_groups.repeat_interleave(matrix.group or matrix.columns, dim=1)[:, : matrix.columns]

    values = values * by_column(matrix.scales)
    if matrix.shifts is not None:
        values = values - by_column(matrix.shifts)
    return values.to(dtype)


def value_of(kind: str, table: tuple[float, ...] = (), device: torch.device | str = "cpu") -> torch.Tensor:
    """fp32, by code: what it means."""
    if kind in ("table", "e2m1"):
        return torch.tensor(table if kind == "table" else E2M1, device=device)
    if kind == "int4":
        return torch.arange(-8.0, 8.0, device=device)
    bytes_ = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    dtype = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    return bytes_.view(dtype).float().to(device)


@lru_cache
def decoders(
    kind: str, table: tuple[float, ...], dtype: torch.dtype, scaled: bool = False, shifted: bool = False
) -> tuple[str, ...]:
    """A plane each: PTX that makes two numbers of dtype (bf16 or fp16) in $0 of two words in $1.

    scaled: times ($2 + $3), the scale as a number of dtype and what that leaves of it; shifted: plus ($4 + $5).
    """
    make = _tables(table, dtype) if kind == "table" else _BF16[kind] if dtype == torch.bfloat16 else _FP16[kind]
    pair, end = "bf16x2" if dtype == torch.bfloat16 else "f16x2", ""
    if scaled and shifted:  # small numbers are left where large ones cancel: rounded then, not before
        end = f"fma.rn.{pair} a, v, $2, $4; fma.rn.{pair} b, v, $3, $5; add.rn.{pair} $0, a, b; "
    elif scaled:
        end = f"mul.rn.{pair} a, v, $3; fma.rn.{pair} $0, v, $2, a; "

    def whole(plane: int) -> str:
        return make(plane).replace("$0", "v") if scaled else make(plane)

    return tuple(f"{{ .reg .b32 a, b, c, d, e, v; {whole(plane)} {end}}}" for plane in range(planes_of(kind)))


class Unscaled(NamedTuple):
    """Decoders of fewer instructions, whose numbers are to be multiplied by 2^exponent: by what comes after them."""

    asm: tuple[str, ...]  # as of `decoders`
    exponent: int


@lru_cache
def unscaled_decoders(kind: str, table: tuple[float, ...], dtype: torch.dtype) -> Unscaled:
    """The floats' bits at their places, and no more: their exponents count from elsewhere. What is small there is
    subnormal, which tensor cores take as it is."""
    if (kind, dtype) not in _UNSCALED:
        return Unscaled(decoders(kind, table, dtype), 0)
    make, exponent = _UNSCALED[kind, dtype]
    return Unscaled(tuple(f"{{ .reg .b32 a, b, c; {make(plane)} }}" for plane in range(planes_of(kind))), exponent)


@lru_cache
def times_power_of_two(exponent: int) -> str:
    """PTX: two numbers of bf16 $1 times 2^exponent, -127 < exponent < 128."""
    return f"{{ .reg .b32 a; mov.b32 a, {_twice(exponent + 127 << 7)}; mul.rn.bf16x2 $0, $1, a; }}"


@triton.jit
def decoded(words, ASM: tl.constexpr, dtype: tl.constexpr):
    """A tile of int16 words → the numbers of one plane, in dtype: bf16 or fp16."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def scaled(words, scale, ASM: tl.constexpr, dtype: tl.constexpr):
    """The same times scale, fp32 [rows]."""
    high = scale.to(dtype)
    low = (scale - high.to(tl.float32)).to(dtype)
    _, high = tl.broadcast(words, high[:, None])
    _, low = tl.broadcast(words, low[:, None])
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [words, high.to(tl.int16, bitcast=True), low.to(tl.int16, bitcast=True)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [words, high.to(tl.int16, bitcast=True), low.to(tl.int16, bitcast=True)],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def scaled_and_shifted(words, scale, shift, ASM: tl.constexpr, dtype: tl.constexpr):
    """The same times scale, less shift, fp32 [rows]."""
    high = scale.to(dtype)
    low = (scale - high.to(tl.float32)).to(dtype)
    high_shift = (-shift).to(dtype)
    low_shift = (-shift - high_shift.to(tl.float32)).to(dtype)
    _, high = tl.broadcast(words, high[:, None])
    _, low = tl.broadcast(words, low[:, None])
    _, high_shift = tl.broadcast(words, high_shift[:, None])
    _, low_shift = tl.broadcast(words, low_shift[:, None])
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r,r,r",
            [words, high.to(tl.int16, bitcast=True), low.to(tl.int16, bitcast=True),
             high_shift.to(tl.int16, bitcast=True), low_shift.to(tl.int16, bitcast=True)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r,r,r,r",
            [words, high.to(tl.int16, bitcast=True), low.to(tl.int16, bitcast=True),
             high_shift.to(tl.int16, bitcast=True), low_shift.to(tl.int16, bitcast=True)],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip


def _shift(source: str, target: str, right: int) -> str:
    """By so many bits; to the left where it is negative. Halves spill into each other: a mask follows."""
    if right == 0:
        return f"mov.b32 {target}, {source};"
    return f"shr.u32 {target}, {source}, {right};" if right > 0 else f"shl.b32 {target}, {source}, {-right};"


def _twice(half: int) -> str:
    return f"0x{half:04x}{half:04x}"


# Truth tables of lop3: (a & b) | c and (a & b) ^ c.
AND_OR, AND_XOR = "0xea", "0x6a"


def _int4(magic: int, offset: int, kind: str) -> Callable[[int], str]:
    """A code in the lowest bits of a float that has room for it there, less what that float is by itself."""
    return lambda plane: (
        f"{_shift('$1', 'a', 4 * plane)} lop3.b32 a, a, {_twice(0xF)}, {_twice(magic)}, {AND_OR}; "
        f"mov.b32 b, {_twice(offset)}; sub.{kind} $0, a, b;"
    )


def _int8_bf16(plane: int) -> str:
    """(128 + the seven lower bits) - (128 + 128 where the sign is set), for bf16 has room for seven."""
    return (
        f"{_shift('$1', 'a', 8 * plane)} lop3.b32 b, a, {_twice(0x7F)}, {_twice(0x4300)}, {AND_OR}; "
        f"lop3.b32 c, a, {_twice(0x80)}, {_twice(0x4300)}, {AND_OR}; sub.bf16x2 $0, b, c;"
    )


def _int8_fp16(plane: int) -> str:
    """1024 + 128 + code, less 1152: the sign turned over makes the code 128 more."""
    return (
        f"{_shift('$1', 'a', 8 * plane)} lop3.b32 a, a, {_twice(0xFF)}, {_twice(0x6480)}, {AND_XOR}; "
        f"mov.b32 b, {_twice(0x6480)}; sub.f16x2 $0, a, b;"
    )


def _float_bits(top: int, to: int, mask: int) -> Callable[[int], str]:
    """A float of fewer bits: its sign to bit 15, what follows it, below `mask`, to where the wider float has these
    bits. top: the sign's bit in plane 0, to: how far below the sign the rest has to move."""

    def make(plane: int) -> str:
        up = 15 - top * (plane + 1) - plane  # from the sign's bit to 15: of nibbles 3, 7, 11, 15, of bytes 7, 15
        sign = f"{_shift('$1', 'a', -up)} and.b32 b, a, {_twice(0x8000)};"
        return f"{sign} {_shift('$1', 'c', to - up)} lop3.b32 $0, c, {_twice(mask)}, b, {AND_OR};"

    return make


def _float(top: int, to: int, mask: int, factor: int, kind: str) -> Callable[[int], str]:
    """The same times what their exponents count from differently."""
    bits = _float_bits(top, to, mask)
    return lambda plane: f"{bits(plane).replace('$0', 'c')} mov.b32 d, {_twice(factor)}; mul.{kind} $0, c, d;"


def _e2m1_bf16_bits(plane: int) -> str:
    """_float_bits(3, 6, 0x01C0) by a product, which moves the sign and the rest at once, and which other units than
    those of shifts and masks compute."""
    up = 4 * (1 - plane % 2)
    return (
        f"{_shift('$1', 'a', 8 * (plane // 2))} and.b32 a, a, {_twice(0xF0 >> up)}; "
        f"mul.lo.u32 a, a, {0x104 << up:#x}; and.b32 $0, a, {_twice(0x81C0)};"
    )


_BF16 = {
    "int4": _int4(0x4300, 0x4308, "bf16x2"),  # 128 + q, 136
    "int8": _int8_bf16,
    "e4m3": _float(7, 4, 0x07F0, 0x7B80, "bf16x2"),  # · 2^120
    "e5m2": _float(7, 3, 0x0FE0, 0x7780, "bf16x2"),  # · 2^112
    "e2m1": _float(3, 6, 0x01C0, 0x7E80, "bf16x2"),  # · 2^126
}
_FP16 = {
    "int4": _int4(0x6400, 0x6408, "f16x2"),  # 1024 + q, 1032
    "int8": _int8_fp16,
    "e4m3": _float(7, 1, 0x3F80, 0x5C00, "f16x2"),  # · 2^8
    "e5m2": _float(7, 0, 0x7F00, 0x3C00, "f16x2"),
    "e2m1": _float(3, 3, 0x0E00, 0x7400, "f16x2"),  # · 2^14
}
_UNSCALED = {
    ("e4m3", torch.bfloat16): (_float_bits(7, 4, 0x07F0), 120),
    ("e2m1", torch.bfloat16): (_e2m1_bf16_bits, 126),
    ("e4m3", torch.float16): (_float_bits(7, 1, 0x3F80), 8),
    ("e2m1", torch.float16): (_float_bits(3, 3, 0x0E00), 14),
}


def _tables(table: tuple[float, ...], dtype: torch.dtype) -> Callable[[int], str]:
    """Looked up by `prmt`, which picks bytes out of eight: lower and upper bytes of the numbers, of codes below 8 and
    of the others, then whichever is right."""
    halves = torch.tensor(table).to(dtype).view(torch.int16).tolist()
    raw = struct.pack("<16h", *halves)
    lower, upper = (struct.unpack("<4I", raw[first::2]) for first in (0, 1))

    def pick(target: str, words: Sequence[int]) -> str:
        return f"mov.b32 {target}, {words[0]:#x}; prmt.b32 {target}, {target}, {words[1]:#x}, b;"

    def make(plane: int) -> str:
        # b: the places of two lower bytes among eight, a: all ones in a half whose code is 8 or more.
        places = (
            f"{_shift('$1', 'a', 4 * plane)} and.b32 b, a, {_twice(7)}; shr.u32 c, b, 8; or.b32 b, b, c; "
            f"shr.u32 a, a, 3; and.b32 a, a, {_twice(1)}; mul.lo.u32 a, a, 0xffff; "
        )

        def half(target: str, first: int) -> str:
            """Numbers of codes first to first + 7."""
            at = first // 4
            return (
                f"{pick('c', upper[at : at + 2])} and.b32 c, c, {_twice(0xFF)}; shl.b32 c, c, 8; "
                f"{pick(target, lower[at : at + 2])} lop3.b32 {target}, {target}, {_twice(0xFF)}, c, {AND_OR}; "
            )

        # (e & a) | (d & ~a)
        return f"{places} {half('d', 0)} {half('e', 8)} lop3.b32 $0, a, e, d, 0xca;"

    return make
