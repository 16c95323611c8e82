"""What the server needs of the engine, wherever that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ...engine.config import EngineConfig
from ...engine.messages import EngineInfo, EngineStats, Progress, StepRecord, StepReports, ToEngine
from ...engine.request import SamplingParams
from .mailbox import MailboxLike


class Client(Protocol):
    """EngineClient is one."""

    config: EngineConfig
    info: EngineInfo
    ready: bool
    phase: Progress | None
    down: str | None
    dead: str | None
    stalled: float | None
    epoch: int
    num_restarts: int
    num_stalls: int
    stats: EngineStats
    stats_listeners: list[Any]

    def submit_choices(
        self,
        n: int,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Sequence[MailboxLike]: ...

    def abort(self, mailboxes: Iterable[Any]) -> None: ...

    def send(self, message: ToEngine) -> None: ...

    def expire(self, mailboxes: Iterable[Any]) -> None: ...

    def watch_steps(self, listener: Callable[[StepReports], None]) -> None: ...

    def unwatch_steps(self, listener: Callable[[StepReports], None]) -> None: ...

    async def last_steps(self, count: int) -> list[StepRecord]: ...

    @property
    def retry_after(self) -> int: ...
