"""A model's config.json as it lies in its folder, read without torch: what is wrong with it is said at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError, and_more, one_line, unreadable
from ..options.model_path import is_gguf

PICKLED = ("pt", "npcache")  # as --load-format has them: mapped files need no copy in numpy's format
PATTERNS = ("*.bin", "*.pt", "*.pth")  # names of pickled files


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says, or what a GGUF file says in its place.

    Raises ModelError when it is missing or no JSON object.
    """
    if is_gguf(folder):
        from .gguf_checkpoint import GGUFCheckpoint

        checkpoint = GGUFCheckpoint(folder)
        _ = checkpoint.tensors  # what cannot be loaded is refused now, not after torch is imported
        return checkpoint.config
    file = folder / "config.json"
    remedy = "pass the folder of a Hugging Face model (config.json, tokenizer.json, *.safetensors)"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        what = f"{folder} has no config.json" if folder.is_dir() else f"{folder} is no folder"
        if (folder / "adapter_config.json").exists():
            what, remedy = f"{folder} is a LoRA adapter", f"pass its base model, and --merge-lora {folder}"
        elif files := sorted(folder.glob("*.gguf")):
            what, remedy = f"{what}, only GGUF files", f"pass one of them, such as {files[0]}"
        raise ModelError(f"{what}: {remedy}") from None
    except PermissionError:
        raise unreadable(file) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {file} ({error}): download it again") from None
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(f"{file} is no valid JSON ({error}): download it again") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{file} holds a {type(raw).__name__} where an object belongs: {remedy}")
    return raw


def read_index(file: Path) -> dict[str, str]:
    """Tensor → file of an index ("weight_map"), whose files are all there. Raises ModelError."""
    try:
        index: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(index.values()))
        absent = [name for name in names if not (file.parent / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is broken ({type(error).__name__}: {one_line(error)}): download it again") from None
    if absent:
        raise ModelError(
            f"{file.parent} lacks {absent[0]}{and_more(absent)}, named by {file.name}: download the missing files again"
        )
    return index


def refuse_pointer(file: Path, start: bytes) -> None:
    """Raises ModelError where these first eight bytes of a file are those of what Git LFS leaves in its place."""
    if start == b"version ":
        raise ModelError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
