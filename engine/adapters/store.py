"""Adapters in the host's memory, packed as a slot of the device holds them: read from disk on a thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ..describe.model_source import from_hub
from ..link.turns import short_turns
from ..options.model_path import is_hub_name
from .adapter import WEIGHTS_FILE, Adapter
from .layout import Packed, SlotLayout
from .peft_config import CONFIG_FILE, AdapterError


class AdapterStore:
    """Which of them stay here is decided elsewhere: see AdapterBook."""

    def __init__(self, layout: SlotLayout, dtype: torch.dtype, pin: bool, download_dir: str | None = None) -> None:
        self.layout, self.dtype, self.pin = layout, dtype, pin
        self._download_dir = download_dir
        self.packed: dict[int, Packed] = {}  # by id

    def read(self, folder: str, check: Callable[[Adapter], None] | None = None) -> tuple[Packed, Adapter]:
        """From any thread; `folder`: or a name on the hub. `check` sees it before its tensors are read, and may raise
        ModelError, as this does."""
        found = find_adapter(folder, self._download_dir)
        with short_turns():
            adapter = Adapter.open(found)
            if check is not None:
                check(adapter)
            return self.layout.pack(adapter, self.dtype, self.pin), adapter

    def get(self, id: int, folder: str) -> Packed:
        """For a slot; read now where it is not here, as in the process of a rank that nobody has told to read it."""
        return self.packed.get(id) or self.read(folder)[0]


def find_adapter(name: str, download_dir: str | None = None) -> Path:
    """A folder as it is; else an adapter of the Hugging Face hub. Raises ModelError."""
    try:
        folder = Path(name).expanduser()
        there = folder.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, nobody's home
        raise AdapterError(f"{name[:60]!r} is no path ({error}): give an adapter's folder") from None
    if there or not is_hub_name(name):
        return folder
    return from_hub(name, None, [CONFIG_FILE, WEIGHTS_FILE], download_dir)
