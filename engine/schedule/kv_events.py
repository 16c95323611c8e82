"""What the prefix cache gains and loses, told to routers outside: vLLM's events, as msgpack over a ZeroMQ PUB socket.

Of messages: topic, number of the batch (8 bytes, big-endian), batch: [time.time(), events, rank]. Batches are numbered
from 0 on since the engine was started; whoever has missed some asks the replay socket for all from a number on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import ConfigError

logger = logging.getLogger(__name__)

LINGER = 200  # milliseconds for the last events to leave
MEDIUM = "GPU"  # as vLLM calls the cache that steps read, wherever it lies


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


def name_of(key: bytes) -> int:
    """What events call a block: the end of its hash, 64 bits of it, as vLLM does."""
    return int.from_bytes(key[24:32], "big")


def _text(salt: str) -> str:
    """JSON may hold lone surrogates, which no message may."""
    return salt.encode("utf-8", "replace").decode()


class KVEvents:
    """Collects what happens in a step, in its order. Blocks of equal content count once: they are told of when the
    first comes, and when the last goes."""

    def __init__(
        self, publish: Any, block_size: int, windows: Sequence[int], adapter_names: Mapping[int, str] = {}
    ) -> None:
        """`publish` takes a list of events. `windows`: of the KV groups, 0: all. `adapter_names`: by the ids of their
        loads, as they are at any time."""
        self._publish = publish
        self._adapter_names = adapter_names
        self._block_size = block_size
        self._windows = windows
        self._events: list[Event] = [AllBlocksCleared()]  # who knew an engine that died here

    def stored(
        self, group: int, keys: Sequence[bytes], parent: bytes | None, token_ids: Sequence[int], salt: str | None,
        is_first: bool, adapter: int = 0, pictures: Sequence[tuple[str, ...]] = (),
    ) -> None:  # fmt: skip
        """Blocks that follow each other. `is_first`: the first one is that of a prompt, which a salt is part of.
        `adapter`: id of its load, 0: none. `pictures`: of each block, what names those in it; empty: there are none."""
        window = self._windows[group]
        extras = list(pictures) or [()] * len(keys)
        if salt is not None and is_first:
            extras[0] = (_text(salt), *extras[0])
        self._events.append(
            BlockStored(
                [name_of(key) for key in keys], None if parent is None else name_of(parent), list(token_ids),
                self._block_size, adapter or None, MEDIUM, self._adapter_names.get(adapter),
                [extra or None for extra in extras] if any(extras) else None, group,
                "sliding_window" if window else "full_attention", window or None,
            )
        )  # fmt: skip

    def removed(self, key: bytes) -> None:
        group = int.from_bytes(key[32:], "little")
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(name_of(key))
        else:
            self._events.append(BlockRemoved([name_of(key)], MEDIUM, group))

    def flush(self) -> None:
        """After a step."""
        if self._events:
            events, self._events = self._events, []
            self._publish(events)


class Publisher:
    """Encodes and sends on a thread of its own, and answers who asks for a replay on another."""

    def __init__(self, given: dict[str, Any]) -> None:
        """`given`: see settings. Raises ConfigError where an endpoint cannot be taken."""
        import zmq

        self._encoder = msgspec.msgpack.Encoder()
        self._rank = given["data_parallel_rank"]
        self._topic = given["topic"].encode()
        self._as_arrays = given["event_format"] == "array"
        self._queue: queue.Queue[tuple[float, list[Event]] | None] = queue.Queue(given["max_queue_size"])
        self._lost = False  # batches were dropped because nobody came round to send them
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(given["hwm"])
        self._pub.setsockopt(zmq.TCP_MAXRT, LOST)
        endpoint = given["endpoint"]
        binds = given["bind"] or not endpoint.startswith("tcp://")
        self._open(self._pub.bind if binds else self._pub.connect, endpoint)
        self._replays = None
        if given["replay_endpoint"]:
            router = self._context.socket(zmq.ROUTER)
            limit(router)
            self._open(router.bind, given["replay_endpoint"])
            self._replays = Replays(router, given["buffer_steps"])
        for work in (self._send_all, *([self._replays.run] if self._replays is not None else [])):
            threading.Thread(target=work, name="kv-events", daemon=True).start()

    def publish(self, events: list[Event]) -> None:
        """Never waits: of what nobody sends in time, the newest is lost, and then who listens has to start over."""
        if self._lost:
            events = [AllBlocksCleared(), *events]
        try:
            self._queue.put_nowait((time.time(), events))
        except queue.Full:
            if not self._lost:
                logger.warning("cache events are lost: %d steps wait to be published", self._queue.qsize())
            self._lost = True
        else:
            self._lost = False

    def close(self) -> None:
        """Returns when what waits has been sent, or LINGER is over. Each thread closes its own socket."""
        self._queue.put(None)
        self._context.term()

    def encode(self, moment: float, events: list[Event]) -> bytes:
        shown = [_as_array(event) for event in events] if self._as_arrays else events
        return self._encoder.encode((moment, shown, self._rank))

    def _open(self, function: Any, endpoint: str) -> None:
        import zmq

        try:
            function(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"--kv-events-config: {endpoint} cannot be used ({error}); name another endpoint"
            ) from None

    def _send_all(self) -> None:
        number = 0
        while (batch := self._queue.get()) is not None:
            payload = self.encode(*batch)
            if self._replays is not None:
                self._replays.keep(number, payload)
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            number += 1
        self._pub.close(linger=LINGER)


def _as_array(event: Event) -> list[Any]:
    """As vLLM wrote them up to 0.22, for who reads that alone."""
    if isinstance(event, BlockStored):
        named = [event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, event.lora_id,
                 event.medium, event.lora_name, event.extra_keys, event.group_idx]  # fmt: skip
        return ["BlockStored", *named]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", event.block_hashes, event.medium, event.group_idx]
    return ["AllBlocksCleared"]


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
