"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), alone and fused with the per-head norm before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


def apply_rope(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotates the heads of query and key in place, in fp32, rounded once.

    query [T, H, D] and key [T, KV, D], same dtype, last dimension contiguous (views into a fused projection are fine).
    positions int32 [T], each below cos_sin.shape[0]; padding tokens hold 0.
    cos_sin fp32 [max_pos, rot_dim] = cat(cos, sin) of rot_dim/2 angles each. Pairs are (i, i + rot_dim/2), the NeoX
    order of Hugging Face's Llama; dimensions from rot_dim on are left alone (partial rotary).
    """
    if query.is_cuda:
        apply_rope_triton(query, key, positions, cos_sin)
    else:
        apply_rope_torch(query, key, positions, cos_sin)


def qk_norm_rope(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    """RMSNorm over each head of query (weight q_weight [D]) and key (k_weight [D]), then apply_rope, in place.

    Nothing is rounded between norm and rotation.
    """
    if query.is_cuda:
        qk_norm_rope_triton(query, key, positions, cos_sin, q_weight, k_weight, eps)
    else:
        qk_norm_rope_torch(query, key, positions, cos_sin, q_weight, k_weight, eps)


def apply_rope_torch(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    cos, sin = _look_up(cos_sin, positions)
    both = _one_view(query, key)
    for heads in (query, key) if both is None else (both,):
        _rotate(heads, heads, cos, sin)


def qk_norm_rope_torch(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    cos, sin = _look_up(cos_sin, positions)
    for heads, weight in ((query, q_weight), (key, k_weight)):
        normed = F.rms_norm(heads.float(), weight.shape, weight.float(), eps)
        _rotate(normed, heads, cos, sin)
        rot_dim = cos_sin.shape[1]
        if rot_dim < heads.shape[-1]:
            heads[..., rot_dim:] = normed[..., rot_dim:]


_looked_up: tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None


def _look_up(cos_sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, rot/2] of these positions. All layers of a step ask for the same: the last answer is kept."""
    global _looked_up
    last = _looked_up
    if last is not None and last[0] is cos_sin and last[1] is positions:
        return last[2]
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    if positions.is_inference():  # made for one step and never written again
        _looked_up = cos_sin, positions, (cos, sin)
    return cos, sin


def _rotate(source: torch.Tensor, target: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
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


def apply_rope_triton(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    _launch(query, key, positions, cos_sin, query, key, 0.0, norm=False)


def qk_norm_rope_triton(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    _launch(query, key, positions, cos_sin, q_weight, k_weight, eps, norm=True)


def _launch(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, norm: bool,
) -> None:  # fmt: skip
    num_tokens, num_heads, dim = query.shape
    if num_tokens == 0:
        return
    half = cos_sin.shape[1] // 2
    block = triton.next_power_of_2(half)
    # Eight heads a program: as many as the usual number of key heads, so that no lane idles.
    group = min(8, triton.next_power_of_2(max(num_heads, key.shape[1])))
    blocks = triton.cdiv(num_heads, group) + triton.cdiv(key.shape[1], group)
    _rope_kernel[(num_tokens, blocks)](
        query, key, positions, cos_sin, q_weight, k_weight, num_heads, key.shape[1],
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), cos_sin.stride(0), eps,
        DIM=dim, HALF=half, BLOCK=block, TAIL_BLOCK=triton.next_power_of_2(max(1, dim - 2 * half)), GROUP=group,
        NORM=norm, num_warps=min(8, max(1, group * block // 256)),
    )  # fmt: skip


@triton.jit
def _rope_kernel(
    query_ptr, key_ptr, positions_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr, num_heads, num_key_heads,
    query_token, query_head, key_token, key_head, table_stride, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks = tl.cdiv(num_heads, GROUP)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * table_stride
    if block < query_blocks:
        place = query_ptr + token * query_token
        rotate_heads(
            place, query_head, place, query_head, block * GROUP, num_heads, angle_ptr, q_weight_ptr, eps,
            DIM, HALF, BLOCK, TAIL_BLOCK, GROUP, NORM,
        )  # fmt: skip
    else:
        place = key_ptr + token * key_token
        rotate_heads(
            place, key_head, place, key_head, (block - query_blocks) * GROUP, num_key_heads, angle_ptr, k_weight_ptr,
            eps, DIM, HALF, BLOCK, TAIL_BLOCK, GROUP, NORM,
        )  # fmt: skip


@triton.jit
def rotate_heads(
    heads_ptr, head_stride, out_ptr, out_head_stride, start, num_heads, angle_ptr, weight_ptr, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Heads start to start + GROUP of one token, normed if NORM, rotated, and stored at out_ptr (which may be
    heads_ptr): rounded to the type of the heads, then converted to that of out_ptr."""
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
    cos = tl.load(angle_ptr + lane, mask=mask, other=0.0)
    sin = tl.load(angle_ptr + HALF + lane, mask=mask, other=0.0)
    if NORM:
        first_weight = tl.load(weight_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HALF + lane, mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, axis=1)
        if DIM > 2 * HALF:
            squares += tl.sum(tail * tail, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        first *= scale * first_weight
        second *= scale * second_weight
        if DIM > 2 * HALF:
            tail *= scale * tl.load(weight_ptr + tail_lane, mask=tail_mask, other=0.0).to(tl.float32)
            # A tail smaller than the program is held by several threads: all must have read it before one writes.
            tl.debug_barrier()
    model_dtype: tl.constexpr = heads_ptr.dtype.element_ty
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    if DIM > 2 * HALF:
        tl.store(target + tail_lane, tail.to(model_dtype).to(out_dtype), mask=tail_mask)
    tl.store(target + lane, (first * cos - second * sin).to(model_dtype).to(out_dtype), mask=mask)
    tl.store(target + HALF + lane, (second * cos + first * sin).to(model_dtype).to(out_dtype), mask=mask)
