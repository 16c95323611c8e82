"""Folders of processes that were killed go away, and those of nobody else."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vserve.engine.link.connection import OWNER, PrivateFolder

HOLD = "import sys; from vserve.engine.link.connection import PrivateFolder as F; print(F('ranks').path, flush=True)"


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def hold(room: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another server's, and a process that it has started."""
    environment = {**os.environ, "TMPDIR": str(room), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = f"{HOLD}; import subprocess; subprocess.Popen(['sleep', '20'], stdout=2); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_one_whose_maker_was_killed_is_removed_by_the_next(room: Path) -> None:
    process, path = hold(room)
    (path / "store").write_text("x")
    first = PrivateFolder("ranks")
    assert (path / "store").exists() and (path / OWNER).read_text() == f"{process.pid}\n"
    process.kill()
    process.communicate()
    PrivateFolder("api").close()
    assert path.exists(), "of another kind"
    second = PrivateFolder("ranks")
    assert sorted(room.iterdir()) == sorted([Path(first.path), Path(second.path)])
    assert Path(first.path).stat().st_mode & 0o777 == 0o700
    for folder in (first, second, second):
        folder.close()
    assert not list(room.iterdir())


def test_what_only_has_the_name_stays(room: Path) -> None:
    (room / "vserve-ranks-notes").mkdir()
    (room / "vserve-ranks-file").write_text("mine")
    elsewhere = room / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / OWNER).write_text("1\n")
    (room / "vserve-ranks-link").symlink_to(elsewhere)
    PrivateFolder("ranks").close()
    assert len(list(room.iterdir())) == 4 and (elsewhere / OWNER).exists()


def test_it_is_made_where_nothing_can_be_locked(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.EBADF, "as NFS says")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        folder = PrivateFolder("ranks")
    PrivateFolder("ranks").close()
    assert Path(folder.path).exists(), "nobody can tell that it was left"
    folder.close()
    assert not list(room.iterdir())
