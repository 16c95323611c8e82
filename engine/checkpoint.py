"""The weight files of a model's folder, read by their headers: what is in them, how large, whether they are whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from .model_file import ModelError, unreadable
from .pickled import PATTERNS, is_pickled, pickled_files, read_pickled

_INDEX = "model.safetensors.index.json"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in FLOATS.items()}
PICKLED = ("pt", "npcache")  # as --load-format has them: mapped files need no copy in numpy's format
_ITEM_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
}
_HEADER_LIMIT = 100 << 20  # the safetensors format's own


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header describes it."""

    file: Path
    dtype: str  # safetensors' name: "BF16", "F32", …
    shape: tuple[int, ...]
    num_bytes: int


def read_headers(folder: Path, load_format: str = "auto") -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint by name, from the headers alone; "auto": pickled files where there are no others.

    Raises ModelError naming the file at fault.
    """
    tensors: dict[str, TensorInfo] = {}
    files, index = _weight_files(Path(folder), load_format)
    if files and is_pickled(files[0]):
        return {name: info for file in files for name, info in _pickled_header(file).items()}
    for file in files:
        try:
            tensors |= _read_header(file)
        except PermissionError:
            raise unreadable(file) from None
    absent = sorted(name for name in index if name not in tensors)
    if absent:
        raise ModelError(
            f"{index[absent[0]]} lacks {absent[0]}, which {_INDEX} promises ({len(absent)} such tensors): download the "
            "checkpoint again"
        )
    return tensors


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
        if info.dtype in FLOATS:
            sizes[FLOATS[info.dtype]] = sizes.get(FLOATS[info.dtype], 0) + info.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def _pickled_header(file: Path) -> dict[str, TensorInfo]:
    tensors = {}
    for name, tensor in read_pickled(file).items():
        dtype = _NAMES.get(tensor.dtype, str(tensor.dtype))
        tensors[name] = TensorInfo(file, dtype, tuple(tensor.shape), tensor.numel() * tensor.itemsize)
    return tensors


def _weight_files(folder: Path, load_format: str) -> tuple[list[Path], dict[str, str]]:
    """(the files in order, tensor → safetensors file by the index, empty without one)."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder: pass the folder of a Hugging Face model")
    if load_format in PICKLED:
        if files := pickled_files(folder):
            return files, {}
        raise ModelError(f"{folder} has no {', no '.join(PATTERNS)}: leave --load-format {load_format} out")
    if (folder / _INDEX).is_file():
        try:
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(index.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{folder / _INDEX} is broken ({type(error).__name__}: {one_line(error)}): download it again"
            ) from None
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ModelError(
                f"{folder} lacks {absent[0]}{and_more(absent)}, named by {_INDEX}: download the missing files again"
            )
        return [folder / name for name in names], index
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"], {}
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if files:
        return files, {}
    if files := pickled_files(folder):
        if load_format == "auto":
            return files, {}
        raise ModelError(f"{folder} has no *.safetensors but {files[0].name}: pass --load-format pt, or leave it out")
    if not any(folder.iterdir()):
        raise ModelError(f"{folder} is empty: download the model into it")
    raise ModelError(
        f"{folder} has no *.safetensors: download the weights, or pass --load-format dummy for random ones"
    )


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """The header of a safetensors file: 8 bytes of little-endian length n, then n bytes of JSON, then the data."""
    again = "download it again"
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start.startswith(b"version "):
            raise ModelError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > _HEADER_LIMIT:
            raise ModelError(f"{file} is no safetensors file ({size} bytes, bad header): {again}")
        if 8 + length > size:
            raise ModelError(f"{file} is truncated ({size} bytes, its header alone takes {8 + length}): {again}")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            shape = tuple(int(extent) for extent in entry["shape"])
            bits = _ITEM_BITS.get(entry["dtype"])
            if not 0 <= first <= last or (bits and prod(shape) * bits != (last - first) * 8):
                raise ValueError(f"{name} takes bytes {first} to {last} for shape {list(shape)} {entry['dtype']}")
            tensors[name] = TensorInfo(file, entry["dtype"], shape, last - first)
            end = max(end, last)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} has a corrupt header ({type(error).__name__}: {one_line(error)}): {again}") from None
    if 8 + length + end != size:
        raise ModelError(f"{file} is truncated or corrupt ({size} bytes, its header says {8 + length + end}): {again}")
    return tensors


def and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
