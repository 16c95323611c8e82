"""Ranks on a Ray cluster. Ray says where there is room, and starts and watches an actor for each rank; the actor is a
node with one rank (node.py), so that plans and tensors go where they go without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..options.config import EngineConfig
from ..options.extras import how_to_install
from .handshake import VARIABLES, rendezvous, use_interface, versions
from .messages import Seat
from .node import Node
from .nodes import Nodes, RemoteRank
from .place import StartedRanks

logger = logging.getLogger(__name__)

REMINDER = 30.0  # seconds between two lines that say what is waited for
EXPLAINING = 1.8  # seconds for Ray to say how an actor has ended: it takes up to one, and others are blamed after two
NSIGHT = ("nsys", "profile", "--trace=cuda,cudnn,cublas", "--cuda-graph-trace=node")


class RayHost:
    """The actor: holds a card of the cluster, and runs the rank that computes on it."""

    def where(self) -> tuple[str, str, str]:
        """→ (the cluster's name of its node, the node's address, the card's name; "" where it has none)"""
        import ray

        context = ray.get_runtime_context()
        cards = context.get_accelerator_ids().get("GPU", [])
        return context.get_node_id(), ray.util.get_node_ip_address(), cards[0] if cards else ""

    def run(
        self, rank: int, address: tuple[str, int], secret: str, facts: dict[str, str], patience: float, nsight: bool,
        environment: dict[str, str],
    ) -> str:  # fmt: skip
        """Returns why it is over, when it is."""
        card_index(self.where()[2])
        before: tuple[str, ...] = ()
        if nsight:
            if shutil.which("nsys") is None:
                return "--ray-workers-use-nsight: nsys is not on this node's PATH"
            folder = Path(os.environ.get("RAY_TMPDIR", "/tmp/ray")) / "session_latest" / "logs" / "nsight"
            folder.mkdir(parents=True, exist_ok=True)
            before = (*NSIGHT, "--output", str(folder / f"rank_{rank}_%p"))
        try:
            Node(rank, address, secret, facts, patience, environment=environment, before=before).serve()
        except ConfigError as error:
            return str(error)
        return "the engine has ended"

    def hold(self) -> None:
        """The card of rank 0, which is the engine."""
        threading.Event().wait()


class ActorPlace:
    """Of rank 0: what it computes on is taken from it when this actor dies."""

    where = ""

    def __init__(self, holding: Any) -> None:
        self._holding = holding

    def wait(self, seconds: float | None = None) -> str | None:
        return death_of(self._holding, seconds)

    def kill(self) -> None:
        pass

    def dump_stacks(self) -> None:
        pass

    def is_stopped(self) -> bool:
        return False


class RayCluster:
    """See Placing."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._nodes: Nodes | None = None
        self._ray: Any = None
        self._group: Any = None
        self._actors: list[Any] = []
        self._meeting: socket.socket | None = None

    async def start(self) -> StartedRanks:
        return await asyncio.to_thread(self._start)

    def close(self, in_order: bool) -> None:
        if self._nodes is not None:
            self._nodes.close(in_order)
        if self._meeting is not None:
            self._meeting.close()
        if self._ray is None:
            return
        with contextlib.suppress(Exception):  # the cluster may be gone; it ends our actors when this process ends
            for actor in self._actors:
                self._ray.kill(actor)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
            self._ray.shutdown()
        self._ray = None

    def _start(self) -> StartedRanks:
        config = self._config
        self._ray = connect()
        kind = self._kind()
        self._group = self._reserve(kind)
        hosts = self._hosts(kind)
        addresses = [address for _, (_, address, _) in hosts]
        single = len(set(addresses)) == 1
        meeting, self._meeting = rendezvous("127.0.0.1" if single else addresses[0])
        seats = {0: Seat(0, len(hosts), meeting, card_index(hosts[0][1][2]), self._meeting.fileno())}
        for rank, (_, (_, _, card)) in enumerate(hosts[1:], 1):
            seats[rank] = Seat(rank, len(hosts), meeting, int(card) if card.isdigit() else 0)
        if not single:
            use_interface(os.environ, addresses[0])
        secret, told = secrets.token_hex(32), versions()
        self._nodes = nodes = Nodes(config, addresses[0], 0, secret, told, {r: (r,) for r in range(1, len(hosts))})
        runs = {
            rank: actor.run.remote(
                rank,
                nodes.address,
                secret,
                told,
                config.distributed_timeout_seconds,
                config.ray_workers_use_nsight,
                passed_on(os.environ),
            )
            for rank, (actor, _) in enumerate(hosts)
            if rank
        }

        def waiting(missing: list[int]) -> str | None:
            ends = ((rank, death_of(runs[rank], 0.0)) for rank in missing)
            return next((f"rank {rank} on Ray's node {addresses[rank]} {how}" for rank, how in ends if how), None)

        nodes.gather(waiting)
        nodes.no_more()
        for rank, node in nodes.nodes.items():
            node.explain = lambda run=runs[rank]: death_of(run, EXPLAINING)  # type: ignore[misc]
        return StartedRanks(
            seats, {0: ActorPlace(hosts[0][0].hold.remote()), **{r: RemoteRank(nodes.nodes[r], r) for r in runs}},
            dict(nodes.sockets),
        )  # fmt: skip

    def _kind(self) -> str:
        """What a rank takes of the cluster: GPU, or CPU."""
        device = self._config.device
        if device == "auto":
            return "GPU" if self._ray.cluster_resources().get("GPU") or Path("/dev/nvidiactl").exists() else "CPU"
        return "CPU" if device == "cpu" else "GPU"

    def _reserve(self, kind: str) -> Any:
        """A placement group with a bundle for each rank, the first of them on this node. Raises ConfigError."""
        ray, size, patience = self._ray, self._config.world_size, self._config.distributed_timeout_seconds
        bundles = [{kind: 1.0} for _ in range(size)]
        bundles[0][f"node:{ray.util.get_node_ip_address()}"] = 0.001
        group = ray.util.placement_group(bundles, strategy="PACK")
        begun = reminded = time.monotonic()
        while not group.wait(1):
            has = f"the Ray cluster has {describe(ray.nodes(), ray.available_resources(), kind)}"
            if time.monotonic() - begun > patience:
                ray.util.remove_placement_group(group)
                raise ConfigError(
                    f"{size} ranks need a {kind} each, one of them on this node; {has}; nothing was freed within "
                    f"{patience} s (--distributed-timeout-seconds): add nodes, or lower --tensor-parallel-size"
                )
            if begun == reminded or time.monotonic() - reminded > REMINDER:
                reminded = time.monotonic()
                logger.info("waiting for %d × %s, one of them on this node; %s", size, kind, has)
        return group

    def _hosts(self, kind: str) -> list[tuple[Any, tuple[str, str, str]]]:
        """Actors in the order of ranks, and where they are: that of this process's bundle first, nodes together."""
        ray = self._ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for index in range(self._config.world_size):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            amount = {"num_cpus": 1, "num_gpus": 0} if kind == "CPU" else {"num_cpus": 0, "num_gpus": 1}
            made = ray.remote(**amount)(RayHost).options(scheduling_strategy=strategy, max_restarts=0)
            self._actors.append(made.remote())
        try:
            found = ray.get([a.where.remote() for a in self._actors], timeout=self._config.distributed_timeout_seconds)
        except Exception as error:
            raise ConfigError(
                f"Ray's actors do not start: {first_line(error)}; vserve must be installed on all nodes"
            ) from error
        mine = found[0][0]
        pairs = list(zip(self._actors, found, strict=True))
        return [pairs[0], *sorted(pairs[1:], key=lambda pair: (pair[1][0] != mine, pair[1][1], pair[1][0]))]


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What ranks must see as this process does; interfaces are each host's own."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("VSERVE_", "HF_", "NCCL_")) and name not in (*VARIABLES, "VSERVE_CLUSTER_SECRET")
    }


