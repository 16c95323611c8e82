"""How the ranks that share a model find each other, and what they talk through then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import distributed as dist

from .group import ALONE, LOCAL, TIMEOUT, Group, ProcessGroup
from .symmetric import SymmetricGroup, reach_each_other

LOOK_UP = 0.1  # seconds between two looks at who has come
REMINDER = 30.0  # seconds between two reports of who has not
FILE = "file://"
FILE_TIMEOUT = timedelta(seconds=20)  # of a look, for which a store waits for a file that has gone with the start


class Rendezvous:
    def __init__(self, rank: int, size: int, address: str, timeout: timedelta, listener: int = -1) -> None:
        """address: as torch.distributed has it, "file:///…" of a file that is not there yet, or "tcp://host:port".
        timeout: of finding it, and of single calls later. listener: of rank 0, a socket that listens at this port,
        which stays its caller's; where that closes it, or removes the file's folder, nobody is waited for any more.

        Raises RuntimeError where nobody answers."""
        self.rank, self.size, self._timeout = rank, size, timeout
        self._folder = Path(address.removeprefix(FILE)).parent if address.startswith(FILE) else None
        self._listener = listener
        self._inode = os.fstat(listener).st_ino if listener >= 0 else 0
        self.store: dist.Store
        if self._folder is not None:
            self.store = dist.FileStore(address.removeprefix(FILE), size)
            self.store.set_timeout(timeout)
        else:
            where = urlsplit(address)
            assert where.hostname is not None and where.port is not None
            self.store = dist.TCPStore(
                where.hostname, where.port, size, rank == 0, timeout, wait_for_workers=False,
                master_listen_fd=os.dup(listener) if listener >= 0 else None,  # which it closes
            )  # fmt: skip

    def wait_for_all(self, event: str, report: Callable[[list[int]], None] = lambda missing: None) -> None:
        """Returns when every rank has called this with the same `event`, once each. `report` hears now and then which
        have not. Raises RuntimeError where that has become pointless."""
        missing, reminded, told = list(range(self.size)), time.monotonic(), False
        while True:
            if self._is_given_up():
                raise RuntimeError("the start was given up")
            try:
                if self._folder is not None:
                    self.store.set_timeout(min(self._timeout, FILE_TIMEOUT))
                if not told:
                    self.store.set(f"{event}/{self.rank}", "here")
                    told = True
                missing = [rank for rank in missing if not self.store.check([f"{event}/{rank}"])]
            except RuntimeError:
                if self._is_given_up():  # since this has looked
                    continue
                raise
            finally:
                self.store.set_timeout(self._timeout)
            if not missing:
                return
            if time.monotonic() - reminded >= REMINDER:
                reminded = time.monotonic()
                report(missing)
            time.sleep(LOOK_UP)

    def _is_given_up(self) -> bool:
        if self._folder is not None:
            return not self._folder.exists()
        try:
            return self._listener >= 0 and os.fstat(self._listener).st_ino != self._inode
        except OSError:
            return True


def join(
    rank: int, size: int, init_method: str, device: torch.device, symmetric: bool = True, num_stages: int = 1,
    timeout: timedelta = TIMEOUT, rendezvous: Rendezvous | None = None,
) -> Group:  # fmt: skip
    """The group of `size` ranks, once all have come, whenever that is. Called once in a process. Where they meet by a
    file, they are of one host, and rank n has its card n.

    init_method: where they meet, as torch.distributed has it ("file:///…" of a file that is not there yet, "tcp://…").
    symmetric: sums go through memory that all cards reach, where they do; or NCCL makes them all.
    num_stages: with several, no sums are made over all.
    timeout: of collectives. rendezvous: that at init_method, where the caller has it.
    """
    if size == 1:
        return ALONE
    if init_method.startswith(LOCAL):  # or libraries may choose an interface that leads nowhere
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    if rendezvous is None:
        rendezvous = Rendezvous(rank, size, init_method, timeout)
    rendezvous.wait_for_all("group")
    on_card = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_card else "gloo", store=dist.PrefixStore("torch", rendezvous.store), rank=rank, world_size=size,
        timeout=timeout, device_id=device if on_card else None,
    )  # fmt: skip
    assert dist.group.WORLD is not None
    if num_stages > 1:
        return ProcessGroup(dist.group.WORLD)
    return wrapped(dist.group.WORLD, device, symmetric, range(size) if init_method.startswith(LOCAL) else None)


def wrapped(group: dist.ProcessGroup, device: torch.device, symmetric: bool, cards: range | None) -> ProcessGroup:
    """`cards`: of its ranks where they are of one host."""
    if device.type == "cuda" and cards is not None and reach_each_other(cards) and symmetric:
        return SymmetricGroup(group, device)
    return ProcessGroup(group)
