"""FP8 experts with many rows each: FP8 activations meet FP8 weights, in the tensor cores of twice the speed.

Activations are scaled by groups of 128 columns: those of the layer by a kernel before (fp8_rows.py), those between the
products by the first product itself, whose tile has 128 gates, a whole group. Weights are ExpertCodes, of which FP8
products read the bytes as they are; their scales are of a row, or of 128 columns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..attention.kv_fp8 import packs
from ..launch.pdl import pdl_options
from ..launch.tiles import fits, tile_table
from ..linear.fp8_linear import MANY, fp8_linear_torch, takes_fp8
from ..linear.fp8_rows import BLOCK, Fp8Rows, e4m3_words, fp8_rows, fp8_rows_torch, scale_and_factor
from ..linear.planes import TILE
from ..norm.activation import magnitude
from .expert_codes import ExpertCodes
from .gating import activated, gated, kind_of
from .moe import sum_of_experts
from .moe_blocks import Order, order_pairs, pairs_of_block, place_of_program
from .moe_codes import halves, rows_of_tile, with_bias
from .moe_triton import sum_pairs


class Fp8ExpertTile(NamedTuple):
    block_m: int  # rows of x
    block_n: int  # rows of the weight: of the first product, 128 of gate and 128 of up
    warps: int = 8
    stages: int = 3
    group: int = 1  # blocks of rows whose programs share tiles of the weight


def experts_take_fp8(gate_up: ExpertCodes, down: ExpertCodes) -> bool:
    return takes_fp8(gate_up.of(0)) and takes_fp8(down.of(0))


@lru_cache
def fp8_expert_tile(product: str, rows: float) -> Fp8ExpertTile | None:
    """Of "gate_up" or "down", by rows an expert gets on average; None: with so few, 16-bit activations are faster."""
    for row in tile_table("experts_fp8"):
        if row["product"] == product and row["min_rows"] < rows and fits(row["max_rows"], rows):
            return Fp8ExpertTile(*(row[name] for name in Fp8ExpertTile._fields))
    return None


def experts_fp8(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    limit: float = 0.0,
    beside: torch.Tensor | None = None,
    of: int | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """kernels.moe.experts of matrices that `experts_take_fp8`, x bf16 or fp16."""
    if x.is_cuda:
        rows = x.shape[0] * ids.shape[1] / (of or len(down.words))
        return experts_fp8_triton(
            x, ids, weights, gate_up, down, gate_up_bias, down_bias, limit=limit, beside=beside, rows=rows,
            residual=residual,
        )  # fmt: skip
    return experts_fp8_torch(
        x, ids, weights, gate_up, down, gate_up_bias, down_bias, limit=limit, beside=beside, residual=residual
    )


def experts_fp8_torch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    limit: float = 0.0,
    beside: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    def product(rows: torch.Tensor, matrices: ExpertCodes, expert: int, bias: torch.Tensor | None) -> torch.Tensor:
        quantised = fp8_rows_torch(rows, True)
        parts = [
            fp8_linear_torch(quantised, matrices.of(expert, part), out_dtype=torch.float32)
            for part in range(matrices.parts)
        ]
        y = torch.cat(parts, dim=1)
        return y if bias is None else y + bias[expert]

    def mlp(expert: int, rows: torch.Tensor, _: torch.Tensor | slice) -> torch.Tensor:
        return product(gated(product(rows, gate_up, expert, gate_up_bias), limit), down, expert, down_bias)

    return sum_of_experts(x, ids, weights, mlp, beside, residual)


def experts_fp8_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    limit: float = 0.0,
    beside: torch.Tensor | None = None,
    rows: float = 0.0,
    tiles: tuple[Fp8ExpertTile, Fp8ExpertTile] | None = None,
    quantised: Fp8Rows | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows: that an expert gets on average, by which tiles are chosen; `tiles` overrides that. quantised: x as
    fp8_rows has it, by group, where it is there."""
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return torch.empty_like(x) if residual is None else residual
    if tiles is None:
        first, second = fp8_expert_tile("gate_up", rows), fp8_expert_tile("down", rows)
        assert first is not None and second is not None, "too few rows for FP8 activations"
    else:
        first, second = tiles
    if first.block_n != 2 * BLOCK:
        raise ValueError(f"a tile of gate and up has {2 * BLOCK} rows, for a whole group of gates, not {first.block_n}")
    num_pairs, device = num_tokens * top_k, x.device
    groups = triton.cdiv(gate_up.rows, BLOCK)
    inner = Fp8Rows(
        torch.empty(num_pairs, groups * BLOCK, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(groups, num_pairs, dtype=torch.float32, device=device),
        x.dtype,
    )
    results = torch.empty((num_pairs, down.rows), dtype=x.dtype, device=device)
    quantised = fp8_rows(x, True) if quantised is None else quantised
    order = order_pairs(ids, len(down.words), first.block_m, True)
    _launch(quantised, gate_up, gate_up_bias, inner.values.view(torch.int16), inner.scales, order, top_k, first, limit)
    _launch(inner, down, down_bias, results, inner.scales, order, 1, second, limit)
    return sum_pairs(results, weights, beside, residual)


def _launch(
    x: Fp8Rows,
    matrices: ExpertCodes,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    out_scales: torch.Tensor,
    order: Order,
    top_k: int,
    tile: Fp8ExpertTile,
    limit: float,
) -> None:
    """x: row pair // top_k is a pair's → out [pairs, N]; of two parts: words of two FP8 numbers, with out_scales."""
    words, scales = matrices.words, matrices.scales.float()
    weight = words.view(*words.shape[:2], -1).view(torch.float8_e4m3fn)
    width = tile.block_n // matrices.parts
    _fp8_expert_kernel[(order.max_blocks * triton.cdiv(matrices.rows, width),)](
        x.values, x.scales, weight, scales, scales if bias is None else bias, out, out_scales,
        order.pairs, order.experts, order.num_blocks, len(out), order.max_blocks, len(words), matrices.rows,
        matrices.padded_rows, x.shape[1] // BLOCK, x.values.stride(0), x.scales.stride(0), weight.stride(0),
        weight.stride(1), scales.stride(0), scales.stride(1), out.stride(0), out_scales.stride(0),
        0 if bias is None else bias.stride(0), limit,
        W_GROUP=matrices.group // BLOCK, HAS_BIAS=bias is not None, TOP_K=top_k, GATED=matrices.parts == 2,
        ACT=kind_of(limit), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=BLOCK, TILE_ROWS=TILE,
        SHARING=tile.group, STAGES=tile.stages, PACKED=packs(out.device), num_warps=tile.warps,
        **pdl_options(out, MANY),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "max_blocks", "stride_x_scales", "stride_out_scales"])
