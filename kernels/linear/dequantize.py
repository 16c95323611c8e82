"""Products of many rows with packed codes: the weight becomes numbers in a scratch, all of it at once or some rows at a
time, and a product of numbers takes it from there."""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl

from ..launch.pdl import launched_plainly
from .planes import TILE, Packed, decoded, decoders, planes_of, unpacked

SCRATCH = 1 << 25  # elements, of 16 bits, that a scratch has at least
LARGEST = 1 << 27  # of a weight that becomes numbers at once

_scratches: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
_captured: list[torch.Tensor] = []  # scratches whose addresses CUDA graphs have: they outlive their replacement
_growing = threading.Lock()


def prepare_scratch(device: torch.device, dtype: torch.dtype, elements: int = 0) -> torch.Tensor:
    """The device's scratch (64 MiB and up to four times as much), with room for so many elements unless these are more
    than LARGEST; RuntimeError where it has to be made while a CUDA graph is captured."""
    wanted = max(SCRATCH, elements if elements <= LARGEST else 0)
    with _growing:
        scratch = _scratches.get((device, dtype))
        if scratch is None or len(scratch) < wanted:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the scratch on {device} is too small and a graph is captured: call prepare_scratch first"
                )
            scratch = _scratches[device, dtype] = torch.empty(wanted, dtype=dtype, device=device)
        return scratch


def _written(scratch: torch.Tensor) -> torch.Tensor:
    if torch.cuda.is_current_stream_capturing() and not any(kept is scratch for kept in _captured):
        _captured.append(scratch)
    return scratch


def numbers(matrix: Packed, dtype: torch.dtype) -> torch.Tensor | None:
    """[N, K] in the scratch, which keeps them until the next call; None where they have no room, and off the GPU."""
    scratch = _scratches.get((matrix.device, dtype))
    size = matrix.rows * matrix.columns
    if scratch is None or len(scratch) < size or not scratch.is_cuda:
        return None
    return dequantize(matrix, dtype, out=_written(scratch)[:size].view(matrix.rows, matrix.columns))


def dequantized_linear(
    x: torch.Tensor, matrix: Packed, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x Wᵀ + b for x [M, K] in bf16 or fp16; out [M, N] in x's dtype. Calls on a device share a scratch: they belong on
    one stream, or one after the other."""
    if not x.is_cuda:
        y = x.float() @ unpacked(matrix).t()
        y = (y if bias is None else y + bias).to(x.dtype)
        return y if out is None else out.copy_(y)
    rows, columns = matrix.rows, matrix.columns
    if out is None:
        out = x.new_empty(len(x), rows)
    scratch = _written(prepare_scratch(x.device, x.dtype))
    step = max(TILE, SCRATCH // columns // TILE * TILE)  # of which the last is still in the L2 cache when it is read
    for first in range(0, rows, step):
        size = min(step, rows - first)
        weight = scratch[: size * columns].view(size, columns) if size * columns <= SCRATCH else None
        weight = dequantize(matrix, x.dtype, first, size, weight)
        torch.mm(x, weight.t(), out=out[:, first : first + size])
    if bias is not None:
        out += bias
    return out


def dequantize(
    matrix: Packed, dtype: torch.dtype, first: int = 0, size: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows `first` (a multiple of 64) to first + size as numbers [size, K], bf16 or fp16, computed in fp32."""
    size = matrix.rows - first if size is None else size
    if out is None:
        out = torch.empty(size, matrix.columns, dtype=dtype, device=matrix.device)
    if not out.is_cuda:
        return out.copy_(unpacked(matrix)[first : first + size])
    return dequantize_triton(matrix, first, out)


def dequantize_triton(matrix: Packed, first: int, out: torch.Tensor) -> torch.Tensor:
    if first % TILE:
        raise ValueError(f"rows from {first} on: tiles have {TILE}")
    size, columns = out.shape
    asm = decoders(matrix.kind, matrix.table, out.dtype)
    row_stride, block_stride, tile_stride = matrix.strides
    scales, shifts = matrix.scales, matrix.shifts
    launched_plainly(out.device)
    per_program = 8
    _dequantize_kernel[(triton.cdiv(size, TILE), triton.cdiv(matrix.blocks, per_program))](
        matrix.words, scales, scales if shifts is None else shifts, out, first, size, columns, matrix.blocks,
        len(scales), row_stride, block_stride, tile_stride, scales.stride(0), out.stride(0),
        ASM0=asm[0], ASM1=asm[1], ASM2=asm[-2], ASM3=asm[-1], PLANE=matrix.plane, PLANES=planes_of(matrix.kind),
        GROUP=matrix.group, HAS_SHIFT=shifts is not None, BLOCKS=per_program, TILE_ROWS=TILE, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first"])
def _dequantize_kernel(
    words_ptr, scales_ptr, shifts_ptr, out_ptr, first, size, columns, blocks, groups,
    row_stride, block_stride, tile_stride, group_stride, out_stride,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr, PLANE: tl.constexpr,
    PLANES: tl.constexpr, GROUP: tl.constexpr, HAS_SHIFT: tl.constexpr, BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    n = first + row
    i = tl.arange(0, PLANE)
    tile = first // TILE_ROWS + tl.program_id(0)
    rows = words_ptr + tile.to(tl.int64) * tile_stride + tl.arange(0, TILE_ROWS)[:, None] * row_stride + i[None, :]
    out_rows = out_ptr + row.to(tl.int64)[:, None] * out_stride + i[None, :]
    start = tl.program_id(1) * BLOCKS
    for block in range(start, tl.minimum(start + BLOCKS, blocks)):
        words = tl.load(rows + block * block_stride)
        for plane in tl.static_range(PLANES):
            k = (block * PLANES + plane) * PLANE
            if plane == 0:
                w = decoded(words, ASM0, dtype)
            elif plane == 1:
                w = decoded(words, ASM1, dtype)
            elif plane == 2:
                w = decoded(words, ASM2, dtype)
            else:
                w = decoded(words, ASM3, dtype)
            group = 0 if GROUP == 0 else tl.minimum(k // GROUP, groups - 1)
            values = w.to(tl.float32) * tl.load(scales_ptr + group * group_stride + n).to(tl.float32)[:, None]
            if HAS_SHIFT:
                values -= tl.load(shifts_ptr + group * group_stride + n).to(tl.float32)[:, None]
            mask = (row < size)[:, None] & (k + i < columns)[None, :]
            tl.store(out_rows + k, values.to(dtype), mask=mask)
