"""Heartbeats of API processes on the board: the first process looks after the others, and they look after it.

One that hangs, stopped or in a loop, has connections that nobody else can answer: only its end gives them back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

from ...engine.link import logs
from .board import BEATS, SERVES, Board
from .meeting import FIRST

logger = logging.getLogger("vserve")

BEAT = 0.5  # seconds between two
PATIENCE = 8.0  # seconds of silence until a process counts as hung: nothing that it does for requests takes so long
START_PATIENCE = 120.0  # the same before it takes requests: what it loads may hold the interpreter's lock
LONGEST_LOOK = 1.0  # seconds; see Pulse


async def beat(board: Board) -> None:
    """As long as the event loop turns, or until this is cancelled."""
    while True:
        board.add(BEATS, 1)
        await asyncio.sleep(BEAT)


class Pulse:
    """Of one process. While who looks was stopped or busy itself, the other one was not silent: of the time between two
    looks, so much counts at most."""

    def __init__(self, board: Board, seat: int) -> None:
        self._board, self._seat = board, seat
        self._beats = board.get(seat, BEATS)
        self._silent = 0.0
        self._looked = time.monotonic()

    def look(self, now: float) -> float:
        """Seconds of silence. `now`: time.monotonic()."""
        beats = self._board.get(self._seat, BEATS)
        self._silent = 0.0 if beats != self._beats else self._silent + min(LONGEST_LOOK, now - self._looked)
        self._beats, self._looked = beats, now
        return self._silent


async def watch_first(board: Board, stall_timeout: float) -> None:
    """By each of the others. It alone can start processes and end the server, so the server ends with it: who has
    started that starts another."""
    pulse = Pulse(board, FIRST)
    while True:
        patience = PATIENCE if board.get(FIRST, SERVES) else START_PATIENCE
        if (silent := pulse.look(time.monotonic())) >= max(patience, stall_timeout):
            break
        await asyncio.sleep(BEAT)
    parent = os.getppid()
    logger.error("the first API process has been silent for %.0f s: the server ends; its stacks follow", silent)
    logs.flush()
    os.kill(parent, signal.SIGUSR1)
    await asyncio.sleep(BEAT)
    os.kill(parent, signal.SIGKILL)  # the others, this one and the engines die with it
    await asyncio.sleep(BEAT)
    os._exit(1)  # it is process 1 of a container, which cannot be killed from inside: probes find nobody, and tell
