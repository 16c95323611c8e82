"""Log lines: one line each whatever is in them, and a log that cannot be written is nobody's problem."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.link import logs

HOSTILE = "a\r\nERROR forged\x1b[31m\x07\x00\x7f\x85\x9b2J\u2028\u202egnp"
CONTROLS = {*map(chr, range(32)), *map(chr, range(127, 160)), "\u2028", "\u2029", "\u202e"}


def record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": message, "args": args, **extra})


def failing() -> Any:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        return sys.exc_info()


@pytest.mark.parametrize("position", ["message", "argument", "exception"])
def test_text_cannot_be_forged(position: str) -> None:
    line = logs.TextFormatter().format(
        record(
            HOSTILE if position == "message" else "say %s",
            *([HOSTILE] if position == "argument" else ["this"] if position == "exception" else []),
            exc_info=failing() if position == "exception" else None,
        )
    )
    head, *rest = line.split("\n")
    assert " INFO " in head and all(more.startswith("    ") for more in rest)
    assert not CONTROLS & set(line.replace("\n", "")) and "forged" in line


def test_json_is_one_ascii_line() -> None:
    formatter = logs.JsonFormatter("api")
    fields = {"fields": {"client": HOSTILE, "n": 3}}
    line = formatter.format(record("say %s", HOSTILE, exc_info=failing(), created=1.25, **fields))
    assert line.isascii() and line.isprintable()
    parsed = json.loads(line)
    assert parsed["message"] == "say " + HOSTILE and parsed["client"] == HOSTILE and parsed["n"] == 3
    assert parsed["time"] == "1970-01-01T00:00:01.250Z" and parsed["process"] == "api" and parsed["level"] == "info"
    assert "ValueError" in parsed["exception"]


def test_escape() -> None:
    assert logs.escape("a\r\n\tb\x1b\u2028ü") == "a\\r\\n\\tb\\x1b\\u2028ü"
    assert logs.escape("plain") == "plain"


def test_unprintable_message_is_said_so(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file:
        writer = logs.LineWriter(file.fileno())
        writer.setFormatter(logs.TextFormatter())
        writer.emit(record("%d things", "no number"))
        writer.emit(record("fine"))
        writer.wait(10)
    first, second = (tmp_path / "log").read_text().splitlines()
    assert "unprintable" in first and second.endswith("fine") and writer.num_lost == 0


def test_stalled_reader_costs_lines_not_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING_LINES", 100)
    reader, descriptor = os.pipe()
    writer = logs.LineWriter(descriptor)
    writer.setFormatter(logs.TextFormatter())
    written = 2000
    for i in range(written):  # far more than pipe and queue hold
        writer.emit(record("line %d " + "x" * 1000, i))
    lost = writer.num_lost
    assert lost > 0
    with open(reader, "rb") as pipe:
        seen = [pipe.readline() for _ in range(written - lost + 1)]
        writer.emit(record("after"))
        seen.append(pipe.readline())
    assert any(b"log lines were lost" in line for line in seen)


def test_full_disk_is_counted() -> None:
    with open("/dev/full", "w") as full:
        writer = logs.LineWriter(full.fileno())
        writer.setFormatter(logs.TextFormatter())
        writer.emit(record("nobody reads this"))
        writer.wait(10)
        assert writer.num_lost == 1


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "0<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_standard_streams_may_be_missing(redirection: str, tmp_path: Path) -> None:
    """No socket or file takes a closed stream's place, and neither logging nor the end of the process fails."""
    program = (
        "import logging, os, sys\nfrom vserve.engine.link import logs\nlogs.open_standard_streams()\n"
        f"mine = os.open({str(tmp_path / 'mine')!r}, os.O_CREAT | os.O_WRONLY)\nassert mine > 2, mine\n"
        "logs.configure('info', 'json', 'api')\nlogging.error('hello')\nlogs.say('hello')\nlogs.flush()\n"
    )
    done = subprocess.run(["sh", "-c", f'{sys.executable} -c "$0" {redirection}', program], timeout=240)
    assert done.returncode == 0 and (tmp_path / "mine").read_bytes() == b""


def test_lines_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    program = (
        "import logging, sys\nfrom vserve.engine.link import logs\nlogs.configure('info', 'json', sys.argv[1])\n"
        "for i in range(2000): logging.info('%s %d %s', sys.argv[1], i, sys.argv[1] * 200)\nlogs.flush(30)\n"
    )
    with open(tmp_path / "log", "ab") as file:
        processes = [subprocess.Popen([sys.executable, "-c", program, name], stderr=file) for name in ("api", "engine")]
        assert [process.wait(60) for process in processes] == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    for name in ("api", "engine"):
        numbers = [int(line["message"].split()[1]) for line in lines if line["process"] == name]
        assert numbers == list(range(2000))


