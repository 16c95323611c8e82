"""The decoding processes as the server sees them: as many as may work at once, each replaced when it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading

import msgspec

from ...engine.link.media import MediaItem
from .frames import READY, Asked, Decoded, receive, receive_bytes, send

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # until the first process has loaded its libraries
SECONDS = 30.0  # of one picture, after which its process is killed


class DecoderError(Exception):
    """The process died, or took too long: of the picture's doing, most likely."""


class DecodeProcesses:
    """Blocking: for threads, of which each has a process to itself for as long as it decodes."""

    def __init__(self, processor: bytes) -> None:
        """`processor`: as engine/vision/processors.py encodes one."""
        self.num_restarts = 0
        self._processor = processor
        self._lock = threading.Lock()
        self._template: subprocess.Popen[bytes] | None = None  # that forks the others
        self._control: socket.socket | None = None
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    def start(self) -> None:
        """Returns before the libraries are loaded. Idempotent."""
        with self._lock:
            if self._control is None:
                self._begin()

    def decode(self, data: bytes, *, is_base64: bool, detail: str) -> MediaItem:
        """Raises ValueError with what is wrong with the picture, DecoderError."""
        asked = Asked(len(data), is_base64, detail)
        process = self._take()
        while process.is_gone:  # it ended when it had nothing to do: that is no doing of this picture
            self._lose(process)
            process = self._take()
        try:
            answer = process.ask(asked, data)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._lose(process)
            late = isinstance(error, TimeoutError)
            raise DecoderError(f"took longer than {SECONDS:g} s" if late else "ended its process") from None
        with self._lock:
            self._busy.discard(process)
            self._idle.append(process)
        if answer.item is None:
            raise ValueError(answer.error)
        return answer.item

    def close(self) -> None:
        """Idempotent. Who waits gets a DecoderError."""
        with self._lock:
            self._closed = True
            for process in (*self._idle, *self._busy):
                process.close()
            self._idle.clear()
            if self._control is not None:
                self._control.close()
            if self._template is not None:
                self._template.kill()
                self._template.wait()

    def _take(self) -> _Process:
        with self._lock:
            if self._closed:
                raise DecoderError("came when the server was about to end")
            process = self._idle.pop() if self._idle else self._fork()
            self._busy.add(process)
            return process

    def _lose(self, process: _Process) -> None:
        with self._lock:
            self._busy.discard(process)
            self.num_restarts += 1
        process.close()
        logger.warning("a process that decoded a picture died; another one is started")

    def _fork(self) -> _Process:
        """With the lock held."""
        for _ in range(2):
            if self._control is None:
                self._begin()
            assert self._control is not None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                try:
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                    return _Process(ours)
                except OSError:  # the template is gone
                    ours.close()
                    self._control.close()
                    self._control = None
        raise DecoderError("finds no process to decode it")

    def _begin(self) -> None:
        if self._template is not None:
            self._template.kill()
            self._template.wait()
            self.num_restarts += 1
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # One thread: the process forks. No GPU: torch would start threads for it.
        alone = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        with theirs:
            self._template = subprocess.Popen(
                [sys.executable, "-m", "vserve.server.media.worker", "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env=os.environ | alone | {"CUDA_VISIBLE_DEVICES": ""},
            )
        send(self._control, self._processor)


class _Process:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._is_ready = False

    @property
    def is_gone(self) -> bool:
        """An idle one says nothing: what there is to read is the end."""
        return self._is_ready and bool(select.select([self._socket], [], [], 0)[0])

    def ask(self, asked: Asked, data: bytes) -> Decoded:
        """Raises OSError, of which TimeoutError is one, and EOFError."""
        if not self._is_ready:
            self._socket.settimeout(START_SECONDS)
            receive_bytes(self._socket, len(READY))
            self._is_ready = True
        self._socket.settimeout(SECONDS)
        send(self._socket, msgspec.msgpack.encode(asked), data)
        return msgspec.msgpack.decode(receive(self._socket), type=Decoded)

    def close(self) -> None:
        """It ends when it next reads; what it is at has a limit of its own."""
        with contextlib.suppress(OSError):  # whoever waits for it wakes up
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
