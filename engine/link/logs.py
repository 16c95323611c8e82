"""Log lines of every process: one format, one write a line, and a log that nobody takes never holds up the server."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import queue
import re
import select
import signal
import sys
import threading
import time
from typing import Any

import msgspec

FORMATS = ("auto", "json", "text")
CLEAR_LINE = "\r\x1b[K"  # on a terminal
GATHER = 0.01  # seconds in which lines come together for one write: waking a thread for each costs more than the line
GATHER_LAZY = 0.1  # the same where all are lines of requests, which nobody reads that soon
ATOMIC = select.PIPE_BUF  # bytes that a pipe takes in one piece
MAX_WAITING_LINES = 10_000  # what a reader that has stopped may cost; a line more is lost, and counted
# C0 and C1 controls, line and paragraph separators, and what turns the direction of writing around.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_NAMES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape(text: str) -> str:
    """One line without control characters: what a client sends can neither begin a line nor colour it."""
    return _UNSAFE.sub(_escape_character, text)


def _escape_character(match: re.Match[str]) -> str:
    character = match[0]
    return _NAMES.get(character) or (f"\\x{ord(character):02x}" if character < "\x80" else f"\\u{ord(character):04x}")


class TextFormatter(logging.Formatter):
    """For people. Only our own line breaks survive, and what follows one is indented: it cannot pass for a line."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if record.stack_info:
            text += "\n" + record.stack_info
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head, *rest = map(escape, text.split("\n"))
        return "\n    ".join([f"{clock} {record.levelname} {head}", *rest])


