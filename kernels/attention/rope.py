"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), alone and fused with the per-head norm before it: in
plain torch, and as the part of the kernel of rope_kv.py that one program does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..norm.activation import magnitude
from ..norm.norm import normalize, rms_scale
from .kv_fp8 import encode_triton, token_scale


def apply_rope(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """As apply_rope_torch, on a GPU in one launch."""
    if query.is_cuda:
        apply_rope_triton(query, key, positions, cos_sin)
    else:
        apply_rope_torch(query, key, positions, cos_sin)


def apply_rope_triton(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    if not len(query):
        return
    half = cos_sin.shape[1] // 2
    both = _one_view(query, key)
    for heads in (query, key) if both is None else (both,):
        num_tokens, num_heads, dim = heads.shape
        rope_kernel[num_tokens, triton.cdiv(num_heads, HEADS)](
            heads, heads.stride(0), heads.stride(1), num_heads, positions, cos_sin, DIM=dim, HALF=half,
            BLOCK=triton.next_power_of_2(half), TAIL_BLOCK=triton.next_power_of_2(max(1, dim - 2 * half)), GROUP=HEADS,
            num_warps=4,
        )  # fmt: skip


def apply_rope_torch(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotates the heads of query and key in place, in fp32, rounded once.

    query [T, H, D] and key [T, KV, D], same dtype, last dimension contiguous (views into a fused projection are fine).
    positions int32 [T], each below cos_sin.shape[0]; padding tokens hold 0.
    cos_sin fp32 [max_pos, rot_dim] = cat(cos, sin) of rot_dim/2 angles each. Pairs are (i, i + rot_dim/2), the NeoX
    order of Hugging Face's Llama; dimensions from rot_dim on are left alone (partial rotary).
    """
    cos, sin = look_up_angles(cos_sin, positions)
    both = _one_view(query, key)
    for heads in (query, key) if both is None else (both,):
        rotate_pairs(heads, heads, cos, sin)


def qk_norm_rope_torch(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    """RMSNorm over each head of query (weight q_weight [D]) and key (k_weight [D]), then apply_rope_torch, in place.

    Nothing is rounded between norm and rotation.
    """
    cos, sin = look_up_angles(cos_sin, positions)
    for heads, weight in ((query, q_weight), (key, k_weight)):
        normed = normalize(heads.float(), weight, eps)
        rotate_pairs(normed, heads, cos, sin)
        rot_dim = cos_sin.shape[1]
        if rot_dim < heads.shape[-1]:
            heads[..., rot_dim:] = normed[..., rot_dim:]


_looked_up: tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None


def look_up_angles(cos_sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, rot/2] of these positions. All layers of a step ask for the same: the last answer is kept."""
    global _looked_up
    last = _looked_up
    if last is not None and last[0] is cos_sin and last[1] is positions:
        return last[2]
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    if positions.is_inference():  # made for one step and never written again
        _looked_up = cos_sin, positions, (cos, sin)
    return cos, sin


def rotate_pairs(source: torch.Tensor, target: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    first, second = source[..., :half].float(), source[..., half : 2 * half].float()
    rotated_first = (first * cos).addcmul_(second, sin, value=-1)
    rotated_second = (second * cos).addcmul_(first, sin)
    target[..., :half] = rotated_first
    target[..., half : 2 * half] = rotated_second


def _one_view(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """query and key as one [T, H + KV, D] view when key's heads follow query's in memory: half the operators."""
    num_tokens, num_heads, dim = query.shape
    if query.stride() != key.stride() or key.data_ptr() != query.data_ptr() + num_heads * dim * query.element_size():
        return None
    if query.stride(1) != dim or query.untyped_storage().data_ptr() != key.untyped_storage().data_ptr():
        return None
    return query.as_strided((num_tokens, num_heads + key.shape[1], dim), query.stride(), query.storage_offset())


HEADS = 16  # of a token, that one program turns


@triton.jit
def rope_kernel(
    heads_ptr, token_stride, head_stride, num_heads, positions_ptr, cos_sin_ptr,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP heads of one token, in place."""
    token = tl.program_id(0)
    lane = tl.arange(0, BLOCK)[None, :] + tl.zeros([GROUP, 1], tl.int32)
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + lane
    cos = tl.load(angles, mask=lane < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=lane < HALF, other=0.0)
    heads = heads_ptr + token.to(tl.int64) * token_stride
    rotate_heads(
        heads, head_stride, heads, head_stride, tl.program_id(1) * GROUP, num_heads, cos, sin, heads, 0.0, heads, 0,
        DIM, HALF, BLOCK, TAIL_BLOCK, GROUP, False, 0,
    )  # fmt: skip


@triton.jit
def rotate_heads(
    heads_ptr, head_stride, out_ptr, out_head_stride, start, num_heads, cos, sin, weight_ptr, eps,
    scale_ptr, scale_head_stride,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    NORM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Heads start to start + GROUP of one token, normed if NORM, rotated by cos and sin [GROUP, BLOCK], and stored at
    out_ptr (which may be heads_ptr): rounded to the type of the heads, then converted to that of out_ptr.

    SCALES: of kv_fp8.py, 0 for none; scale_ptr is the token's, where they are read (1) or written (2)."""
    head = start + tl.arange(0, GROUP)[:, None]
    source = heads_ptr + head * head_stride
    target = out_ptr + head.to(tl.int64) * out_head_stride
    # Angles and weights are loaded once for every head, as whole tiles: a row broadcast afterwards would have to travel
    # through shared memory into the heads' layout.
    lane = tl.arange(0, BLOCK)[None, :] + tl.zeros([GROUP, 1], tl.int32)
    mask = (head < num_heads) & (lane < HALF)
    first = tl.load(source + lane, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + lane, mask=mask, other=0.0).to(tl.float32)
    if DIM > 2 * HALF:
        tail_lane = 2 * HALF + tl.arange(0, TAIL_BLOCK)[None, :] + tl.zeros([GROUP, 1], tl.int32)
        tail_mask = (head < num_heads) & (tail_lane < DIM)
        tail = tl.load(source + tail_lane, mask=tail_mask, other=0.0).to(tl.float32)
    if NORM:
        first_weight = tl.load(weight_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HALF + lane, mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, axis=1)
        if DIM > 2 * HALF:
            squares += tl.sum(tail * tail, axis=1)
        scale = rms_scale(squares, DIM, eps)[:, None]
        first *= scale * first_weight
        second *= scale * second_weight
        if DIM > 2 * HALF:
            tail *= scale * tl.load(weight_ptr + tail_lane, mask=tail_mask, other=0.0).to(tl.float32)
            # A tail smaller than the program is held by several threads: all must have read it before one writes.
            tl.debug_barrier()
    model_dtype: tl.constexpr = heads_ptr.dtype.element_ty
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    turned_first = (first * cos - second * sin).to(model_dtype)
    turned_second = (second * cos + first * sin).to(model_dtype)
    if SCALES == 0:
        if DIM > 2 * HALF:
            tl.store(target + tail_lane, tail.to(model_dtype).to(out_dtype), mask=tail_mask)
        tl.store(target + lane, turned_first.to(out_dtype), mask=mask)
        tl.store(target + HALF + lane, turned_second.to(out_dtype), mask=mask)
    else:
        first = turned_first.to(tl.float32)
        second = turned_second.to(tl.float32)
        if DIM > 2 * HALF:
            tail = tail.to(model_dtype).to(tl.float32)
        scale_ptrs = scale_ptr + head * scale_head_stride
        if SCALES == 1:
            code_scale = tl.load(scale_ptrs, mask=head < num_heads, other=1.0)
        else:
            largest = tl.max(tl.maximum(magnitude(first), magnitude(second)), axis=1)
            if DIM > 2 * HALF:
                largest = tl.maximum(largest, tl.max(magnitude(tail), axis=1))
            code_scale = token_scale(largest, out_dtype)[:, None]
            tl.store(scale_ptrs, code_scale, mask=head < num_heads)
        if DIM > 2 * HALF:
            tl.store(target + tail_lane, encode_triton(tail, code_scale, out_dtype), mask=tail_mask)
        tl.store(target + lane, encode_triton(first, code_scale, out_dtype), mask=mask)
        tl.store(target + HALF + lane, encode_triton(second, code_scale, out_dtype), mask=mask)
