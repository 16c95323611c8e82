"""Folders that processes of a server meet in. Whoever makes one removes it; one whose maker was killed is removed by
the next process that makes one of its kind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

OWNER = "owner"  # a file with the number of the process: without it a folder is nobody's business


class PrivateFolder:
    """Its maker holds a lock on it, which the system lets go of however that process ends. Processes that it starts do
    not inherit the lock."""

    def __init__(self, kind: str) -> None:
        """`kind`: part of its name: /tmp/vserve-KIND-…"""
        prefix = f"vserve-{kind}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_left(left)
        self.path = tempfile.mkdtemp(prefix=prefix)
        self._lock = _open(self.path)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError:  # NFS locks no folders, others nothing at all: only what is left behind stays there
            return
        Path(self.path, OWNER).write_text(f"{os.getpid()}\n")  # only now: without a lock it would look left behind

    def close(self) -> None:
        """Removes it. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _open(path: str | Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_left(path: Path) -> None:
    """Unless somebody holds it, or it is another user's."""
    try:
        lock = _open(path)
    except OSError:
        return
    try:
        if os.fstat(lock).st_uid == os.geteuid() and (path / OWNER).is_file():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except OSError:  # it is held
        pass
    finally:
        os.close(lock)
