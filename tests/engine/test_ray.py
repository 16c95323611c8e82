"""Ranks that Ray places, on a cluster of two pretended nodes: the same tokens, and the end of who loses an actor."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.errors import ConfigError
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.ranks import ray_cluster
from vserve.server.client.engine_client import EngineClient
from vserve.server.client.mailbox import EngineDeadError

from .conftest import Answer, collect

PROMPTS = [[(7 * i * i + 3 * j * j + j) % 290 + 5 for j in range(length)] for i, length in enumerate((3, 17, 40, 90))]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def settings(folder: Path, size: int, **options: Any) -> EngineConfig:
    return EngineConfig(
        str(folder), device="cpu", cpu_threads=size, max_model_len=256, num_gpu_blocks_override=30,
        tensor_parallel_size=size, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a CPU each; RAY_ADDRESS leads to it."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # what others on this machine take is no business of its
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        made = Cluster()
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False)
        patch.setenv("RAY_ADDRESS", made.address)
        try:
            yield made
        finally:
            made.shutdown()


def rank_of_actor() -> tuple[int, int]:
    """→ the process of the rank that an actor has started, and the actor's."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"vserve.engine.start.rank_process" in (folder / "cmdline").read_bytes():
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if b"RayHost" in Path(f"/proc/{parent}/cmdline").read_bytes():
                    return int(folder.name), parent
        except OSError:
            continue
    raise AssertionError("no actor has a rank")


async def cause(answer: asyncio.Task[Answer]) -> str:
    begun = time.monotonic()
    with pytest.raises(EngineDeadError) as raised:
        await asyncio.wait_for(answer, 30)
    assert time.monotonic() - begun < 10
    return str(raised.value)


@pytest.mark.slow
def test_an_actor_on_each_node(cluster: Any, tiny_model: Any) -> None:
    """And then one is killed, and the card of rank 0 is taken away; the engine starts again each time."""
    folder = tiny_model("llama")

    async def main() -> None:
        alone = EngineClient(settings(folder, 1))
        await alone.start()
        expected = [(await collect(alone, prompt, greedy(12))).tokens for prompt in PROMPTS]
        await alone.close()
        client = EngineClient(settings(folder, 2, distributed_executor_backend="ray"), restarts=3)
        await client.start()

        async def again() -> None:
            while not client.ready:
                await asyncio.sleep(0.05)
            assert [(await collect(client, prompt, greedy(12))).tokens for prompt in PROMPTS] == expected

        try:
            await again()
            rank, actor = rank_of_actor()
            answer = asyncio.create_task(collect(client, [5, 6, 7], greedy(250)))
            await asyncio.sleep(0.1)
            os.kill(actor, signal.SIGKILL)
            found = await cause(answer)
            assert found.startswith("rank 1 of 2 (cpu) on node 1 (") and "is lost: its Ray actor has died (" in found
            while Path(f"/proc/{rank}").exists():
                await asyncio.sleep(0.05)
            await again()

            rank, _ = rank_of_actor()
            answer = asyncio.create_task(collect(client, [5, 6, 7], greedy(250)))
            await asyncio.sleep(0.1)
            os.kill(rank, signal.SIGKILL)
            found = await cause(answer)
            assert "on node 1 (" in found and "was killed by signal 9 (SIGKILL)" in found
            await again()

            holders = actors_of(cluster) - {rank_of_actor()[1]}
            answer = asyncio.create_task(collect(client, [5, 6, 7], greedy(250)))
            await asyncio.sleep(0.1)
            os.kill(holders.pop(), signal.SIGKILL)
            found = await cause(answer)
            assert found.startswith("rank 0 of 2 (cpu) is lost: its Ray actor has died (")
        finally:
            await client.close()

    asyncio.run(main())


def actors_of(cluster: Any) -> set[int]:
    """Their processes."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::RayHost"):
                found.add(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_too_few_are_told_with_what_there_is(cluster: Any, tiny_model: Any) -> None:
    async def main() -> str:
        options = {"distributed_executor_backend": "ray", "distributed_timeout_seconds": 2}
        client = EngineClient(settings(tiny_model("llama"), 4, **options))
        try:
            with pytest.raises(EngineDeadError) as raised:
                await client.start()
            return str(raised.value)
        finally:
            await client.close()

    found = asyncio.run(main())
    assert found.startswith("4 ranks need a CPU each, one of them on this node; the Ray cluster has 2 ("), found
    assert found.endswith("within 2 s (--distributed-timeout-seconds): add nodes, or lower --tensor-parallel-size")


# ---- without a cluster ----


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed here: pip install 'vserve\[ray\]'"):
        ray_cluster.connect()


def test_cards_are_found_among_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray names a card as nvidia-smi does, and lets an actor see no other; torch counts those that are seen."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert ray_cluster.card_index("3") == 3 and "CUDA_VISIBLE_DEVICES" not in os.environ
    assert ray_cluster.card_index("2") == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert ray_cluster.card_index("6") == 1 and os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert ray_cluster.card_index("MIG-1") == 0 and os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    assert ray_cluster.card_index("") == 0


def test_what_a_cluster_has() -> None:
    def node(address: str, alive: bool, **resources: float) -> dict[str, Any]:
        return {"NodeManagerAddress": address, "Alive": alive, "Resources": resources}

    nodes = [node("10.0.0.1", True, GPU=8.0), node("10.0.0.2", True, CPU=4.0), node("10.0.0.3", False, GPU=8.0)]
    assert ray_cluster.describe(nodes, {"GPU": 3.0}, "GPU") == "8 (8 on 10.0.0.1, 0 on 10.0.0.2), 3 of them free"
