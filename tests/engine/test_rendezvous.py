"""Ranks wait for each other where they meet, for as long as it takes; and nobody else is at that port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from vserve.engine.parallel import join as module
from vserve.engine.parallel.group import LOCAL
from vserve.engine.parallel.join import Rendezvous
from vserve.engine.ranks import handshake

SHORT = timedelta(seconds=1)
RANK = """
import sys, time
from datetime import timedelta
import torch
from vserve.engine.parallel.join import join
rank, address, late = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
time.sleep(late)
group = join(rank, 2, address, torch.device("cpu"), timeout=timedelta(seconds=3))
print(group.all_reduce(torch.tensor([rank + 1])).item())
"""


@pytest.mark.slow
def test_a_group_waits_longer_than_its_collectives_do(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), address, late], env=environment, stdout=-1, text=True)
        for rank, late in enumerate(("0", "6"))
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["3\n", "3\n"]


@pytest.fixture(params=["file", "tcp"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[Callable[[], Rendezvous]], Callable[[], None]]:
    """→ what each of two ranks finds, how it is given up"""
    if request.param == "file":
        folder = tmp_path / "meeting"
        folder.mkdir()
        address = f"file://{folder}/store"
        made = [lambda rank=rank: Rendezvous(rank, 2, address, SHORT) for rank in range(2)]  # type: ignore[misc]
        return made, lambda: folder.rename(tmp_path / "gone")
    url, sock = handshake.rendezvous("127.0.0.1")
    request.addfinalizer(sock.close)
    return [
        lambda: Rendezvous(0, 2, url, SHORT, sock.fileno()), lambda: Rendezvous(1, 2, url, timedelta(seconds=20))
    ], sock.close  # fmt: skip


def test_who_is_late_is_named_and_waited_for(
    places: tuple[list[Callable[[], Rendezvous]], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second), _ = places
    said: list[list[int]] = []
    reminded, done = threading.Event(), threading.Event()

    def remind(missing: list[int]) -> None:
        said.append(missing)
        reminded.set()

    def come() -> None:  # it knocks before rank 0 is there
        other = second()
        other.wait_for_all("files")
        time.sleep(2 * SHORT.total_seconds())
        reminded.wait(20)
        other.wait_for_all("weights")
        done.set()

    coming = threading.Thread(target=come, daemon=True)
    coming.start()
    time.sleep(0.3)
    mine = first()
    mine.wait_for_all("files", remind)
    assert not said
    monkeypatch.setattr(module, "REMINDER", 0.5)
    mine.wait_for_all("weights", remind)
    assert said and said[0] == [1]
    assert done.wait(10)


def test_nobody_waits_for_ranks_that_are_given_up(
    places: tuple[list[Callable[[], Rendezvous]], Callable[[], None]],
) -> None:
    (first, _), give_up = places
    mine = first()
    threading.Timer(0.5, give_up).start()
    with pytest.raises(RuntimeError, match="the start was given up"):
        mine.wait_for_all("files")
    with pytest.raises(RuntimeError, match="the start was given up"):  # it has read its weights meanwhile
        mine.wait_for_all("weights")


def test_the_port_is_held_and_is_no_other_interfaces() -> None:
    url, sock = handshake.rendezvous("127.0.0.1")
    with sock:
        assert url.startswith(LOCAL) and sock.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError), socket.create_server(("127.0.0.1", sock.getsockname()[1])):
            pass


@pytest.mark.parametrize(
    ("address", "where", "url"),
    [
        ("127.0.0.3", "127.0.0.3", "tcp://127.0.0.3:"),
        ("203.0.113.9", "0.0.0.0", "tcp://203.0.113.9:"),  # nobody's here: it is translated on the way
        ("node-0.cluster", "0.0.0.0", "tcp://node-0.cluster:"),
        ("2001:db8::9", "::", "tcp://[2001:db8::9]:"),
    ],
)
def test_it_listens_where_it_is_reached_alone(address: str, where: str, url: str) -> None:
    if ":" in address and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    found, sock = handshake.rendezvous(address)
    with sock:
        assert sock.getsockname()[0] == where and found.startswith(url)
