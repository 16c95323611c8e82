"""Batches of cache events once more, for who has missed some: they ask a ZeroMQ ROUTER for all from a number on."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)  # the number of a replay's last message
MOST = 16  # replays at the same time; who asks while there are so many asks again
UNREAD = 64  # messages that wait for one client, beyond what its connection holds
PATIENCE = 10.0  # seconds in which a client has to read something, until its replay is given up
LOST = 60_000  # milliseconds in which a connection has to take a byte, until the system closes it
TURN = 0.005  # seconds between two turns: the engine's steps need the interpreter's lock as well


@dataclass
class Replay:
    next: int  # number of a batch
    end: int  # behind the last one that there was when it was asked for
    read: float  # time.monotonic() when a message could last be sent


class Replays:
    """Keeps the last batches and answers on a thread of its own. A client that does not read holds up nobody, and what
    waits for it is bounded: batches wait as the bytes that are kept here anyway."""

    def __init__(self, socket: Any, size: int) -> None:
        """`socket`: a ROUTER, see `limit`. `size`: batches that are kept."""
        self._socket = socket
        self._size = size
        self._batches: dict[int, bytes] = {}  # by their numbers, which follow each other
        self._end = 0  # behind the last number
        self._running: dict[bytes, Replay] = {}  # by client

    def keep(self, number: int, payload: bytes) -> None:
        """From another thread: the next batch."""
        self._batches[number] = payload
        self._batches.pop(number - self._size, None)
        self._end = number + 1

    def run(self) -> None:
        """Until the socket's context ends."""
        import zmq

        try:
            while True:
                if not self._running:
                    self._socket.poll()
                self._hear()
                self._send()
                time.sleep(TURN)
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _hear(self) -> None:
        """A few questions at a time: who asks more of them waits in its connection."""
        import zmq

        for _ in range(MOST):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client = frames[0]
            if len(frames) == 3 and len(frames[2]) <= 8 and client not in self._running and len(self._running) < MOST:
                self._running[client] = Replay(int.from_bytes(frames[2], "big"), self._end, time.monotonic())

    def _send(self) -> None:
        for client, replay in list(self._running.items()):
            if not self._goes_on(client, replay):
                del self._running[client]

    def _goes_on(self, client: bytes, replay: Replay) -> bool:
        """Sends what there is room for. Whether it was less than all."""
        import zmq

        replay.next = max(replay.next, self._end - self._size)  # what was dropped meanwhile is missing
        try:
            for _ in range(UNREAD):
                payload = self._batches.get(replay.next) if replay.next < replay.end else None
                number = END if payload is None else replay.next.to_bytes(8, "big")
                self._socket.send_multipart((client, b"", number, payload or b""), zmq.NOBLOCK, copy=False)
                if payload is None:
                    return False
                replay.next, replay.read = replay.next + 1, time.monotonic()
        except zmq.Again:
            if time.monotonic() - replay.read > PATIENCE:
                logger.warning("a replay of cache events is given up: its client has read nothing for %.0f s", PATIENCE)
                return False
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError as error:  # it has left
            logger.debug("replay: %s", error)
            return False
        return True


def limit(socket: Any) -> None:
    """Before it is bound: what waits for a client is bounded, and it is said where no more can be sent. One that is
    there and takes nothing is hung up on by the system, which ZeroMQ itself cannot do."""
    import zmq

    socket.set_hwm(UNREAD)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.TCP_MAXRT, LOST)
