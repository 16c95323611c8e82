"""States copied from slot to slot."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

_BYTES = 1 << 14  # of a program


def copy_slots(tensors: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """tensors[i][dst[n]] = tensors[i][src[n]] for each n, whole slots, in one launch; nothing where dst[n] is 0.

    tensors: [num_slots, …] each, contiguous, of any dtypes. src and dst int32 [N]; no slot but 0 is twice in dst, and
    none of dst is in src.
    """
    (copy_slots_triton if src.is_cuda else copy_slots_torch)(tensors, src, dst)


def copy_slots_torch(tensors: list[Tensor], src: Tensor, dst: Tensor) -> None:
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        if target:
            for tensor in tensors:
                tensor[target] = tensor[source]


def copy_slots_triton(tensors: list[Tensor], src: Tensor, dst: Tensor) -> None:
    if not tensors or not len(src):
        return
    sizes = [tensor.nbytes // len(tensor) for tensor in tensors]
    unit = gcd(8, *sizes)
    table = _table(tuple(tensor.data_ptr() for tensor in tensors), tuple(sizes), unit, src.device)
    block = _BYTES // unit
    # Not early, as kernels with programmatic launch are: behind it, all that the step before has written is there.
    _copy_slots_kernel[(triton.cdiv(max(sizes), _BYTES), len(tensors), len(src))](
        table, src, dst, WORD=8 * unit, BLOCK=block, num_warps=8
    )


@lru_cache(maxsize=8)
def _table(addresses: tuple[int, ...], sizes: tuple[int, ...], unit: int, device: torch.device) -> Tensor:
    """int64 [tensors, 2]: where each begins, and words a slot."""
    rows = [(address, size // unit) for address, size in zip(addresses, sizes, strict=True)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


@triton.jit
def _copy_slots_kernel(table_ptr, src_ptr, dst_ptr, WORD: tl.constexpr, BLOCK: tl.constexpr):
    part, which, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source, target = tl.load(src_ptr + index).to(tl.int64), tl.load(dst_ptr + index).to(tl.int64)
    size = tl.load(table_ptr + 2 * which + 1)
    if (target == 0) | (part * BLOCK >= size):
        return
    address = tl.multiple_of(tl.load(table_ptr + 2 * which), 16)
    if WORD == 64:
        start = address.to(tl.pointer_type(tl.int64))
    elif WORD == 32:
        start = address.to(tl.pointer_type(tl.int32))
    elif WORD == 16:
        start = address.to(tl.pointer_type(tl.int16))
    else:
        start = address.to(tl.pointer_type(tl.int8))
    word = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(start + source * size + word, mask=word < size)
    tl.store(start + target * size + word, value, mask=word < size)
