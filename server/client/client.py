"""What the server needs of the engine, wherever that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...engine.link.media import MediaItem
from ...engine.link.messages import (
    AdapterLoaded,
    EngineInfo,
    EngineStats,
    LoadAdapter,
    Progress,
    StepRecord,
    StepReports,
    ToEngine,
)
from ...engine.link.sampling_params import SamplingParams
from ...engine.options.config import EngineConfig
from .mailbox import EngineDeadError, MailboxLike
from .routing import ANYWHERE, Route

if TYPE_CHECKING:
    from .engine_client import EngineClient


class Client(Protocol):
    """EngineClient is one, Replicas another."""

    config: EngineConfig
    stats_listeners: list[Any]
    progress_listeners: list[Callable[[Progress], None]]
    death_listeners: list[Callable[[str], None]]

    @property
    def info(self) -> EngineInfo: ...

    @property
    def ready(self) -> bool: ...

    @property
    def phase(self) -> Progress | None: ...

    @property
    def down(self) -> str | None: ...

    @property
    def dead(self) -> str | None: ...

    @property
    def stalled(self) -> float | None: ...

    @property
    def epoch(self) -> int: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def num_stalls(self) -> int: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def engines(self) -> Sequence[EngineClient]:
        """All of them, those that are down too."""
        ...

    async def start(self) -> None: ...

    def submit_choices(
        self,
        n: int,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: int = 0,
        route: Route = ANYWHERE,
        media: tuple[MediaItem, ...] = (),
    ) -> Sequence[MailboxLike]: ...

    async def load_adapter(self, message: LoadAdapter) -> AdapterLoaded: ...

    def know_adapter(self, message: LoadAdapter) -> None:
        """Another API process has had it loaded: engines that start again are told by this one, too."""
        ...

    def drop_adapter(self, id: int) -> None: ...

    def abort(self, mailboxes: Iterable[Any]) -> None: ...

    def send(self, message: ToEngine) -> None: ...

    def expire(self, mailboxes: Iterable[Any]) -> None: ...

    def watch_steps(self, listener: Callable[[StepReports], None]) -> None: ...

    def unwatch_steps(self, listener: Callable[[StepReports], None]) -> None: ...

    async def last_steps(self, count: int) -> list[StepRecord]: ...

    @property
    def retry_after(self) -> int: ...

    def fail_all(self, error: EngineDeadError) -> None: ...

    def kill(self) -> None: ...

    async def close(self) -> None: ...
