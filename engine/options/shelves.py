"""Models that lie on this machine: in the cache of the Hugging Face hub, and in the folders of Ollama and LM Studio."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HUB, OLLAMA, LM_STUDIO = "hub", "Ollama", "LM Studio"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_REPOSITORY = "models--"


@dataclass(frozen=True)
class Shelved:
    """A model, by the name that serves it."""

    name: str
    shelf: str  # HUB, OLLAMA or LM_STUDIO
    path: Path  # what is served, or of the hub the folder of all its snapshots
    size: int  # bytes on the disk
    used: float  # seconds since the epoch: when a file was last read or written
    is_whole: bool = True  # a download may have been broken off


def shelved(download_dir: str | None = None) -> Iterator[Shelved]:
    """All of them, unsorted. download_dir: the hub's cache, where it is elsewhere."""
    yield from _of_hub(hub_cache(download_dir))
    for folder in ollama_folders():
        yield from _of_ollama(folder)
    for folder in lm_studio_folders():
        yield from _of_lm_studio(folder)


def hub_cache(download_dir: str | None = None) -> Path:
    """As the hub's library finds it."""
    if download_dir is not None:
        return Path(download_dir).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def ollama_folders() -> list[Path]:
    if given := os.environ.get("OLLAMA_MODELS"):
        return [Path(given).expanduser()]
    return [Path("~/.ollama/models").expanduser(), Path("/usr/share/ollama/.ollama/models")]


def lm_studio_folders() -> list[Path]:
    return [Path(folder).expanduser() for folder in ("~/.lmstudio/models", "~/.cache/lm-studio/models")]


def ollama_file(name: str) -> Path | None:
    """The GGUF file that Ollama has under a name such as llama3.2:1b; None where it has none."""
    model, _, tag = name.partition(":")
    if not model or ".." in name or name.startswith("/"):
        return None
    place = model if "/" in model else f"library/{model}"
    for folder in ollama_folders():
        manifest = folder / "manifests" / "registry.ollama.ai" / place / (tag or "latest")
        if (found := _weights(folder, manifest)) is not None:
            return found
    return None


def _of_hub(cache: Path) -> Iterator[Shelved]:
    for folder in _folders(cache):
        owner, dashes, model = folder.name.removeprefix(_REPOSITORY).partition("--")
        snapshots = _folders(folder / "snapshots")
        if not folder.name.startswith(_REPOSITORY) or not any(_holds_model(snapshot) for snapshot in snapshots):
            continue
        files = [entry for entry in _files(folder / "blobs") if not entry.name.endswith(".lock")]
        size, used = _weigh(files)
        broken = any(entry.name.endswith(".incomplete") for entry in files)
        yield Shelved(f"{owner}/{model}" if dashes else owner, HUB, folder, size, used, not broken)


def _holds_model(snapshot: Path) -> bool:
    """Not a tokenizer, an adapter or a dataset card alone."""
    names = {entry.name for entry in _entries(snapshot)}
    return "config.json" in names or any(name.endswith(".gguf") for name in names)


def _of_ollama(folder: Path) -> Iterator[Shelved]:
    root = folder / "manifests" / "registry.ollama.ai"
    for manifest in _matching(root, "*/*/*"):
        if (file := _weights(folder, manifest)) is not None:
            owner, model, tag = manifest.relative_to(root).parts
            size, used = _weigh([file])
            yield Shelved(f"{'' if owner == 'library' else f'{owner}/'}{model}:{tag}", OLLAMA, file, size, used)


def _weights(folder: Path, manifest: Path) -> Path | None:
    """The file of the model that a manifest of Ollama's names."""
    try:
        layers = json.loads(manifest.read_text())["layers"]
        digest = next(layer["digest"] for layer in layers if layer["mediaType"] == _MODEL_LAYER)
        file = folder / "blobs" / str(digest).replace(":", "-")
        return file if file.is_file() else None
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return None


def _of_lm_studio(folder: Path) -> Iterator[Shelved]:
    for file in _matching(folder, "*/*/*.gguf"):
        if not file.name.startswith("mmproj"):
            size, used = _weigh([file])
            yield Shelved(str(file), LM_STUDIO, file, size, used)


def _matching(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:  # another user's, who lets nobody in
        return []


def _weigh(files: list[Path]) -> tuple[int, float]:
    """(bytes, when one of them was last read or written)."""
    size, used = 0, 0.0
    for file in files:
        try:
            stat = file.stat()
        except OSError:  # gone meanwhile
            continue
        size, used = size + stat.st_size, max(used, stat.st_atime, stat.st_mtime)
    return size, used


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if entry.is_dir()]


def _files(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if entry.is_file()]
