"""Several API processes that one engine works for. Ids tell whose a request is: each process has a range of them."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import msgspec

from .connection import Connection
from .messages import (
    AbortRequests,
    AddGrammar,
    AddRequest,
    DropGrammars,
    EngineInfo,
    FromEngine,
    Hello,
    LastSteps,
    RequestOutput,
    SetVocabulary,
    Shutdown,
    StepOutputs,
    StepReports,
    ToEngine,
    WatchSteps,
)

logger = logging.getLogger(__name__)

SHIFT = 48  # bits of an id below the number of its client
FIRST = 0  # the client that has started the engine, and alone may end it
# Bytes that wait for a guest until it is dropped. The largest single message, log-probabilities of a long prompt, has
# tens of millions; one that is merely busy has read them in a second.
MOST_UNREAD = 256 << 20


class Guest:
    """A client that came by itself."""

    def __init__(self) -> None:
        self.number: int | None = None  # until it has said Hello
        self.connection: Connection

    def send(self, message: FromEngine) -> None:
        """One that reads nothing is dropped: it can come again, and what waits for it must not fill the memory."""
        if (unread := self.connection.unread) > MOST_UNREAD:
            logger.error("API process %s has left %d bytes unread: its requests are aborted", self.number, unread)
            self.connection.abort()
        else:
            self.connection.send(message)


class Clients:
    def __init__(self, send_first: Callable[[FromEngine], None], submit: Callable[[ToEngine], None]) -> None:
        """`send_first`: to the client that has started the engine; `submit` takes in what the clients want."""
        self.server: asyncio.Server | None = None  # held here: nobody else would
        self._send: dict[int, Callable[[FromEngine], None]] = {FIRST: send_first}
        self._submit = submit
        self._guests: dict[int, Guest] = {}  # by the number of the client
        self._info: EngineInfo | None = None
        self._open: defaultdict[int, set[int]] = defaultdict(set)  # ids, by guest
        self._grammars: dict[str, set[int]] = {}  # who wants each of them
        self._has_vocabulary = False
        self._watchers: set[int] = set()
        self._new_watchers: set[int] = set()  # for whom the map of all blocks is
        self._is_over = False

    async def finish(self, seconds: float) -> None:
        """See Connection, of each guest. Whoever comes again meanwhile hears nothing, and waits for the next engine."""
        self._is_over = True
        await asyncio.gather(*(guest.connection.finish(seconds) for guest in self._guests.values()))

    def accept(self) -> Connection:
        """For a guest that has connected."""
        guest = Guest()
        guest.connection = Connection(ToEngine | Hello, partial(self._receive, guest), partial(self._lost, guest))
        return guest.connection

    def take(self, client: int, message: ToEngine) -> None:
        """What a client wants; the engine hears of a grammar, or a vocabulary, once."""
        if isinstance(message, AddRequest) and client != FIRST:
            self._open[client].update(range(message.id, message.id + message.n))
        elif isinstance(message, SetVocabulary):
            if self._has_vocabulary:
                return
            self._has_vocabulary = True
        elif isinstance(message, AddGrammar):
            users = self._grammars.setdefault(message.key, set())
            users.add(client)
            if len(users) > 1:
                return
        elif isinstance(message, DropGrammars):
            message = DropGrammars([key for key in message.keys if self._drop(client, key)])
            if not message.keys:
                return
        elif isinstance(message, WatchSteps):
            change = set.add if message.on else set.discard
            change(self._watchers, client)
            change(self._new_watchers, client)
            if not message.on and self._watchers:
                return
        elif isinstance(message, Shutdown) and client != FIRST:
            return
        self._submit(message)

    def send(self, message: FromEngine) -> None:
        """To whom it concerns."""
        if isinstance(message, StepOutputs):
            self._send_outputs(message)
        elif isinstance(message, LastSteps):
            if (send := self._send.get(message.id >> SHIFT)) is not None:
                send(message)
        else:
            if isinstance(message, EngineInfo):
                self._info = message
            among = self._watching(message) if isinstance(message, StepReports) else self._send
            for client in list(among):
                self._send[client](message)

    def _watching(self, message: StepReports) -> set[int]:
        """Who gets this: steps go to all that watch, a map alone to those who have just come."""
        among = self._watchers if message.steps else self._new_watchers
        if not message.steps:
            self._new_watchers = set()
        return among & self._send.keys()

    def _send_outputs(self, message: StepOutputs) -> None:
        outputs: defaultdict[int, list[RequestOutput]] = defaultdict(list)
        preempted: defaultdict[int, list[int]] = defaultdict(list)
        num_begun = 0  # of guests
        for output in message.outputs:
            client = output.id >> SHIFT
            outputs[client].append(output)
            if client != FIRST:
                num_begun += output.num_cached_tokens is not None and output.token_ids != []
                if output.finish_reason is not None:
                    self._open[client].discard(output.id)
        for id in message.preempted:
            preempted[id >> SHIFT].append(id)
        # Everybody hears how the engine is; one counts the step.
        size = message.stats.step_tokens
        quiet = msgspec.structs.replace(message.stats, step_tokens=0)
        counted = msgspec.structs.replace(message.stats, step_tokens=size + num_begun if size else 0)
        for client, send in self._send.items():
            stats = counted if client == FIRST else quiet
            send(StepOutputs(outputs[client], stats, preempted[client]))

    # ---- guests ----

    def _receive(self, guest: Guest, message: ToEngine | Hello) -> None:
        if self._is_over:
            return
        if isinstance(message, Hello):
            if (before := self._guests.get(message.client)) is not None:  # it has come again before this one was missed
                self._lost(before, None)
            guest.number = message.client
            self._guests[message.client] = guest
            self._send[message.client] = guest.send
            if self._info is not None:
                guest.send(self._info)
        elif guest.number is not None:
            self.take(guest.number, message)

    def _lost(self, guest: Guest, error: Exception | None) -> None:
        """What it has asked for nobody reads any more."""
        if (client := guest.number) is None:
            return
        guest.number = None
        del self._guests[client], self._send[client]
        if ids := self._open.pop(client, None):
            self._submit(AbortRequests(sorted(ids)))
        if keys := [key for key in list(self._grammars) if self._drop(client, key)]:
            self._submit(DropGrammars(keys))
        self._new_watchers.discard(client)
        if client in self._watchers:
            self._watchers.discard(client)
            if not self._watchers:
                self._submit(WatchSteps(False))

    def _drop(self, client: int, key: str) -> bool:
        """Whether nobody wants this grammar any more, now that this client does not."""
        users = self._grammars.get(key, set())
        if client not in users:
            return False
        users.discard(client)
        if not users:
            del self._grammars[key]
        return not users
