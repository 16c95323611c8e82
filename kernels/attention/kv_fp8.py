"""Keys and values of 8 bits: a code of a float type times a scale, fp32, of the token and head.

The scales of a layer are a tensor [num_blocks, page, KV] like its pages. Either it is a plane of the cache, written
with each token (its head's largest value becomes the largest code), or it is one number a head, which all slots share:
strides of 0. Codes are rounded to nearest even and saturate; NaN stays NaN.

Where a key is not finite and has no scale of its own to say so, its value's codes are those of NaN: of values, decode
attention keeps NaN at no cost (unpack_values), of keys it would cost instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..norm.activation import of_magnitude

# float8 type → its largest number
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SMALLEST_AMAX = tl.constexpr(2.0**-100)  # of a head that is all zeros: a scale that is no zero
NO_SCALES, FIXED_SCALES, TOKEN_SCALES = 0, 1, 2


def fixed_scales(scales: torch.Tensor, num_blocks: int, page: int) -> torch.Tensor:
    """fp32 [KV] → [num_blocks, page, KV], the same for all slots."""
    return scales.as_strided((num_blocks, page, len(scales)), (0, 0, 1))


def scale_kind(scales: torch.Tensor | None) -> int:
    """Which of the three; for kernels, a constant."""
    if scales is None:
        return NO_SCALES
    return TOKEN_SCALES if scales.stride(0) else FIXED_SCALES


def encode(heads: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """heads [..., D] and scales [...] → codes [..., D] of this float8 type."""
    most = LARGEST[dtype]
    return (heads.float() / scales.unsqueeze(-1)).clamp_(-most, most).to(dtype)


def token_scales(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """heads [..., D] → fp32 [...]: with which the largest element becomes the largest code."""
    return heads.float().abs().amax(-1).clamp_(min=SMALLEST_AMAX.value) / LARGEST[dtype]


def decode(codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """codes [..., D] and scales [...] → [..., D] of `dtype`, rounded once; codes of no scales as they are."""
    if scales is None:
        return codes
    return (codes.float() * scales.unsqueeze(-1)).to(dtype)


def tl_code(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a float8 type."""
    return {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}[dtype]


def packs(device: torch.device) -> bool:
    """Whether kernels there may have instructions of their own: not in Triton's interpreter."""
    return device.type == "cuda"


@triton.jit
def largest_code(dtype: tl.constexpr):
    return 448.0 if dtype == tl.float8e4nv else 57344.0


@triton.jit
def encode_triton(values, scales, dtype: tl.constexpr):
    """`encode` of fp32 values, and of scales that can be broadcast to them. Rounded by hand, so that the cast has
    nothing left to round: Triton's interpreter does not round it to even."""
    values = tl.div_rn(values, scales + tl.zeros_like(values))
    MANTISSA: tl.constexpr = 3 if dtype == tl.float8e4nv else 2
    DROPPED: tl.constexpr = 23 - MANTISSA
    # Steps of the smallest codes are as small: 2^-9 and 2^-16.
    MAGIC: tl.constexpr = 1.5 * 2**14 if dtype == tl.float8e4nv else 1.5 * 2**7
    SMALL: tl.constexpr = 2.0**-6 if dtype == tl.float8e4nv else 2.0**-14
    most = largest_code(dtype)
    values = tl.where(values > most, most, tl.where(values < -most, -most, values))  # NaN is neither
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) & -(1 << DROPPED)
    rounded = tl.where(tl.abs(values) < SMALL, (values + MAGIC) - MAGIC, bits.to(tl.float32, bitcast=True))
    # Rounding may have carried NaN's bits into its sign.
    return tl.where(values != values, float("nan"), rounded).to(dtype)


@triton.jit
def as_numbers(codes, dtype: tl.constexpr):
    """Codes, or numbers, in `dtype`, exactly. Those of e5m2 by way of fp16, of which they are the upper halves: Triton
    takes them to bf16 by a way on which NaN becomes a number."""
    if codes.dtype == tl.float8e5:
        codes = codes.to(tl.float16)
    return codes.to(dtype)


