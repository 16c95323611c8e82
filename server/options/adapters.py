"""The options that name adapters: which are served from the start, and from where others may be loaded."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from ...engine.errors import ConfigError
from ...engine.options.option import option

EXAMPLE = 'give name=path, or {"name": "sql", "path": "/adapters/sql"}'


@dataclass(frozen=True)
class AdapterModule:
    name: str
    path: str  # a folder, or a name on the hub
    base: str | None = None  # its parent in /v1/models; None: the model's first name


@dataclass(frozen=True)
class AdapterConfig:
    lora_modules: tuple[str, ...] = option(
        (), "adapters that are served from the start: name=path, or JSON with name, path and base_model_name; path: "
        "a folder, or a name on the hub", group="adapters",
    )  # fmt: skip
    lora_dir: str | None = option(
        None, "folder from whose folders administrators may load adapters while the server runs "
        "(/v1/load_lora_adapter; default: from nowhere)", group="adapters",
    )  # fmt: skip

    def check_adapters(self) -> None:
        """Raises ConfigError."""
        self.modules()
        if self.lora_dir is not None and not os.path.isdir(os.path.expanduser(self.lora_dir)):
            raise ConfigError(f"--lora-dir is {self.lora_dir!r}: it is no folder")

    def modules(self) -> list[AdapterModule]:
        """--lora-modules, read. Raises ConfigError."""
        found = [module for word in self.lora_modules for module in _read(word)]
        names = [module.name for module in found]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"--lora-modules has the name {twice!r:.60} twice: give each adapter one of its own")
        return found


def _read(word: str) -> list[AdapterModule]:
    if word[:1] not in "{[":
        name, _, path = word.partition("=")
        return [_module({"name": name, "path": path}, word)]
    try:
        content = json.loads(word)
    except ValueError as error:
        raise ConfigError(f"--lora-modules has {word[:60]!r}, which is no JSON ({error}): {EXAMPLE}") from None
    return [_module(entry, word) for entry in (content if isinstance(content, list) else [content])]


def _module(entry: Any, word: str) -> AdapterModule:
    if not isinstance(entry, dict):
        raise ConfigError(f"--lora-modules has {word[:60]!r}: {EXAMPLE}")
    if unknown := entry.keys() - {"name", "path", "base_model_name"}:
        raise ConfigError(f"--lora-modules has {sorted(unknown)[0]!r:.60} in {word[:60]!r}: {EXAMPLE}")
    name, path, base = entry.get("name"), entry.get("path"), entry.get("base_model_name")
    if not isinstance(name, str) or not isinstance(path, str) or not isinstance(base, str | None):
        raise ConfigError(f"--lora-modules has {word[:60]!r}: {EXAMPLE}")
    if not name.strip() or not path.strip():
        raise ConfigError(f"--lora-modules has {word[:60]!r}: {EXAMPLE}")
    return AdapterModule(name, path, base)
