"""adapter_model.safetensors, which somebody may replace, or cut short, while it is read or later."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ModelError, one_line, unreadable
from ..files.checkpoint import FLOAT_TYPES
from ..files.safetensors_files import read_header
from ..files.tensor_info import TensorInfo

# Who parses JSON holds the interpreter's lock: this much takes about a second, in which no step runs. Three pairs of
# each of 256 experts in 60 layers take 14 million bytes.
LONGEST_HEADER = 16 << 20
Stamp = tuple[int, ...]  # tells a file from what takes its place, on one host
SAMPLE = 1024  # bytes of each tensor: training changes nearly all of its numbers


def stamp_of(file: Path | int) -> Stamp:
    """`file`: or its descriptor. Raises OSError."""
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns


class WeightsFile:
    """Its tensors are copied, never mapped: who touches a page of a mapped file behind its end, because it has been cut
    short, is killed (SIGBUS). All are of one version of the file. Raises ModelError."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            with file.open("rb") as stream:
                self.stamp = stamp_of(stream.fileno())
                self.headers: dict[str, TensorInfo]
                self.headers, self._starts = read_header(stream, file, LONGEST_HEADER)
                self.digest = self._digest(stream.fileno())
        except PermissionError:
            raise unreadable(file) from None
        except OSError as error:
            raise ModelError(f"cannot read {file} ({one_line(error)}): get the adapter again") from None

    def _digest(self, descriptor: int) -> str:
        """What tells its content from another's on any host, without reading all of it. Raises OSError."""
        digest = hashlib.blake2b(digest_size=16)
        for name, info in self.headers.items():
            length = min(SAMPLE, info.num_bytes)
            digest.update(repr((name, info.dtype, info.shape, self._starts[name])).encode())
            digest.update(os.pread(descriptor, length, self._starts[name] + (info.num_bytes - length) // 2))
        return digest.hexdigest()

    def read(self, name: str) -> Tensor:
        """As stored. From any thread."""
        info = self.headers[name]
        memory = bytearray(info.num_bytes)
        try:
            with self.file.open("rb", buffering=0) as stream:
                stream.seek(self._starts[name])
                view, done = memoryview(memory), 0
                while done < len(memory) and (count := stream.readinto(view[done:])):
                    done += count
                whole = done == len(memory) and stamp_of(stream.fileno()) == self.stamp
        except OSError as error:
            raise ModelError(f"cannot read {name} from {self.file} ({one_line(error)}): get it again") from None
        if not whole:
            raise ModelError(f"{self.file} has changed while it was read: load it again when it is whole")
        dtype = FLOAT_TYPES[info.dtype]
        if not memory:  # which frombuffer refuses
            return torch.empty(info.shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype).view(info.shape)
