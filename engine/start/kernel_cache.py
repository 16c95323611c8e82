"""Where compiled kernels are kept, so that a card's are compiled once: Triton's cache, in a folder of vserve's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def kernel_cache() -> Path:
    """TRITON_CACHE_DIR or TRITON_HOME where they are set; else kernels/ in VSERVE_CACHE, else in the user's cache."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    if home := os.environ.get("TRITON_HOME"):
        return Path(home) / ".triton" / "cache"
    if folder := os.environ.get("VSERVE_CACHE"):
        return Path(folder).expanduser() / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vserve" / "kernels"


def use_kernel_cache() -> Path:
    """Tells Triton, in this process and those that it starts; before Triton is used."""
    os.environ["TRITON_CACHE_DIR"] = str(folder := kernel_cache())
    return folder


@dataclass(frozen=True)
class CacheSize:
    kernels: int  # compiled for a card
    num_bytes: int

    @classmethod
    def of(cls, folder: Path) -> CacheSize:
        files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
        return cls(sum(path.suffix == ".cubin" for path in files), sum(path.stat().st_size for path in files))