@triton.jit
def token_scale(largest, dtype: tl.constexpr):
    """`token_scales` of the largest magnitudes."""
    amax = tl.maximum(of_magnitude(largest), SMALLEST_AMAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.div_rn(amax, tl.zeros_like(amax) + largest_code(dtype))


@triton.jit
def value_unit(code: tl.constexpr):
    """What `unpack_values` multiplies by, as a constant."""
    return 144.0 if code == tl.float8e4nv else 1.0


@triton.jit
def unpack_values(words, code: tl.constexpr):
    """int16 words of two codes each → the numbers of even and of odd places times `value_unit`, fp16, exactly; NaN is
    infinite or NaN.

    Two words at once, as instructions of their own, in as many as `unpack_words` has. The largest number of e4m3, 448,
    becomes 64,512, and what would be 480, its NaN, is more than fp16 holds. Codes of e5m2 are the upper halves of fp16.
    """
    if code == tl.float8e4nv:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sign, low, zero, power;
            mov.b32 zero, 0x80008000;
            mov.b32 power, 0x78807880;
            shl.b32 sign, $2, 8;
            and.b32 sign, sign, 0x80008000;
            shl.b32 low, $2, 7;
            lop3.b32 low, low, 0x3f803f80, sign, 0xea;
            fma.rn.f16x2 $0, low, power, zero;
            and.b32 sign, $2, 0x80008000;
            shr.u32 low, $2, 1;
            lop3.b32 low, low, 0x3f803f80, sign, 0xea;
            fma.rn.f16x2 $1, low, power, zero;
            }""",
            "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even, odd = tl.inline_asm_elementwise(
            """{
            shl.b32 $0, $2, 8;
            and.b32 $0, $0, 0xff00ff00;
            and.b32 $1, $2, 0xff00ff00;
            }""",
            "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd


@triton.jit
def unpack_words(words, dtype: tl.constexpr, code: tl.constexpr, PACKED: tl.constexpr):
    """int16 words of two codes each → the codes of even and of odd places, in `dtype`, exact but for NaN, which
    is a number above the largest one: 480 of e4m3.

    Two planes rather than one tensor: nothing has to change places between threads. PACKED: two words at once in bf16,
    as instructions of their own. Sign and magnitude are moved to where bf16 has them, less the difference of the
    exponents' offsets, which a multiplication adds: also right for the smallest, which have no leading one.
    """
    if PACKED:
        if code == tl.float8e4nv:
            even, odd = tl.inline_asm_elementwise(
                """{
                .reg .b32 sign, low, zero, power;
                mov.b32 zero, 0x80008000;
                mov.b32 power, 0x7b807b80;
                shl.b32 sign, $2, 8;
                and.b32 sign, sign, 0x80008000;
                shl.b32 low, $2, 4;
                lop3.b32 low, low, 0x07f007f0, sign, 0xea;
                fma.rn.bf16x2 $0, low, power, zero;
                and.b32 sign, $2, 0x80008000;
                shr.u32 low, $2, 4;
                lop3.b32 low, low, 0x07f007f0, sign, 0xea;
                fma.rn.bf16x2 $1, low, power, zero;
                }""",
                "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            even, odd = tl.inline_asm_elementwise(
                """{
                .reg .b32 sign, low, zero, power;
                mov.b32 zero, 0x80008000;
                mov.b32 power, 0x77807780;
                shl.b32 sign, $2, 8;
                and.b32 sign, sign, 0x80008000;
                shl.b32 low, $2, 5;
                lop3.b32 low, low, 0x0fe00fe0, sign, 0xea;
                fma.rn.bf16x2 $0, low, power, zero;
                and.b32 sign, $2, 0x80008000;
                shr.u32 low, $2, 3;
                lop3.b32 low, low, 0x0fe00fe0, sign, 0xea;
                fma.rn.bf16x2 $1, low, power, zero;
                }""",
                "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        even = (words & 0xFF).to(tl.uint8).to(code, bitcast=True).to(dtype)
        odd = ((words >> 8) & 0xFF).to(tl.uint8).to(code, bitcast=True).to(dtype)
    return even, odd
