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
from typing import TYPE_CHECKING

import msgspec

from ...engine.vision.processors import decode
from .decode import item_of, unpacked
from .frames import READY, Asked, Decoded, receive, receive_bytes, send

if TYPE_CHECKING:
    from ...engine.vision.processor import Processor

MEMORY_LIMIT = 3 << 29  # bytes of address space beyond what the libraries take
CPU_SECONDS = 20  # of one picture; it is killed then
NICENESS = 5  # the engine may share these cores
_PR_SET_PDEATHSIG = 1


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
