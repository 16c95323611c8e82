"""Weight files that torch pickled (*.bin, *.pt): only tensors are read of them, no code of theirs runs."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ..errors import ModelError, absent, one_line, unreadable
from .model_file import read_index, refuse_pointer
from .tensor_info import TensorInfo

INDEX = "pytorch_model.bin.index.json"
PATTERNS = ("*.bin", "*.pt", "*.pth")
NAMES = {  # as safetensors has them
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
# What training leaves beside the weights.
_OTHERS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "consolidated")


def pickled_files(folder: Path) -> list[Path]:
    """By the index where there is one. Raises ModelError where it names what is not there."""
    if (folder / INDEX).is_file():
        return [folder / name for name in sorted(set(read_index(folder / INDEX).values()))]
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
