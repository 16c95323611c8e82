"""Latent attention's step before attention, in one launch: rotate the queries' part, and write a token's one cache row.

The row is [latent | rotated key]: the compressed key and value, normed, and the part of the key that all heads share
(DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options
from ..norm.norm import normalize, rms_scale
from .rope import look_up_angles, rotate_pairs
from .rope_kv import write_kv_torch


def write_latent(
    rotary: torch.Tensor, rotated: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    cache: torch.Tensor, slots: torch.Tensor, weight: torch.Tensor, eps: float, interleaved: bool,
) -> None:  # fmt: skip
    """rotated = rotary, rotated; cache row slots[t] = [RMSNorm(latent[t, :R]) · weight | latent[t, R:], rotated]

    rotary and rotated [T, H, D], latent [T, R + D], of one dtype, last dimension contiguous (views are fine).
    positions int32 [T] and cos_sin fp32 [max_pos, D] as in apply_rope_torch.
    cache [num_blocks, page, 1, R + D]; a different dtype is converted. slots int32 or int64 [T]: block * page + offset;
    -1 stores nothing (padding). Slots must not repeat. weight [R].
    interleaved: pairs are (2i, 2i + 1) in rotary and latent, else (i, i + D/2), which they always are in the results:
    a score is a sum over pairs, in whatever order.
    All in fp32, rounded once to latent's dtype, then to the cache's.
    """
    write = write_latent_triton if latent.is_cuda else write_latent_torch
    write(rotary, rotated, latent, positions, cos_sin, cache, slots, weight, eps, interleaved)


def write_latent_torch(
    rotary: torch.Tensor, rotated: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    cache: torch.Tensor, slots: torch.Tensor, weight: torch.Tensor, eps: float, interleaved: bool,
) -> None:  # fmt: skip
    rank = len(weight)
    cos, sin = look_up_angles(cos_sin, positions)
    key = latent[:, None, rank:]
    if interleaved:
        rotary, key = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (rotary, key))
    rotate_pairs(rotary, rotated, cos, sin)
    rotated_key = torch.empty_like(key)
    rotate_pairs(key, rotated_key, cos, sin)
    value = normalize(latent[:, None, :rank].float(), weight, eps).to(latent.dtype)
    write_kv_torch(rotated_key, value, cache[..., rank:], cache[..., :rank], slots)


def write_latent_triton(
    rotary: torch.Tensor, rotated: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    cache: torch.Tensor, slots: torch.Tensor, weight: torch.Tensor, eps: float, interleaved: bool,
) -> None:  # fmt: skip
    """One program a token and group of query heads, and one a token for the cache's row."""
    num_tokens, num_heads, dim = rotary.shape
    if num_tokens == 0:
        return
    rank, half = len(weight), dim // 2
    group = min(16, triton.next_power_of_2(num_heads))
    _write_latent_kernel[(num_tokens, 1 + triton.cdiv(num_heads, group))](
        rotary, rotated, latent, positions, cos_sin, cache, slots, weight, num_heads,
        *rotary.stride()[:2], *rotated.stride()[:2], latent.stride(0), cos_sin.stride(0), *cache.stride()[:2], eps,
        PAGE=cache.shape[1], RANK=rank, RANK_PAD=triton.next_power_of_2(rank), HALF=half,
        HALF_PAD=triton.next_power_of_2(half), GROUP=group, INTERLEAVED=interleaved, num_warps=4,
        **pdl_options(latent, yields=True),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _write_latent_kernel(
    rotary_ptr, rotated_ptr, latent_ptr, positions_ptr, cos_sin_ptr, cache_ptr, slots_ptr, weight_ptr, num_heads,
    rotary_token, rotary_head, rotated_token, rotated_head, latent_token, table_stride, cache_block, cache_slot, eps,
    PAGE: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    GROUP: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * table_stride
    lane = tl.arange(0, HALF_PAD)[None, :]
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * GROUP + tl.arange(0, GROUP)[:, None].to(tl.int64)
        # Whole tiles from the start: a row broadcast afterwards would have to travel through shared memory.
        lanes = lane + tl.zeros([GROUP, 1], tl.int32)
        _rotate_rows(
            rotary_ptr + token * rotary_token + head * rotary_head,
            rotated_ptr + token * rotated_token + head * rotated_head,
            angle_ptr, lanes, (lanes < HALF) & (head < num_heads), latent_ptr.dtype.element_ty, HALF, INTERLEAVED,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            source = latent_ptr + token * latent_token
            target = cache_ptr + (slot // PAGE).to(tl.int64) * cache_block + slot % PAGE * cache_slot
            column = tl.arange(0, RANK_PAD)
            mask = column < RANK
            values = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
            gain = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            normed = values * rms_scale(tl.sum(values * values, 0), RANK, eps) * gain
            rounded = normed.to(latent_ptr.dtype.element_ty)
            tl.store(target + column, rounded.to(cache_ptr.dtype.element_ty), mask=mask)
            _rotate_rows(
                source + RANK, target + RANK, angle_ptr, lane, lane < HALF, latent_ptr.dtype.element_ty, HALF,
                INTERLEAVED,
            )  # fmt: skip


@triton.jit
def _rotate_rows(
    source, target, angle_ptr, lane, mask, model_dtype: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Rows of 2 · HALF elements, rotated, rounded to model_dtype, then converted to the target's."""
    step: tl.constexpr = 2 if INTERLEAVED else 1
    other: tl.constexpr = 1 if INTERLEAVED else HALF
    first = tl.load(source + lane * step, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + lane * step + other, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(angle_ptr + lane, mask=mask, other=0.0)
    sin = tl.load(angle_ptr + HALF + lane, mask=mask, other=0.0)
    out_dtype: tl.constexpr = target.dtype.element_ty
    tl.store(target + lane, (first * cos - second * sin).to(model_dtype).to(out_dtype), mask=mask)
    tl.store(target + HALF + lane, (second * cos + first * sin).to(model_dtype).to(out_dtype), mask=mask)
