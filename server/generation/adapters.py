"""The adapters that requests may name: loaded into every engine, counted while they are in use, unloaded when free."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...engine.config import ConfigError
from ...engine.messages import LoadAdapter
from ..client.client import Client
from ..errors import ApiError, shorten
from ..options.adapters import AdapterModule

logger = logging.getLogger(__name__)

# Types of errors as vLLM names them: its clients look at these.
INVALID, MISSING = "InvalidUserInput", "NotFoundError"


@dataclass(eq=False)
class ServedAdapter:
    name: str
    path: str
    id: int  # of this load, random: another load of the same name shares nothing with it
    parent: str | None  # name of the base model, where one was given
    rank: int = 0
    num_open: int = 0  # generations that use it
    free: asyncio.Event = field(default_factory=asyncio.Event)  # nobody uses it

    def use(self, ended: Callable[[], None] | None = None) -> Callable[[], None]:
        """Counts one that uses it, until what this returns is called; that calls `ended` too."""
        self.num_open += 1
        self.free.clear()

        def release() -> None:
            self.num_open -= 1
            if not self.num_open:
                self.free.set()
            if ended is not None:
                ended()

        return release


class Adapters:
    """By name. `enabled`: --enable-lora was given; `folder`: see --lora-dir."""

    def __init__(self, client: Client, base_names: Sequence[str], *, enabled: bool, folder: str | None = None) -> None:
        self._client, self._base_names = client, tuple(base_names)
        self.enabled = enabled
        self._folder = None if folder is None else Path(folder).expanduser().resolve()
        self._served: dict[str, ServedAdapter] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()  # loading and unloading, one after the other

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(list(self._served.values()))

    def find(self, name: str) -> ServedAdapter | None:
        return self._served.get(name)

    async def load_all(self, modules: Sequence[AdapterModule]) -> None:
        """At the start. Raises ConfigError."""
        for module in modules:
            try:
                await self._load(module)
            except ApiError as error:
                raise ConfigError(f"--lora-modules {module.name}={module.path}: {error.message}") from None

    async def load(self, name: str, path: str, in_place: bool = False, parent: str | None = None) -> None:
        """While the server runs, from the folder that is allowed. Raises ApiError, EngineDeadError."""
        self._check_enabled()
        await self._load(AdapterModule(name, str(self._allowed(path)), parent), in_place)

    async def ensure(self, name: str, path: str, anew: bool = False) -> ServedAdapter:
        """Loaded unless it is, for who may load from anywhere. Raises ApiError, EngineDeadError."""
        self._check_enabled()
        found = self.find(name)
        if found is not None and found.path == path and not anew:
            return found
        return await self._load(AdapterModule(name, path), in_place=True)

    async def unload(self, name: str) -> None:
        """Nobody finds it from now on; returns when those who use it are done. Raises ApiError."""
        self._check_enabled()
        adapter = self._served.pop(name, None)
        if adapter is None:
            raise ApiError(
                404, f"The adapter `{shorten(name)}` is not loaded.", type=MISSING, param="lora_name",
                code="adapter_not_found",
            )  # fmt: skip
        await self._drop(adapter)

    async def _load(self, module: AdapterModule, in_place: bool = False) -> ServedAdapter:
        async with self._lock:
            name = module.name
            if not name.isprintable():
                raise _invalid(f"{shorten(ascii(name))} is no name: give printable characters.", "lora_name")
            if name in self._base_names:
                raise _invalid(
                    f"`{shorten(name)}` is the name of the base model: give the adapter another.", "lora_name"
                )
            before = self._served.get(name)
            if before is not None and not in_place:
                raise _invalid(
                    f"The adapter `{shorten(name)}` is loaded already: unload it, or set 'load_inplace'.", "lora_name"
                )
            adapter = ServedAdapter(name, module.path, secrets.randbits(62) + 1, module.base)
            adapter.free.set()
            answer = await self._client.load_adapter(LoadAdapter(adapter.id, module.path, name))
            if answer.error is not None:
                raise _invalid(answer.error, "lora_path")
            adapter.rank = answer.rank
            self._served[name] = adapter
        logger.info("adapter %s: rank %d, from %s", name, adapter.rank, module.path)
        if before is not None:
            task = asyncio.create_task(self._drop(before))  # when those who use it are done
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)
        return adapter

    async def _drop(self, adapter: ServedAdapter) -> None:
        await adapter.free.wait()
        self._client.drop_adapter(adapter.id)

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise _invalid("Adapters are off: start the server with --enable-lora.", None)

    def _allowed(self, path: str) -> Path:
        """Raises ApiError for what is not below --lora-dir, whatever links or dots the path has."""
        if self._folder is None:
            raise _invalid("Adapters are loaded at the start only: --lora-dir says from where they may be later.", None)
        try:
            found = (self._folder / Path(path).expanduser()).resolve()
            fine = found.is_relative_to(self._folder) and found.is_dir()
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle, nobody's home
            fine = False
        if not fine:
            raise _invalid(f"`{shorten(path)}` is no folder in that of --lora-dir.", "lora_path")
        return found


def _invalid(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, type=INVALID, param=param, code="invalid_adapter")
