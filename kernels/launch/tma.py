"""Descriptors of matrices for the tensor memory accelerator (TMA) of Hopper GPUs, as Gluon kernels take them."""

from functools import lru_cache

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ALIGNMENT = 16  # bytes, of a matrix's start and of the distance of its rows
_LAYOUTS = {width: NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=16, rank=2) for width in (32, 64, 128)}


class _Memory:
    """What a descriptor asks its tensor for, without holding the tensor's memory."""

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self.pointer


@lru_cache(maxsize=4096)
def descriptor(
    pointer: int, dtype: torch.dtype, num_rows: int, num_columns: int, stride: int, box_rows: int, box_columns: int,
    swizzle: int = 128,
) -> TensorDescriptor:  # fmt: skip
    """A matrix of 16-bit elements in boxes of box_rows x box_columns; swizzle: bytes, at most a box's row. Made in
    10 us, so those of weights are kept."""
    return TensorDescriptor(
        _Memory(pointer, dtype), [num_rows, num_columns], [stride, 1], [box_rows, box_columns], _LAYOUTS[swizzle]
    )


@lru_cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a Hopper GPU, 0 of another."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if (properties.major, properties.minor) == (9, 0) else 0