def test_a_child_logs_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_arguments", [])
    assert logs.arguments()[-1] == "text"
    monkeypatch.setattr(logs, "_arguments", ["--log-level", "DEBUG", "--log-format", "json"])
    assert logs.arguments() == ["--log-level", "DEBUG", "--log-format", "json"]


def test_logging_is_cheap_for_who_logs(tmp_path: Path, costs_at_most: Any) -> None:
    """Handing a line over costs no more than a few times formatting it: no write, no wait."""
    formatter = logs.JsonFormatter("api")
    entry = record("a line of some length", fields={"request_id": "x", "seconds": 1.0})
    with open(tmp_path / "log", "w") as file:
        writer = logs.LineWriter(file.fileno())
        writer.setFormatter(formatter)

        def seconds(work: Callable[[logging.LogRecord], object]) -> float:
            started = time.process_time()
            for _ in range(2000):
                work(entry)
            spent = time.process_time() - started
            writer.wait(30)
            return spent

        assert costs_at_most(20, lambda: seconds(writer.emit), lambda: seconds(formatter.format))


def test_a_line_does_not_follow_a_progress_line(tmp_path: Path) -> None:
    reader, terminal = os.openpty()
    writer = logs.LineWriter(terminal)
    writer.setFormatter(logs.TextFormatter())
    os.write(terminal, b"starting: weights")
    writer.emit(record("next"))
    writer.wait(30)
    shown = ""
    while not shown.endswith("\n"):  # a terminal hands on in pieces, later, what it was given in one
        shown += os.read(reader, 1000).decode()
    assert shown.startswith("starting: weights\r\x1b[K") and shown.endswith(" INFO next\r\n")
    for descriptor in (reader, terminal):
        os.close(descriptor)


def test_lines_that_come_together_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[bytes] = []
    monkeypatch.setattr(logs.os, "write", lambda descriptor, data: pieces.append(bytes(data)) or len(data))
    writer = logs.LineWriter(2)
    writer.setFormatter(logs.TextFormatter())
    for i in range(200):
        writer.emit(record("line %d ü" + "x" * 90, i))
    writer.emit(record("y" * 9000))
    writer.wait(30)
    lines = b"".join(pieces).decode().splitlines()
    assert [int(line.split()[3]) for line in lines[:200]] == list(range(200)) and lines[200].endswith("y" * 9000)
    assert all(piece.endswith(b"\n") for piece in pieces), "other processes would write into a line"
    assert all(len(piece) <= select.PIPE_BUF or piece.count(b"\n") == 1 for piece in pieces)
    assert len(pieces) < 40, "each costs the waking of a thread"


def test_fields_that_are_a_function_are_asked_by_who_writes(tmp_path: Path) -> None:
    asked: list[str] = []

    def fields() -> dict[str, Any]:
        asked.append(threading.current_thread().name)
        return {"message": "short", "n": 3}

    with open(tmp_path / "log", "w") as file:
        writer = logs.LineWriter(file.fileno())
        writer.setFormatter(logs.JsonFormatter("api"))
        writer.emit(record("the whole of it", fields=fields, created=1.25))
        writer.wait(30)
    assert asked == ["vserve-log"]
    line = json.loads((tmp_path / "log").read_text())
    assert (line["message"], line["n"], line["process"]) == ("short", 3, "api")
    assert logs.TextFormatter().format(record("the whole of it", fields=fields)).endswith("the whole of it")


@pytest.mark.parametrize("hurried_by", ["another line", "the end"])
def test_lines_of_requests_are_written_together_and_wait_for_nobody_who_hurries(
    monkeypatch: pytest.MonkeyPatch, hurried_by: str
) -> None:
    """A thread that wakes for each of them costs ten times what the line does."""
    monkeypatch.setattr(logs, "GATHER_LAZY", 60.0)
    written: list[tuple[str, int]] = []
    monkeypatch.setattr(logs, "write_line", lambda descriptor, text: written.append((text, descriptor)) or True)
    writer = logs.LineWriter(-1)
    writer.setFormatter(logging.Formatter("%(message)s"))
    for number in range(3):
        writer.emit(record("request %d", number, fields=dict))
    time.sleep(0.05)
    assert not written
    if hurried_by == "another line":
        writer.emit(record("an alarm"))
    writer.wait(30)
    lines = [line for text, _ in written for line in text.splitlines()]
    assert lines == ["request 0", "request 1", "request 2", *(["an alarm"] if hurried_by == "another line" else [])]
    assert len(written) == 1
