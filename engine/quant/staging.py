"""Weights from a mapped file to the GPU, through pinned memory: the bus then takes one piece while the next is read.

Straight from mapped memory, where the driver stages it, four threads get 5 GB/s in all; this way more than 10.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import torch
from torch import Tensor

PIECE = 8 << 20  # bytes
SMALL = 1 << 20  # bytes that are not worth it

_own = threading.local()


def copy_weight(target: Tensor, source: Tensor) -> None:
    """target = source, of the same shape; for what the current stream does from here on."""
    alike = source.dtype == target.dtype and target.is_contiguous()
    in_rows = source.is_contiguous() or (
        source.dim() == 2 and source.stride(1) == 1 and source.shape[1] * source.itemsize <= PIECE
    )
    if target.is_cuda and source.device.type == "cpu" and alike and in_rows and source.nbytes > SMALL:
        staging: Staging | None = getattr(_own, "staging", None)
        if staging is None or staging.device != target.device:
            staging = _own.staging = Staging(target.device)
        staging.copy(target, source)
    else:
        target.copy_(source)


class Staging:
    """One thread's way to a device: two buffers that take turns, and a stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._buffers]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target = source, of the same shape and dtype, from host memory. Done when it returns.

        target is contiguous, source too, or a matrix whose rows are (some columns of a larger one).
        """
        to = target.view(-1).view(torch.uint8)
        width = 1 if source.is_contiguous() else source.shape[1] * source.itemsize  # bytes that stay together
        rows = None if source.is_contiguous() else source.view(torch.uint8).numpy()
        step = PIECE // width * width
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still use what lay there
        with torch.cuda.stream(self._stream):
            for turn, start in enumerate(range(0, source.nbytes, step)):
                buffer, sent = self._buffers[turn % 2], self._sent[turn % 2]
                sent.synchronize()
                size = min(step, source.nbytes - start)
                # One thread's work, whereas torch's copy in host memory starts as many threads as there are cores.
                if rows is None:
                    ctypes.memmove(buffer.data_ptr(), source.data_ptr() + start, size)
                else:
                    packed = buffer[:size].numpy().reshape(-1, width)
                    np.copyto(packed, rows[start // width : (start + size) // width])
                to[start : start + size].copy_(buffer[:size], non_blocking=True)
                sent.record()
        self._stream.synchronize()
