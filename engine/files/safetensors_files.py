"""Weight files in safetensors format: found, read by their headers, mapped when a tensor is asked for."""

from __future__ import annotations

import json
import os
import threading
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelError, absent, one_line, unreadable
from .model_file import read_index, refuse_pointer
from .tensor_info import TensorInfo

INDEX = "model.safetensors.index.json"
_ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}
_HEADER_LIMIT = 100 << 20  # the safetensors format's own


def safetensors_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """(the files in order, tensor → file by the index, empty without one). Raises ModelError where one is missing."""
    if (folder / INDEX).is_file():
        index = read_index(folder / INDEX)
        return [folder / name for name in sorted(set(index.values()))], index
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"], {}
    return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")), {}


class SafetensorsFiles:
    """A Checkpoint. Raises ModelError naming the file at fault."""

    def __init__(self, files: list[Path], index: dict[str, str]) -> None:
        self.headers: dict[str, TensorInfo] = {}
        for file in files:
            try:
                self.headers |= _read_header(file)
            except PermissionError:
                raise unreadable(file) from None
            except FileNotFoundError:
                raise absent(file) from None
        lacking = sorted(name for name in index if name not in self.headers)
        if lacking:
            raise ModelError(
                f"{index[lacking[0]]} lacks {lacking[0]}, which {INDEX} promises ({len(lacking)} such tensors): "
                "download the checkpoint again"
            )
        self._mapped = threading.local()  # one mapping a thread and file

    def read(self, name: str) -> Tensor:
        file = self.headers[name].file
        opened: dict[Any, Any] = self._mapped.__dict__
        try:
            if file not in opened:
                opened[file] = safe_open(file, framework="pt", device="cpu")
            tensor: Tensor = opened[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {name} from {file} ({one_line(error)}): download it again") from None
        return tensor


def _read_header(file: Path) -> dict[str, TensorInfo]:
    with file.open("rb") as stream:
        return read_header(stream, file)[0]


def read_header(
    stream: BinaryIO, file: Path, limit: int = _HEADER_LIMIT
) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """(tensors, the byte at which each begins) of a safetensors file, opened: 8 bytes of little-endian length n, then n
    bytes of JSON, at most `limit`, then the data. Raises ModelError."""
    again = "download it again"
    size = os.fstat(stream.fileno()).st_size
    start = stream.read(8)
    refuse_pointer(file, start)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > _HEADER_LIMIT:
        raise ModelError(f"{file} is no safetensors file ({size} bytes, bad header): {again}")
    if 8 + length > size:
        raise ModelError(f"{file} is truncated ({size} bytes, its header alone takes {8 + length}): {again}")
    if length > limit:
        raise ModelError(
            f"{file} has a header of {length} bytes, and at most {limit} are read: has it padding, or notes?"
        )
    raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors, starts, end = {}, {}, 0
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            shape = tuple(int(extent) for extent in entry["shape"])
            bits = _ITEM_BITS.get(entry["dtype"])
            if not 0 <= first <= last or (bits and prod(shape) * bits != (last - first) * 8):
                raise ValueError(f"{name} takes bytes {first} to {last} for shape {list(shape)} {entry['dtype']}")
            tensors[name] = TensorInfo(file, entry["dtype"], shape, last - first)
            starts[name] = 8 + length + first
            end = max(end, last)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} has a corrupt header ({type(error).__name__}: {one_line(error)}): {again}") from None
    if 8 + length + end != size:
        raise ModelError(f"{file} is truncated or corrupt ({size} bytes, its header says {8 + length + end}): {again}")
    return tensors, starts
