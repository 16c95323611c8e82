"""Reads a checkpoint's files into the page cache while torch is still being imported.

Copying weights from mapped files asks the disk for little at a time; large reads from several threads are several times
as fast, and they begin seconds earlier.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

PIECE = 16 << 20  # bytes of a read
NUM_THREADS = 8
WARM_SPEED = 4e9  # bytes a second of a thread; no disk is that fast, so the files are in memory already


class Prefetch:
    """Threads that read; they end by themselves, or soon after `stop`."""

    def __init__(self, files: list[Path]) -> None:
        self._pieces = iter([(file, at) for file in files for at in range(0, file.stat().st_size, PIECE)])
        self._lock = threading.Lock()
        self.stopped = False
        self.bytes_read = 0
        for i in range(NUM_THREADS):
            threading.Thread(target=self._read, name=f"prefetch-{i}", daemon=True).start()

    @classmethod
    def start(cls, model: str) -> Prefetch | None:
        """None where there is nothing to read, or more than half of the memory that is free."""
        try:
            files = sorted(Path(model).glob("*.safetensors"))
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            cached = _cached_bytes()
            if not files or sum(file.stat().st_size for file in files) > (free + cached) // 2:
                return None
            return cls(files)
        except (OSError, ValueError):  # the loader will say what is wrong
            return None

    def stop(self) -> None:
        self.stopped = True

    def _read(self) -> None:
        buffer, num_bytes = bytearray(PIECE), 0
        for count in itertools.count():
            with self._lock:
                self.bytes_read += num_bytes
                piece = None if self.stopped else next(self._pieces, None)
            if piece is None:
                return
            file, at = piece
            started = time.perf_counter()
            try:
                with open(file, "rb", buffering=0) as opened:
                    opened.seek(at)
                    num_bytes = opened.readinto(buffer) or 0
            except OSError:
                return
            if count == 0 and num_bytes > WARM_SPEED * (time.perf_counter() - started):
                self.stop()


def _cached_bytes() -> int:
    """What the kernel would give up for new pages."""
    with open("/proc/meminfo") as table:
        for line in table:
            if line.startswith("Cached:"):
                return int(line.split()[1]) << 10
    return 0
