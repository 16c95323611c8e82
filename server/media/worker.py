"""The process that decodes pictures: `python -m vserve.server.media.worker --fd N`.

It loads libraries and processor once, and forks children as the server asks for them. Each decodes one picture after
another, within limits of memory and time; one that crashes, hangs or eats too much dies alone, and forking another
takes milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
from typing import TYPE_CHECKING

import msgspec

from ...engine.link.media import MediaItem
from ...engine.vision.processors import decode
from .decode import item_of, unpacked

if TYPE_CHECKING:
    from ...engine.vision.processor import Processor

MEMORY_LIMIT = 3 << 29  # bytes of address space beyond what the libraries take
CPU_SECONDS = 20  # of one picture; it is killed then
NICENESS = 5  # the engine may share these cores
LENGTH = struct.Struct("<Q")
READY = b"!"  # a child's first word
_PR_SET_PDEATHSIG = 1


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A picture, whose bytes follow."""

    num_bytes: int
    is_base64: bool
    detail: str


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    item: MediaItem | None
    error: str = ""  # what is wrong with the picture, in words that go on with "it"


def send(sock: socket.socket, message: bytes, data: bytes = b"") -> None:
    """`data`: what follows the message, of a length that the message tells."""
    sock.sendall(LENGTH.pack(len(message)) + message)
    if data:
        sock.sendall(data)


def receive(sock: socket.socket) -> bytes:
    """The next message as it is encoded. Raises EOFError where the other end is gone."""
    return receive_bytes(sock, LENGTH.unpack(receive_bytes(sock, LENGTH.size))[0])


def receive_bytes(sock: socket.socket, count: int) -> bytes:
    received = bytearray(count)
    view, at = memoryview(received), 0
    while at < count:
        if not (length := sock.recv_into(view[at:])):
            raise EOFError
        at += length
    return bytes(received)


def serve(sock: socket.socket, processor: Processor) -> None:
    """Decodes what comes until the other end is gone."""
    while True:
        asked = msgspec.msgpack.decode(receive(sock), type=Asked)
        data = receive_bytes(sock, asked.num_bytes)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            data = unpacked(data) if asked.is_base64 else data
            answer = Decoded(item_of(data, processor, asked.detail))
        except ValueError as error:
            answer = Decoded(None, str(error))
        except MemoryError:
            answer = Decoded(None, "it takes too much memory to decode")
        send(sock, msgspec.msgpack.encode(answer))


def _be_child(sock: socket.socket, control: socket.socket, processor: Processor) -> None:
    """Ends the process: whatever happens here, the parent's loop must not go on in it."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        control.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # libraries print of what they read
            os.dup2(nothing, stream)
        with open("/proc/self/statm") as statm:
            size = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_LIMIT, size + MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sock.sendall(READY)
        with contextlib.suppress(EOFError, OSError):
            serve(sock, processor)
    finally:
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decodes pictures for a vserve process that holds the other end.")
    parser.add_argument("--fd", type=int, required=True, help="a connected Unix-domain socket")
    control = socket.socket(fileno=parser.parse_args().fd)
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    processor = decode(receive(control))
    import torch  # noqa: F401  # which resizes: before there are children, that share its memory

    while True:
        _, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not sockets:
            return
        with socket.socket(fileno=sockets[0]) as theirs:
            if os.fork() == 0:
                _be_child(theirs, control, processor)


if __name__ == "__main__":
    main()
