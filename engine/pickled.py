"""Weight files that torch pickled (*.bin, *.pt): only tensors are read of them, no code of theirs runs."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from .model_file import ModelError, unreadable

INDEX = "pytorch_model.bin.index.json"
PATTERNS = ("*.bin", "*.pt", "*.pth")
# What training leaves beside the weights.
_OTHERS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "consolidated")


def pickled_files(folder: Path) -> list[Path]:
    """By the index where there is one. Raises ModelError where it names what is not there."""
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder / INDEX} is broken ({type(error).__name__}): download it again") from None
        if absent := [name for name in names if not (folder / name).is_file()]:
            more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
            raise ModelError(f"{folder} lacks {absent[0]}{more}, named by {INDEX}: download the missing files again")
        return [folder / name for name in names]
    if (folder / "pytorch_model.bin").is_file():
        return [folder / "pytorch_model.bin"]
    for pattern in PATTERNS:
        if files := sorted(file for file in folder.glob(pattern) if not file.name.startswith(_OTHERS)):
            return files
    return []


def is_pickled(file: Path) -> bool:
    return file.suffix in {pattern[1:] for pattern in PATTERNS}


def read_pickled(file: Path) -> dict[str, torch.Tensor]:
    """Its tensors by name, mapped from the file where its format allows it. Raises ModelError naming what is wrong."""
    again = "download it again"
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
        if start == b"version ":
            raise ModelError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
        # Files of torch before 1.6 are no zip archives, and cannot be mapped.
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=start.startswith(b"PK"))
    except PermissionError:
        raise unreadable(file) from None
    except UnpicklingError:
        raise ModelError(
            f"{file} is broken, or holds more than tensors, which could run code: {again}, or convert it to safetensors"
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())[:200]
        raise ModelError(f"{file} is truncated or corrupt ({type(error).__name__}: {said}): {again}") from None
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise ModelError(f"{file} holds no tensors by name: convert it with transformers' save_pretrained")
    return {str(name): tensor for name, tensor in content.items()}
