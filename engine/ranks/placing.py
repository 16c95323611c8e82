"""Puts the ranks of an engine where the options want them: on this host, on several, or on a Ray cluster. Each process
that torchrun has started counts as a host, with one rank."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Protocol

import msgspec
from msgspec.structs import replace

from ..link.connection import PrivateFolder
from ..options.config import EngineConfig
from .handshake import check_secret, facts, is_loopback, rendezvous, use_interface
from .messages import Said, Seat, Word
from .nodes import Nodes, RemoteRank
from .place import Child, StartedRanks


class Placing(Protocol):
    async def start(self) -> StartedRanks:
        """Returns when all ranks have been started. Raises ConfigError, OSError."""
        ...

    def close(self, in_order: bool) -> None:
        """`in_order`: the ranks have been told to leave, and need not be started again. Idempotent."""
        ...


def placing(config: EngineConfig) -> Placing:
    if config.distributed_executor_backend == "ray":
        from .ray_cluster import RayCluster

        return RayCluster(config)
    if config.nnodes > 1:
        return SeveralHosts(config)
    return OneHost(config)


class OneHost:
    """Ranks are children of this process."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._folder: PrivateFolder | None = None  # where they meet

    async def start(self) -> StartedRanks:
        size = self._config.world_size
        if size == 1:
            return StartedRanks({0: Seat()})
        self._folder = PrivateFolder("ranks")
        meeting = f"file://{self._folder.path}/store"
        return children(self._config, {rank: Seat(rank, size, meeting, rank) for rank in range(size)})

    def close(self, in_order: bool) -> None:
        if self._folder is not None:
            self._folder.close()


class SeveralHosts:
    """Ranks are dealt to nodes in order: neighbours share a host. This one is node 0."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._nodes: Nodes | None = None
        self._meeting: socket.socket | None = None

    async def start(self) -> StartedRanks:
        config, each = self._config, self._config.ranks_per_node
        check_secret(config)
        ranks = {node: tuple(range(node * each, (node + 1) * each)) for node in range(1, config.nnodes)}
        self._nodes = Nodes(
            config, config.master_addr, config.master_port, config.cluster_secret or "", facts(config), ranks
        )
        await asyncio.to_thread(self._nodes.gather)
        self._nodes.no_more()
        use_interface(os.environ, config.host_ip or config.master_addr)
        meeting, self._meeting = rendezvous("127.0.0.1" if is_loopback(config.master_addr) else config.master_addr)
        seats = {rank: Seat(rank, config.world_size, meeting, rank % each) for rank in range(config.world_size)}
        seats[0] = replace(seats[0], listener=self._meeting.fileno())
        found = children(config, {rank: seats[rank] for rank in range(each)})
        found.seats |= seats
        found.sockets |= self._nodes.sockets
        for node, own in ranks.items():
            found.handles |= {rank: RemoteRank(self._nodes.nodes[node], rank) for rank in own}
        return found

    def say(self, word: Word) -> None:
        """To the processes that stand for the other nodes."""
        assert self._nodes is not None, "they have come"
        message = Said(msgspec.msgpack.encode(word))
        for node in self._nodes.nodes.values():
            node.say(message)

    def close(self, in_order: bool) -> None:
        if self._nodes is not None:
            self._nodes.close(in_order)
        if self._meeting is not None:
            self._meeting.close()


def children(config: EngineConfig, seats: dict[int, Seat]) -> StartedRanks:
    """Ranks of this host; the first is the engine's own. Raises OSError; then there are none."""
    found = StartedRanks(dict(seats))
    threads = (config.cpu_threads or 0) if config.device == "cpu" else 0
    try:
        for rank in list(seats)[1:]:
            found.handles[rank], found.sockets[rank] = Child.start(rank, threads)
    except OSError:
        for handle in found.handles.values():
            handle.kill()
        raise
    return found