def connect() -> Any:
    """The module, connected to a cluster: that of RAY_ADDRESS, of this host, or one that is started for this process
    alone. Raises ConfigError."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"--distributed-executor-backend ray: Ray is not installed here: {how_to_install('ray')}"
        ) from None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if not ray.is_initialized():
            ray.init(configure_logging=False, logging_level=logging.ERROR, include_dashboard=False)
    except Exception as error:
        raise ConfigError(
            f"--distributed-executor-backend ray: no cluster can be reached ({first_line(error)}): start one with "
            "`ray start --head`, or set RAY_ADDRESS"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return ray


def describe(nodes: list[dict[str, Any]], available: dict[str, float], kind: str) -> str:
    """What the cluster has of it, by node."""
    alive = [node for node in nodes if node["Alive"]]
    by_node = Counter({node["NodeManagerAddress"]: 0 for node in alive})
    for node in alive:
        by_node[node["NodeManagerAddress"]] += int(node["Resources"].get(kind, 0))
    told = ", ".join(f"{count} on {address}" for address, count in by_node.items())
    return f"{sum(by_node.values())} ({told}), {int(available.get(kind, 0))} of them free"


def card_index(name: str) -> int:
    """Of the card that Ray deals out by this name, among those that this process and its children see from now on.
    Ray lets an actor see its own alone; ranks of a host are to reach each other's memory."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not name.isdigit():  # none, or a part of a card
        return 0
    if visible == name:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        return int(name)
    names = visible.split(",")
    return names.index(name) if name in names else int(name)


def death_of(run: Any, seconds: float | None) -> str | None:
    """How an actor has ended, whose endless call this is; None where it lives on after so many seconds."""
    import ray

    try:
        return f"has left: {ray.get(run, timeout=seconds)}"
    except ray.exceptions.GetTimeoutError:
        return None
    except Exception as error:
        return f"is lost: its Ray actor has died ({first_line(error)})"


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
