"""The engine of processes that torchrun has started, as all but the first of them see it: it runs beside the first one,
and what it says comes here too, so that each process answers its own caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from ...engine.errors import ConfigError
from ...engine.link.messages import AddRequest, FromEngine, LastSteps, ReadSteps, StepOutputs
from ...engine.options.config import EngineConfig
from ...engine.ranks.handshake import facts
from ...engine.ranks.messages import Asked, Word
from ...engine.ranks.node import Node

logger = logging.getLogger(__name__)

GOODBYE = 10.0  # seconds that the first process may take longer than this one to be done


class LaunchedEngine:
    """With the face of EngineProcess. This process's rank runs in a process beside it, as a node's does.

    All processes ask for the same in the same order, so their requests have the same ids. What concerns one that this
    process has still to ask for waits for it."""

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        """`on_lost` gets the cause in one line."""
        self._on_message, self._on_lost = on_message, on_lost
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(Word)
        self._heard: deque[FromEngine | Asked | _End] = deque()
        self._asked: dict[int, Asked] = {}  # by this process; the first one has still to ask
        self._newest = 0  # id that this process has given to anything
        self._ending = False
        self._node: Node | None = None
        self._thread: threading.Thread | None = None

    async def start(self, config: EngineConfig, variables: Mapping[str, str] = {}) -> None:
        """Returns at once; the engine's words follow."""
        self._node = Node(
            config.node_rank, (config.master_addr, config.master_port), config.cluster_secret or "", facts(config),
            config.distributed_timeout_seconds, config.host_ip, variables, threads=config.cpu_threads or 0,
            hear=lambda word: self._soon(self._hear, word),
        )  # fmt: skip
        # The rank ends with this thread.
        self._thread = threading.Thread(target=self._serve, args=(self._node,), name="vserve-launched", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """The first process says it to the engine; here it is known from now on what its words are about."""
        if isinstance(message, AddRequest):
            self._newest = message.id + message.n - 1
            self._asked[message.id] = Asked.of(message)
        elif isinstance(message, ReadSteps):
            self._newest = message.id
        self._loop.call_soon(self._pass_on)  # once whoever asks is ready to hear

    def is_stopped(self) -> bool:
        return False  # as far as this process knows

    is_suspended = is_stopped

    def dump_stacks(self) -> None:
        """The first process has its engine do that."""

    def kill(self) -> None:
        if self._node is not None:
            self._node.leave()

    async def end(self, seconds: float = GOODBYE) -> None:
        """The rank here lives until the first process has closed the engine too, but for so long at most."""
        self._ending = True
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, seconds)
            self.kill()
            await asyncio.to_thread(self._thread.join, 1.0)

    def _serve(self, node: Node) -> None:
        try:
            in_order = node.serve()
            how = "has closed the engine" if in_order else "or its engine has ended: its last words say why"
            cause = f"the first process of torchrun's {how}"
        except ConfigError as error:
            cause = str(error)
        except Exception as error:
            logger.exception("the rank of this process cannot be run")
            cause = f"the rank of this process cannot be run: {error or type(error).__name__}"
        self._soon(self._end_with, cause)

    def _soon(self, work: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for it
            self._loop.call_soon_threadsafe(work, *arguments)

    def _hear(self, word: bytes) -> None:
        self._heard.append(self._decoder.decode(word))
        self._pass_on()

    def _end_with(self, cause: str) -> None:
        """No word follows. What has been heard holds: the first process may be done long before this one."""
        self._heard.append(_End(cause))
        self._pass_on()

    def _lost(self, cause: str) -> None:
        if not self._ending:
            self._on_lost(cause)

    def _pass_on(self) -> None:
        while self._heard and _newest(self._heard[0]) <= self._newest:
            message = self._heard.popleft()
            if isinstance(message, _End):
                self._lost(message.cause)
            elif not isinstance(message, Asked):
                self._on_message(message)
            elif self._asked.pop(message.id, None) != message:
                self._lost(
                    f"request {message.id} is another one in the first process of torchrun's: all processes must ask "
                    "for the same, in the same order"
                )


class _End(NamedTuple):
    cause: str


def _newest(message: FromEngine | Asked | _End) -> int:
    """The highest id of a request that it is about; 0: of none."""
    if isinstance(message, StepOutputs):
        return max((output.id for output in message.outputs), default=0)
    return message.id if isinstance(message, Asked | LastSteps) else 0
