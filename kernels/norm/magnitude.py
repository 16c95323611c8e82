"""Absolute values of which a maximum is NaN where one of them is."""

from __future__ import annotations

import triton
import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)  # magnitude of infinity, below which is every number


@triton.jit
def magnitude(x):
    """The bits of |x|, fp32 → int32: in the order of the numbers, and NaN is above them all, where a GPU's maxima of
    floats pass over it."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def of_magnitude(bits):
    """|x| again."""
    return bits.to(tl.float32, bitcast=True)
