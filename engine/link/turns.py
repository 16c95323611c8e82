"""How long a thread keeps the interpreter's lock while others wait for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

USUAL_TURN = sys.getswitchinterval()  # seconds
SHORT_TURN = 0.0005

_lock = Lock()
_num_long = 0  # threads at long work


@contextmanager
def short_turns() -> Iterator[None]:
    """For long work in Python on a thread. An event loop or a step beside it asks for the lock again and again, each
    time for a turn's length and for each thread that waits with it: with turns of the usual 5 ms others' tokens came up
    to 20 ms late. Turns are short until the last such work in this process has ended."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _num_long
    with _lock:
        _num_long += change
        sys.setswitchinterval(SHORT_TURN if _num_long else USUAL_TURN)
