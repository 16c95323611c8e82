"""The adapters that requests may name: loaded into every engine, counted while they are in use, unloaded when free.

Of several API processes the first one loads and unloads, and tells the others, which count their own requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ...engine.errors import ConfigError
from ...engine.link.messages import LoadAdapter
from ..client.client import Client
from ..errors import ApiError, shorten
from ..options.adapters import AdapterModule

logger = logging.getLogger(__name__)

# Types of errors as vLLM names them: its clients look at these.
INVALID, MISSING = "InvalidUserInput", "NotFoundError"


UNLOADING = 86_400.0  # seconds that requests of other API processes may still use an adapter
RETIRING = 3  # times that other processes are told of it


class Record(msgspec.Struct, frozen=True):
    """What API processes tell each other of an adapter."""

    name: str
    path: str
    id: int
    parent: str | None
    rank: int
    version: str = ""
    before: int | None = None  # id of the one whose name it takes over


class Tell(Protocol):
    """Colleagues.tell."""

    def __call__(self, path: str, content: Any = None, timeout: float = 5.0) -> Awaitable[None]: ...


@dataclass(eq=False)
class ServedAdapter:
    name: str
    path: str
    id: int  # of this load, random: another load of the same name shares nothing with it
    parent: str | None  # name of the base model, where one was given
    rank: int = 0
    version: str = ""  # of its files when it was loaded
    num_open: int = 0  # generations that use it
    free: asyncio.Event = field(default_factory=asyncio.Event)  # nobody uses it

    @property
    def record(self) -> Record:
        return Record(self.name, self.path, self.id, self.parent, self.rank, self.version)

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

    def __init__(
        self, client: Client, base_names: Sequence[str], *, enabled: bool, folder: str | None = None,
        tell: Tell | None = None,
    ) -> None:  # fmt: skip
        """`base_names`: of the models that are served, which no adapter may have. `tell`: the other API processes; it
        raises OSError with who has not understood."""
        self._client, self._base_names = client, tuple(base_names)
        self._tell = tell
        self._retired: set[int] | None = set()  # before the list of those that there are has come; see join
        self.enabled = enabled
        self._folder = None if folder is None else Path(folder).expanduser().resolve()
        self._served: dict[str, ServedAdapter] = {}
        self._last: dict[str, int] = {}  # by name, of those that others were told of: they may still have it
        self._known: dict[int, ServedAdapter] = {}  # of those that were told of, until they are retired
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
        async with self._lock:  # or others would hear of its end before they have heard of it
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
            self._check_name(name)
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
            adapter.rank, adapter.version = answer.rank, answer.version
            self._served[name] = adapter
            await self._share(adapter, before)
        logger.info("adapter %s: rank %d, from %s", name, adapter.rank, module.path)
        if before is not None:
            self._drop_later(before)
        return adapter

    def _check_name(self, name: str) -> None:
        """Raises ApiError for what no adapter may be called, however it is registered."""
        if not name.isprintable():
            raise _invalid(f"{shorten(ascii(name))} is no name: give printable characters.", "lora_name")
        if name in self._base_names:
            raise _invalid(f"`{shorten(name)}` is the name of the base model: give the adapter another.", "lora_name")

    def _drop_later(self, adapter: ServedAdapter) -> None:
        """When those who use it are done."""
        task = asyncio.create_task(self._drop(adapter))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _share(self, adapter: ServedAdapter, before: ServedAdapter | None) -> None:
        """With the other API processes. Raises ApiError, and then all have what was there before."""
        if self._tell is None:
            return
        try:
            await self._tell("/own/adapters", self._told(adapter))
        except OSError as error:
            self._served.pop(adapter.name, None)
            if before is not None:
                self._served[adapter.name] = before
                with contextlib.suppress(OSError):
                    await self._tell("/own/adapters", self._told(before))
            self._drop_later(adapter)
            raise ApiError(500, str(error), type="server_error", code="adapter_not_shared") from None

    def _told(self, adapter: ServedAdapter) -> Any:
        """Its record for the others, with whose name it takes over."""
        record = msgspec.structs.replace(adapter.record, before=self._last.get(adapter.name))
        self._last[adapter.name] = adapter.id
        return msgspec.to_builtins(record)

    async def _drop(self, adapter: ServedAdapter) -> None:
        """When nobody uses it any more, in any API process; one that is gone uses nothing."""
        tell = self._tell
        for again in range(RETIRING):
            if tell is None:
                break
            try:
                await tell("/own/adapters/retire", {"id": adapter.id}, UNLOADING)
                break
            except OSError as error:
                if again == RETIRING - 1:
                    logger.warning("adapter %s is unloaded, though %s", adapter.name, error)
                await asyncio.sleep(again)
        await adapter.free.wait()
        self._client.drop_adapter(adapter.id)

    # ---- of several API processes, those that are told ----

    def records(self) -> list[Record]:
        return [adapter.record for adapter in self]

    def join(self, records: Sequence[Record]) -> None:
        """What there was when this process had begun to listen; it may have heard of changes since."""
        retired, self._retired = self._retired or set(), None
        for record in records:
            if record.id not in retired and record.name not in self._served:
                self.take(record)

    def take(self, record: Record) -> None:
        """Another process has had it loaded, in the place of the one of that name that it knows. Raises ApiError where
        something else has the name here."""
        self._check_name(record.name)
        served = self._served.get(record.name)
        if served is not None and served.id not in (record.id, record.before):
            raise _invalid(f"`{shorten(record.name)}` is the name of another adapter here.", "lora_name")
        adapter = self._known.get(record.id)
        if adapter is None:
            adapter = ServedAdapter(record.name, record.path, record.id, record.parent, record.rank, record.version)
            adapter.free.set()
        self._client.know_adapter(LoadAdapter(record.id, record.path, record.name, record.version))
        self._served[record.name] = self._known[record.id] = adapter

    async def retire(self, id: int) -> None:
        """New requests no longer find it; returns when those here that use it are done."""
        if self._retired is not None:
            self._retired.add(id)
        adapter = self._known.pop(id, None)
        if adapter is None:
            return
        if self._served.get(adapter.name) is adapter:
            del self._served[adapter.name]
        await adapter.free.wait()
        self._client.drop_adapter(id)

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
            message = f"`{shorten(path)}` is no folder in that of --lora-dir."
            raise ApiError(404, message, type="NotFoundError", param="lora_path", code="adapter_not_found")
        return found


def _invalid(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, type=INVALID, param=param, code="invalid_adapter")