class JsonFormatter(logging.Formatter):
    """For programs: an object a line, with `extra={"fields": {...}}` of the call, or of what that returns when it is
    called. ASCII only, so nothing to escape."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._second, self._clock = -1, ""  # of the last line, and how it is written

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._clock = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        fields = _fields(record)
        line: dict[str, Any] = {
            "time": f"{self._clock}.{int((record.created - second) * 1000):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": fields["message"] if "message" in fields else record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return to_json(line)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found = getattr(record, "fields", {})
    fields: dict[str, Any] = found() if callable(found) else found
    return fields


_encode = msgspec.json.Encoder(enc_hook=str).encode


def to_json(line: dict[str, Any]) -> str:
    """json.dumps, at a fraction of its time for what has nothing to escape."""
    try:
        text = _encode(line).decode()
    except (ValueError, TypeError, msgspec.MsgspecError):  # half a surrogate pair, a strange key
        text = "\n"
    return text if text.isascii() and text.isprintable() else json.dumps(line, default=str)


class LineWriter(logging.Handler):
    """Lines to a file descriptor, on a thread: a full disk loses lines, a stalled pipe fills a bounded queue.

    Records whose fields are a function are formatted there too, many in a row, which costs a fraction of what it does
    between two requests: they wait for each other. Others may hold what changes, and are formatted at once.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.num_lost = 0
        self._descriptor = descriptor
        self._begin = CLEAR_LINE if os.isatty(descriptor) else ""  # some process's progress line may stand there
        # Of the simple kind, which costs a tenth of the other; it knows no bound, so `_put` does.
        self._lines: queue.SimpleQueue[str | logging.LogRecord | threading.Event] = queue.SimpleQueue()
        self._hurry = threading.Event()  # what waits in the queue is to be written now
        self._thread = threading.Thread(target=self._run, name="vserve-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if callable(getattr(record, "fields", None)):
            self._put(record)
        elif self._put(self._text(record)):
            self._hurry.set()

    def _put(self, entry: str | logging.LogRecord | threading.Event) -> bool:
        """Whether there was room."""
        if self._lines.qsize() >= MAX_WAITING_LINES:
            self.num_lost += not isinstance(entry, threading.Event)
            return False
        self._lines.put(entry)
        return True

    def _text(self, record: logging.LogRecord) -> str:
        try:
            return self.format(record)
        except Exception:  # a message that does not fit its arguments must not cost a request
            return f"unprintable log message {record.msg!r} of {record.pathname}:{record.lineno}"

    def wait(self, timeout: float) -> None:
        """Until all that was logged so far is written, at most `timeout` seconds."""
        written = threading.Event()
        if self._put(written):
            self._hurry.set()
            written.wait(timeout)

    def _run(self) -> None:
        reported = 0
        while True:
            entries = [self._lines.get()]
            if isinstance(entries[0], logging.LogRecord):
                self._hurry.wait(GATHER_LAZY)
            elif isinstance(entries[0], str):
                time.sleep(GATHER)
            self._hurry.clear()
            with contextlib.suppress(queue.Empty):
                while not isinstance(entries[-1], threading.Event):
                    entries.append(self._lines.get_nowait())
            lines = (entry if isinstance(entry, str) else self._text(entry)
                     for entry in entries if not isinstance(entry, threading.Event))  # fmt: skip
            self._write([self._begin + line for line in lines])
            if isinstance(entries[-1], threading.Event):
                entries[-1].set()
            elif (lost := self.num_lost) > reported and write_line(self._descriptor, self._begin + self._report(lost)):
                reported = lost  # else it is said when the next line comes

    def _report(self, lost: int) -> str:
        return self._text(logging.makeLogRecord({
            "name": __name__, "levelno": logging.WARNING, "levelname": "WARNING",
            "msg": "%d log lines were lost so far: their reader was too slow or their disk full", "args": (lost,),
        }))  # fmt: skip

    def _write(self, lines: list[str]) -> None:
        """As many at once as a pipe takes in one piece, so that those of other processes come between whole lines."""
        waiting: list[str] = []
        size = 0
        for line in [*lines, None]:
            length = 0 if line is None else 1 + len(line.encode("utf-8", "backslashreplace"))
            if waiting and (line is None or size + length > ATOMIC):
                if not write_line(self._descriptor, "\n".join(waiting)):
                    self.num_lost += len(waiting)
                waiting, size = [], 0
            if line is not None:
                waiting.append(line)
                size += length


_writer: LineWriter | None = None
_arguments: list[str] = []


def configure(level: str = "info", format: str = "auto", process: str = "engine") -> None:
    """Sends all log records of this process to stderr; auto: text on a terminal, JSON elsewhere."""
    global _writer, _arguments
    if format == "auto":
        format = "text" if os.isatty(2) else "json"
    if _writer is None:
        _writer = LineWriter(2)
        atexit.register(flush)
    # What no format here shows need not be found out for each line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    _writer.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[_writer], force=True)
    # httpx has a line for every request, of a download as of a question among processes.
    logging.getLogger("httpx").setLevel(max(logging.WARNING, logging.getLogger().level))
    _arguments = ["--log-level", level.upper(), "--log-format", format]


def arguments() -> list[str]:
    """Flags with which a process that this one starts logs alike."""
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
    return _arguments or ["--log-level", level, "--log-format", "text"]


def flush(timeout: float = 1.0) -> None:
    """Before the process ends, and before a last word that must come last."""
    if _writer is not None:
        _writer.wait(timeout)


def num_lost_lines() -> int:
    return 0 if _writer is None else _writer.num_lost


def write_line(descriptor: int, text: str) -> bool:
    """In one call, so that lines of several processes do not mix. False where it could not be written."""
    data = text.encode("utf-8", "backslashreplace") + b"\n"
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return False
    return True


def say(text: str) -> None:
    """To stdout, if anybody is there. Unlike print(), it cannot fail, neither now nor when Python ends."""
    write_line(1, text)


def open_standard_streams() -> None:
    """Who starts a process with stdin, stdout or stderr closed would have its next socket become that stream."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def die_with_parent(parent: int) -> None:
    """Asks Linux to kill this process when process `parent`, which started it, ends, however it ends."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before
            os._exit(0)


def dump_stacks_on_signal() -> None:
    """SIGUSR1 and fatal signals write the stacks of all threads to stderr, also while the GIL is held."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
