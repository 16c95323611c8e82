"""States copied from slot to slot."""

from __future__ import annotations

from torch import Tensor


def copy_slots(tensors: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """tensors[i][dst[n]] = tensors[i][src[n]] for each n, whole slots; nothing where dst[n] is 0.

    tensors: [num_slots, …] each, contiguous, of any dtypes. src and dst int32 [N]; no slot but 0 is twice in dst, and
    none of dst is in src.
    """
    copy_slots_torch(tensors, src, dst)


def copy_slots_torch(tensors: list[Tensor], src: Tensor, dst: Tensor) -> None:
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        if target:
            for tensor in tensors:
                tensor[target] = tensor[source]
