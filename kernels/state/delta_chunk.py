"""Delta nets of prompts: what a chunk of 64 tokens gives without the state before it, all chunks at once.

With the names of delta_net.py, of each chunk and value head: U = T (β v) in v's place, W = T (β k exp(G)), the shares
P = lower(q kᵀ ⊙ exp(Gi - Gj)) of its own values in its outputs, and G. T is the inverse of a unit lower triangle. It is
made in fp32 from blocks of 16 x 16 on, each half of a block from the halves of the halves: [[X, 0], [Z, Y]]⁻¹ =
[[X⁻¹, 0], [-Y⁻¹ Z X⁻¹, Y⁻¹]]. Powers of the triangle would be simpler, and lose all digits where keys repeat.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .delta_parts import CHUNK, chunk_at, log_decay, sigmoid
from .short_conv import num_places
from .step import StateStep


def solve_chunks(
    keys: Tensor, values: Tensor, gates: Tensor, A_log: Tensor, dt_bias: Tensor, step: StateStep, weights: Tensor,
    shares: Tensor, decays: Tensor,
) -> None:  # fmt: skip
    """keys [T, 2 · Hk · K]: queries and keys, unit vectors. values [T, Hv, V]: overwritten by U. weights [T, Hv, K]: W;
    shares [T, Hv, 64]: P; decays fp32 [T, Hv]: G. All contiguous, but gates."""
    tokens, heads, key_dim = weights.shape
    places = num_places(step, tokens)
    if not places:
        return
    _chunk_kernel[(heads, places)](
        keys, values, gates, A_log, dt_bias, weights, shares, decays,
        step.query_start, step.start, step.slots, step.num_rows, step.num_rows.bit_length(),
        gates.stride(0), key_dim**-0.5,
        KEY_HEADS=keys.shape[1] // (2 * key_dim), HEADS=heads, K=key_dim, V=values.shape[2], CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _diagonal(matrix, SIZE: tl.constexpr):
    """The blocks [n / SIZE, SIZE, SIZE] on the diagonal of matrix [n, n]."""
    COUNT: tl.constexpr = matrix.shape[0] // SIZE
    blocks = tl.reshape(matrix, (COUNT, SIZE, COUNT, SIZE))
    block = tl.arange(0, COUNT)
    same = block[:, None, None, None] == block[None, None, :, None]
    return tl.sum(tl.where(same, blocks, 0.0), 2)


@triton.jit
def _doubled(inverse, matrix):
    """The inverses [n / 2, 2 s, 2 s] of the diagonal blocks of matrix, of those [n, s, s] of blocks half as large."""
    HALF: tl.constexpr = inverse.shape[0] // 2
    SIZE: tl.constexpr = inverse.shape[1]
    second = tl.arange(0, 2)
    pairs = tl.reshape(inverse, (HALF, 2, SIZE, SIZE))
    is_second = (second == 1)[None, :, None, None]
    upper, lower = tl.sum(tl.where(is_second, 0.0, pairs), 1), tl.sum(tl.where(is_second, pairs, 0.0), 1)
    quarters = tl.reshape(_diagonal(matrix, 2 * SIZE), (HALF, 2, SIZE, 2, SIZE))
    below = (second == 1)[None, :, None, None, None] & (second == 0)[None, None, None, :, None]
    between = tl.sum(tl.sum(tl.where(below, quarters, 0.0), 3), 1)
    corner = tl.dot(lower, tl.dot(between, upper, input_precision="ieee"), input_precision="ieee")
    row, column = second[None, :, None, None, None], second[None, None, None, :, None]
    whole = tl.where((row == 0) & (column == 0), upper[:, None, :, None, :], 0.0)
    whole = tl.where((row == 1) & (column == 1), lower[:, None, :, None, :], whole)
    whole = tl.where((row == 1) & (column == 0), -corner[:, None, :, None, :], whole)
    return tl.reshape(whole, (HALF, 2 * SIZE, 2 * SIZE))


@triton.jit
def _grown(inverse, blocks, SIZE: tl.constexpr):
    """The inverses of all diagonal blocks of 2 SIZE within blocks, of those of SIZE."""
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    corner = (row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE != column // SIZE)
    part = tl.dot(tl.where(corner, blocks, 0.0), inverse, input_precision="ieee")
    return inverse - tl.dot(inverse, part, input_precision="ieee")


@triton.jit
def inverse_of_lower(matrix):
    """(I + matrix)⁻¹ of a strictly lower triangle [64, 64], in fp32."""
    blocks = _diagonal(matrix, 16)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    # Blocks of 1 x 1, 2 x 2, 4 x 4, 8 x 8 within those of 16, which are the smallest of a product.
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where((row // 2 == column // 2), blocks, 0.0)
    inverse = _grown(_grown(_grown(inverse, blocks, 2), blocks, 4), blocks, 8)
    inverse = _doubled(_doubled(inverse, matrix), matrix)
    return tl.reshape(inverse, (64, 64))


@triton.jit(
    do_not_specialize=["num_rows", "search_steps"],
    do_not_specialize_on_alignment=["query_start_ptr", "start_ptr", "slots_ptr"],
)
def _chunk_kernel(
    keys_ptr, values_ptr, gates_ptr, a_log_ptr, dt_bias_ptr, weights_ptr, shares_ptr, decays_ptr,
    query_start_ptr, start_ptr, slots_ptr, num_rows, search_steps, gates_token, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    _, token, _, count = chunk_at(
        tl.program_id(1), query_start_ptr, start_ptr, slots_ptr, num_rows, search_steps, CHUNK
    )
    if count == 0:
        return
    index = tl.arange(0, CHUNK)
    inside = index < count
    tokens = (token + index).to(tl.int64)
    dtype: tl.constexpr = keys_ptr.dtype.element_ty

    gate_place = gates_ptr + tokens * gates_token + head
    beta = tl.where(inside, sigmoid(tl.load(gate_place, mask=inside, other=0.0)), 0.0)
    rate, bias = tl.exp(tl.load(a_log_ptr + head).to(tl.float32)), tl.load(dt_bias_ptr + head).to(tl.float32)
    decay = log_decay(tl.load(gate_place + HEADS, mask=inside, other=0.0), rate, bias)
    total = tl.cumsum(tl.where(inside, decay, 0.0), 0)
    tl.store(decays_ptr + tokens * HEADS + head, total, mask=inside)

    place = keys_ptr + tokens[:, None] * (2 * KEY_HEADS * K) + head // (HEADS // KEY_HEADS) * K
    place += tl.arange(0, K)[None, :]
    q = tl.load(place, mask=inside[:, None], other=0.0)
    k = tl.load(place + KEY_HEADS * K, mask=inside[:, None], other=0.0)
    # Above the diagonal the exponent would be positive, without a bound.
    lower = index[:, None] >= index[None, :]
    between = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)
    shares = tl.dot(q, tl.trans(k), input_precision="ieee") * between * scale
    place = shares_ptr + (tokens[:, None] * HEADS + head) * CHUNK + index[None, :]
    tl.store(place, shares.to(dtype), mask=inside[:, None])

    matrix = tl.dot(k, tl.trans(k), input_precision="ieee") * between * beta[:, None]
    inverse = inverse_of_lower(tl.where(index[:, None] > index[None, :], matrix, 0.0)) * beta[None, :]
    place = values_ptr + (tokens[:, None] * HEADS + head) * V + tl.arange(0, V)[None, :]
    v = tl.load(place, mask=inside[:, None], other=0.0)
    solved = tl.dot(inverse.to(dtype), v, input_precision="ieee")
    tl.store(place, solved.to(dtype), mask=inside[:, None])
    inverse *= tl.exp(total)[None, :]
    solved = tl.dot(inverse.to(dtype), k, input_precision="ieee")
    place = weights_ptr + (tokens[:, None] * HEADS + head) * K + tl.arange(0, K)[None, :]
    tl.store(place, solved.to(dtype), mask=inside[:, None])