def _fp8_expert_kernel(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, bias_ptr, out_ptr, out_scales_ptr, pairs_ptr, experts_ptr, num_blocks_ptr,
    num_pairs, max_blocks, num_experts, N, padded_n, blocks, stride_x, stride_x_scales, stride_expert, stride_w,
    stride_expert_scales, stride_w_scales, stride_out, stride_out_scales, stride_bias, limit,
    W_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILE_ROWS: tl.constexpr,
    SHARING: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """W_GROUP: blocks of columns that share a scale; 0: a row's all. x has a scale each block of columns."""
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    block_m, tile, expert = place_of_program(
        experts_ptr, num_blocks_ptr, max_blocks, num_experts, tl.cdiv(N, WIDTH), SHARING, True
    )
    if expert >= num_experts:
        return
    pair = pairs_of_block(pairs_ptr, block_m, num_pairs, BLOCK_M, BLOCK_M, True)
    row_exists = pair < num_pairs
    x_row = tl.where(row_exists, pair // TOP_K, 0).to(tl.int64)  # where there is none, a row that is: no masks
    row = rows_of_tile(tile, N, padded_n, GATED, BLOCK_N, TILE_ROWS)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_row[None, :] * stride_x + k[:, None]
    x_scales_ptrs = x_scales_ptr + x_row
    w_ptrs = w_ptr + expert * stride_expert + row.to(tl.int64)[:, None] * stride_w + k[None, :]
    w_scales_ptrs = w_scales_ptr + expert * stride_expert_scales + row
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        w = tl.load(w_ptrs + block * BLOCK_K)
        x = tl.load(x_ptrs + block * BLOCK_K)
        total = tl.dot(w, x)
        if W_GROUP > 0:
            total *= tl.load(w_scales_ptrs + block // W_GROUP * stride_w_scales)[:, None]
        acc += total * tl.load(x_scales_ptrs + block * stride_x_scales)[None, :]
    if W_GROUP == 0:
        acc *= tl.load(w_scales_ptrs)[:, None]
    if HAS_BIAS:
        acc = with_bias(acc, bias_ptr + expert * stride_bias, tile, N, GATED, BLOCK_N)
    n = tile * WIDTH + tl.arange(0, WIDTH)
    place = pair.to(tl.int64)
    if GATED:
        gate, up = halves(acc)
        values = tl.where((n < N)[:, None], activated(gate, up, limit, ACT), 0.0)
        scale, factor = scale_and_factor(tl.max(magnitude(values), 0))
        tl.store(out_scales_ptr + tile * stride_out_scales + place, scale, mask=row_exists)
        low, high = halves(values * factor[None, :])
        word = tile * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
        out_ptrs = out_ptr + place[None, :] * stride_out + word[:, None]
        tl.store(out_ptrs, e4m3_words(low, high, PACKED), mask=row_exists[None, :])
    else:
        out_ptrs = out_ptr + place[None, :] * stride_out + n[:, None]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_exists[None, :] & (n < N)[:, None])
