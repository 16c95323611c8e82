"""Where a model is, said without torch: whoever mistypes a path should not wait until it is imported."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ConfigError
from .model_names import has_no_owner, is_address, meant
from .shelves import ollama_file

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*(:[\w.-]+)?)?")


def find_model(name: str) -> Path | None:
    """The folder or GGUF file of that name, which may be one of Ollama's; None where it may be a name on the hub.

    Raises ConfigError where it is neither.
    """
    if not name:
        raise ConfigError("no model was named: pass a folder, or a name of the hub such as Qwen/Qwen3-0.6B")
    folder = Path(name).expanduser()
    if folder.is_dir() or is_gguf(folder):
        return folder
    if folder.exists():
        raise ConfigError(
            f"{name} is a file: pass the folder of a Hugging Face model with safetensors weights, or a GGUF file"
        )
    if "/" not in name and (file := ollama_file(name)) is not None:  # its owners are others than the hub's
        return file
    if is_address(name):
        raise ConfigError(
            f"{name} is not the address of a whole model: pass owner/model, a branch of it with --revision, and one of "
            "its GGUF files as owner/model:Q4_K_M"
        )
    if not is_hub_name(name) or has_no_owner(name):
        likely = meant(name)
        remedy = f"did you mean {likely}?" if likely else "pass a folder, or a name of the hub such as Qwen/Qwen3-0.6B"
        raise ConfigError(f"model {name!r} does not exist: {remedy}")
    return None


def is_gguf(path: Path) -> bool:
    """Whether it is a file that holds a whole model, not a folder. Ollama's are named by their digests."""
    return (path.suffix.lower() == ".gguf" or path.name.startswith("sha256-")) and path.is_file()


def cache_folder(download_dir: str | None) -> str | None:
    """--download-dir as the hub's library wants it."""
    return None if download_dir is None else str(Path(download_dir).expanduser())


def is_hub_name(name: str) -> bool:
    """Whether it has the form of one: `model` (of old ones), `owner/model`, or `owner/model:Q4_K_M` for a GGUF file of
    it."""
    return _HUB_NAME.fullmatch(name) is not None
