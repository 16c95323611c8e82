"""A short convolution between two gates, as LFM2 has it: the public function and its twin, and decodes in one kernel.

Of products B, C and x a token: h = B · x, rounded; y = C · (the convolution of h). Of a request the newest inputs h are
kept, and nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from .short_conv import short_conv_torch, short_conv_triton, write_ring_torch, write_ring_triton
from .step import StateStep

_BLOCK = 128  # channels of a program


def gated_conv(products: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, step: StateStep) -> Tensor:
    """products [T, 3 · channels], B, C and x one behind the other, rows of any stride → [T, channels] in their dtype,
    undefined at padding tokens.

    weight [channels, W], bias [channels] or None. ring [num_slots, R, channels], contiguous, is read and written as
    StateStep says.
    """
    return (gated_conv_triton if products.is_cuda else gated_conv_torch)(products, weight, bias, ring, step)


def gated_conv_torch(products: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, step: StateStep) -> Tensor:
    before, behind, x = products.chunk(3, 1)
    inputs = before * x
    out = short_conv_torch(inputs, weight, ring, step, bias, None, behind)
    write_ring_torch(inputs, None, ring, step, weight.shape[1])
    return out


def gated_conv_triton(products: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, step: StateStep) -> Tensor:
    """One launch for decodes, which write their rings themselves, and three for prompts."""
    channels, width = weight.shape
    out = torch.empty(len(products), channels, dtype=products.dtype, device=products.device)
    if rows := step.num_decode_rows:
        _gated_conv_kernel[(triton.cdiv(channels, _BLOCK), rows)](
            products, weight, weight if bias is None else bias, ring, out,
            step.slots, step.start, step.state_len, step.snap_at, step.snap_slot, step.query_start, products.stride(0),
            CHANNELS=channels, BLOCK=_BLOCK, WIDTH=width, RING=ring.shape[1], QUERY_LEN=step.decode_query_len,
            BIAS=bias is not None, num_warps=1, **pdl_options(products, rows * step.decode_query_len),
        )  # fmt: skip
    if step.prompts.num_rows:
        before, behind, x = products.chunk(3, 1)
        inputs = before * x
        short_conv_triton(inputs, weight, ring, step.prompts, bias, None, behind, out)
        write_ring_triton(inputs, None, ring, step.prompts, width)
    return out


@triton.jit
def _gated_conv_kernel(
    products_ptr, weight_ptr, bias_ptr, ring_ptr, out_ptr,
    slots_ptr, start_ptr, state_len_ptr, snap_at_ptr, snap_slot_ptr, query_start_ptr, products_token,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, QUERY_LEN: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    slot = tl.load(slots_ptr + row).to(tl.int64)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    is_padding = (slot == 0) | (tl.load(query_start_ptr + row + 1) == token)
    start = tl.load(start_ptr + row)
    snap_at = tl.load(snap_at_ptr + row)
    ring_ptr += channel
    own_ring = ring_ptr + slot * (RING * CHANNELS)
    if PDL:
        gdc_wait()
    if is_padding:
        return
    if (tl.load(state_len_ptr + row) < snap_at) & (snap_at <= start):
        target = ring_ptr + tl.load(snap_slot_ptr + row).to(tl.int64) * (RING * CHANNELS)
        for back in tl.static_range(1, WIDTH):
            place = ((snap_at - back) & (RING - 1)) * CHANNELS
            tl.store(target + place, tl.load(own_ring + place, mask=inside), mask=inside)
    products_ptr += token * products_token + channel
    for at in tl.static_range(QUERY_LEN):
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(WIDTH):
            back = WIDTH - 1 - tap  # before this token
            weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
            if back > at:
                position = start + at - back
                place = (position & (RING - 1)) * CHANNELS
                value = tl.load(own_ring + place, mask=inside & (position >= 0), other=0.0)
            else:
                own = products_ptr + (at - back) * products_token
                value = tl.load(own, mask=inside, other=0.0).to(tl.float32)
                value *= tl.load(own + 2 * CHANNELS, mask=inside, other=0.0).to(tl.float32)
                value = value.to(ring_ptr.dtype.element_ty)
                if back == 0:
                    # Behind what decodes read of it lies the room for what they write.
                    tl.store(own_ring + ((start + at) & (RING - 1)) * CHANNELS, value, mask=inside)
            total += value.to(tl.float32) * weight
        if BIAS:
            total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        gate = tl.load(products_ptr + at * products_token + CHANNELS, mask=inside, other=0.0).to(tl.float32)
        place = out_ptr + (token + at) * CHANNELS + channel
        tl.store(place, (total.to(dtype).to(tl.float32) * gate).to(dtype), mask=inside)
