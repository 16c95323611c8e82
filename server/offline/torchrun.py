"""`LLM(distributed_executor_backend="external_launcher")`: the processes that torchrun has started share engines. Each
of them is the host of one rank, and each gets all answers. They meet where torch.distributed does."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
from datetime import timedelta
from itertools import count
from typing import Any

import msgspec

from ...engine.errors import ConfigError
from ...engine.options.config import EngineConfig, default_cpu_threads

_calls = count()  # every process makes the same LLMs in the same order
_ports: list[socket.socket] = []
_store: Any = None  # of torch.distributed: whoever made it keeps it open


class Meeting(msgspec.Struct, frozen=True):
    """Where the first process of an engine awaits the others."""

    address: str
    port: int
    secret: str


@dataclasses.dataclass(frozen=True)
class Launched:
    """What torchrun tells a process of itself."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def read(cls) -> Launched:
        """Raises ConfigError where torchrun has not started this process."""
        try:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            local = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", world_size)
            return cls(rank, world_size, *map(int, local))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"--distributed-executor-backend external_launcher: torchrun sets RANK and WORLD_SIZE, and {error} is "
                "missing or no number: start this program with torchrun, or leave the option out"
            ) from None


def launched(config: EngineConfig) -> tuple[EngineConfig, dict[str, str]]:
    """The options of this process's part of its engine, and the environment of what it starts. Neighbours in torchrun's
    order share an engine. Raises ConfigError."""
    mine, size = Launched.read(), config.world_size
    if config.data_parallel_size > 1 or config.nnodes > 1 or config.enable_lora:
        name = (
            "data_parallel_size" if config.data_parallel_size > 1 else "nnodes" if config.nnodes > 1 else "enable_lora"
        )
        remedy = {"enable_lora": "merge the adapter (merge_lora)"}.get(name, "leave it out: torchrun says how many")
        raise ConfigError(f"{name} does not go with distributed_executor_backend='external_launcher': {remedy}")
    if mine.world_size % size:
        raise ConfigError(
            f"torchrun has started {mine.world_size} processes, and {config.divided_by} wants {size} for each engine: "
            "start a multiple of that (--nproc-per-node)"
        )
    threads = config.cpu_threads or max(1, default_cpu_threads() // mine.local_world_size)
    config = dataclasses.replace(config, cpu_threads=threads)
    environment = {"CUDA_VISIBLE_DEVICES": _card(mine.local_rank)}
    if size == 1:
        return dataclasses.replace(config, distributed_executor_backend=None), environment
    first = mine.rank - mine.rank % size
    meeting = _meet(config, mine, first)
    return dataclasses.replace(
        config, nnodes=size, node_rank=mine.rank - first, master_addr=meeting.address, master_port=meeting.port,
        cluster_secret=meeting.secret,
    ), environment  # fmt: skip


def _card(local_rank: int) -> str:
    """As CUDA_VISIBLE_DEVICES has it. Raises ConfigError."""
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not seen:
        return str(local_rank)
    if len(seen) == 1:
        return seen[0]  # each process has got its own
    if local_rank >= len(seen):
        raise ConfigError(
            f"LOCAL_RANK is {local_rank}, and CUDA_VISIBLE_DEVICES has {len(seen)} cards: name more there"
        )
    return seen[local_rank]


def _meet(config: EngineConfig, mine: Launched, first: int) -> Meeting:
    """Raises ConfigError."""
    key = f"vserve/{first}/{next(_calls)}"
    patience = timedelta(seconds=config.distributed_timeout_seconds)
    try:
        store = _store_of_all(patience)
        if mine.rank == first:
            one_host = first // mine.local_world_size == (first + config.world_size - 1) // mine.local_world_size
            meeting = Meeting(*_free_port(config, one_host), secrets.token_hex(16))
            store.set(key, msgspec.json.encode(meeting))
            return meeting
        return msgspec.json.decode(store.get(key), type=Meeting)
    except (RuntimeError, ValueError, OSError) as error:  # torch's errors of its network are RuntimeErrors
        where = ", ".join(f"{name} {os.environ.get(name, 'unset')}" for name in ("MASTER_ADDR", "MASTER_PORT"))
        cause = " ".join(str(error).split())
        raise ConfigError(f"the processes of torchrun do not find each other at {where}: {cause}") from None


def _store_of_all(patience: timedelta) -> Any:
    """That of torch.distributed, where the program has it; else a client of the one that torchrun keeps."""
    global _store
    if _store is None:
        from torch import distributed as dist  # takes seconds

        if dist.is_initialized():
            _store = dist.distributed_c10d._get_default_store()
        else:
            _store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    _store.set_timeout(patience)
    return _store


def _free_port(config: EngineConfig, one_host: bool) -> tuple[str, int]:
    """(address, port) of this host that the others of the engine reach. The port is kept for as long as this process
    lives: nobody who asks for any gets it, and the engine can listen on it all the same."""
    address = config.host_ip or "127.0.0.1"
    if not one_host and not config.host_ip:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing
            address = probe.getsockname()[0]
    sock = socket.socket()
    _ports.append(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, 0))
    return address, sock.getsockname()[1]
