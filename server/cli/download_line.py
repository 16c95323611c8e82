"""How far a download is, said in one line: bytes, speed, time left."""

from __future__ import annotations

import time

SPAN = 10.0  # seconds that the speed is a mean of


class Download:
    """Counts what comes; a download that goes on where it was broken off begins with what is there."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []  # (moment, bytes), the oldest first

    def line(self, done: int, total: int) -> str:
        """`done` of `total` bytes, the latter 0 where it is not known."""
        now = time.monotonic()
        self._seen = [*(one for one in self._seen if now - one[0] <= SPAN), (now, done)]
        first, before = self._seen[0]
        speed = (done - before) / (now - first) if now > first else 0.0
        text = f"downloading {amount(done, max(total, done))}" + (
            f" of {amount(total, total)} {unit(total)}" if total else f" {unit(done)}"
        )
        if speed > 0:
            text += f", {amount(int(speed), int(speed))} {unit(int(speed))}/s"
            if total > done:
                text += f", {duration((total - done) / speed)} left"
        return text


def unit(size: int) -> str:
    return "GB" if size >= 1e9 else "MB" if size >= 1e6 else "kB"


def amount(size: int, of: int) -> str:
    """In the unit of `of`."""
    return f"{size / {'GB': 1e9, 'MB': 1e6, 'kB': 1e3}[unit(of)]:.1f}"


def size(num_bytes: int) -> str:
    return f"{amount(num_bytes, num_bytes)} {unit(num_bytes)}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
