"""The weights of a model's folder: safetensors, GGUF, or torch's pickles. Headers first, each tensor when asked for."""

from __future__ import annotations

import json
import logging
import os
import threading
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelError, absent, one_line, unreadable
from ..options.model_path import is_gguf
from ..quant.format import TensorInfo
from .gguf_checkpoint import GGUFCheckpoint
from .model_file import PATTERNS, PICKLED, read_index, refuse_pointer

logger = logging.getLogger(__name__)

FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS_AT_ONCE = 1024  # of two matrices that are compared


class Checkpoint(Protocol):
    """The tensors of a checkpoint by name, as Hugging Face names them."""

    @property
    def headers(self) -> dict[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored, on the CPU, mapped from its file where that is possible; from any thread.

        Raises ModelError where the file cannot be read.
        """
        ...


def open_checkpoint(folder: Path, load_format: str = "auto") -> Checkpoint:
    """Opened by its headers alone. `folder`: or a GGUF file. "auto": pickled files where there are no others.

    Raises ModelError naming what is wrong.
    """
    if is_gguf(folder):
        return GGUFCheckpoint(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder: pass the folder of a Hugging Face model")
    if load_format in PICKLED:
        if files := pickled_files(folder):
            return PickledFiles(files)
        raise ModelError(f"{folder} has no {', no '.join(PATTERNS)}: leave --load-format {load_format} out")
    files, index = safetensors_files(folder)
    if files:
        return SafetensorsFiles(files, index)
    if files := pickled_files(folder):
        if load_format == "auto":
            return PickledFiles(files)
        raise ModelError(f"{folder} has no *.safetensors but {files[0].name}: pass --load-format pt, or leave it out")
    if not any(folder.iterdir()):
        raise ModelError(f"{folder} is empty: download the model into it")
    raise ModelError(
        f"{folder} has no *.safetensors: download the weights, or pass --load-format dummy for random ones"
    )


def read_headers(folder: Path, load_format: str = "auto") -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint by name. Raises ModelError as `open_checkpoint`."""
    return open_checkpoint(Path(folder), load_format).headers


def checkpoint_bytes(folder: Path) -> int:
    """Size of the tensors in the checkpoint's files, by their headers."""
    return sum(info.num_bytes for info in read_headers(folder).values())


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The float type most of the weights are stored in; None where there are no readable weights."""
    sizes: dict[torch.dtype, int] = {}
    try:
        headers = read_headers(folder)
    except ModelError:
        return None  # loading will say what is wrong; dummy weights need none
    for info in headers.values():
        if info.dtype in FLOAT_TYPES:
            sizes[FLOAT_TYPES[info.dtype]] = sizes.get(FLOAT_TYPES[info.dtype], 0) + info.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


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


PICKLED_INDEX = "pytorch_model.bin.index.json"
NAMES = {  # as safetensors has them
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
# What training leaves beside the weights.
_OTHERS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "consolidated")


def pickled_files(folder: Path) -> list[Path]:
    """By the index where there is one. Raises ModelError where it names what is not there."""
    if (folder / PICKLED_INDEX).is_file():
        return [folder / name for name in sorted(set(read_index(folder / PICKLED_INDEX).values()))]
    if (folder / "pytorch_model.bin").is_file():
        return [folder / "pytorch_model.bin"]
    for pattern in PATTERNS:
        if files := sorted(file for file in folder.glob(pattern) if not file.name.startswith(_OTHERS)):
            return files
    return []


class PickledFiles:
    """A Checkpoint. Raises ModelError naming the file at fault."""

    def __init__(self, files: list[Path]) -> None:
        self.headers: dict[str, TensorInfo] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            for name, tensor in read_pickled(file).items():
                self._tensors[name] = tensor
                dtype = NAMES.get(tensor.dtype, str(tensor.dtype))
                self.headers[name] = TensorInfo(file, dtype, tuple(tensor.shape), tensor.numel() * tensor.itemsize)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].contiguous()


def read_pickled(file: Path) -> dict[str, torch.Tensor]:
    """Its tensors by name, mapped from the file where its format allows it. Raises ModelError naming what is wrong."""
    again = "download it again"
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
        refuse_pointer(file, start)
        # Files of torch before 1.6 are no zip archives, and cannot be mapped.
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=start.startswith(b"PK"))
    except PermissionError:
        raise unreadable(file) from None
    except FileNotFoundError:
        raise absent(file) from None
    except UnpicklingError:
        raise ModelError(
            f"{file} is broken, or holds more than tensors, which could run code: {again}, or convert it to safetensors"
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{type(error).__name__}: {one_line(error)}"
        raise ModelError(f"{file} is truncated or corrupt ({said}): {again}") from None
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise ModelError(f"{file} holds no tensors by name: convert it with transformers' save_pretrained")
    return {str(name): tensor for name, tensor in content.items()}


def has_own_head(checkpoint: Checkpoint, embedding: str, head: str) -> bool:
    """Whether a checkpoint that ties its output matrix to its embedding has another one all the same, as models have
    whose two were trained apart: then the files say what it is, and config.json does not. A copy of the embedding is
    none. Raises ModelError where one of them cannot be read."""
    headers = checkpoint.headers
    if embedding not in headers or head not in headers:
        return False
    if headers[embedding].shape != headers[head].shape or headers[head].dtype not in FLOAT_TYPES:
        return False  # what does not fit is left alone, as a copy is
    table, matrix = checkpoint.read(embedding), checkpoint.read(head)

    def equal(rows: slice) -> bool:
        return torch.equal(table[rows].float(), matrix[rows].float())

    some = range(0, len(table), max(1, len(table) // _ROWS_AT_ONCE))  # tell at once, where the two were trained apart
    same = all(equal(slice(row, row + 1)) for row in some) and all(
        equal(slice(row, row + _ROWS_AT_ONCE)) for row in range(0, len(table), _ROWS_AT_ONCE)
    )
    if not same:
        logger.warning(
            "config.json ties %s to %s (tie_word_embeddings), but the checkpoint has another matrix of that name: it "
            "is used", head, embedding,
        )  # fmt: skip
    return not same
