"""Kills and stops every rank of an engine in every phase of its start and while it serves; prints what became of it.

    python tools/gpu/lose_ranks.py MODEL [--tensor-parallel-size 2] [--pipeline-parallel-size 1] [--device cpu]
        [--kinds kill,exit,segv,error] [--ranks 0,1] [--phases weights,step:20]

Each line: rank, phase, kind, seconds until it was said, what was said. Exit code 1 where it took more than ten seconds,
where what was said does not name the rank (rank 0 is the engine itself: its process, or its error), or where a process
was left. On the CPU it needs no card: two ranks of a small model on two cores take about six seconds a line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.server.client.engine_client import EngineClient
from vserve.server.client.mailbox import EngineDeadError
from vserve.server.client.process import EngineProcess

LIMIT = 10.0  # seconds
STARTING = ("device", "config", "weights", "compilation", "memory", "warm-up")
SERVING = ("step:20", "sample:20")


async def lose(config: EngineConfig, fault: str) -> tuple[float, str, list[int]]:
    """→ (seconds from the last sign of life to its word, that word, the processes of its ranks)."""
    os.environ |= {"VSERVE_FAULT": fault, "VSERVE_ALLOW_FAULTS": "1"}
    client = EngineClient(config)
    heard = time.monotonic()

    def hear(_: object) -> None:
        nonlocal heard
        heard = time.monotonic()

    client.progress_listeners.append(hear)
    client.stats_listeners.append(hear)
    pids: list[int] = []
    try:
        await client.start()
        assert isinstance(client._engine, EngineProcess)
        pids = children(client._engine.pid)
        mailbox = client.submit([5, 6, 7], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        while (await mailbox.get()).finish_reason is None:
            pass
        return 0.0, "nothing happened", pids
    except EngineDeadError as error:
        return time.monotonic() - heard, str(error), pids
    finally:
        await client.close()


def is_named(rank: int, size: int, said: str) -> bool:
    """Rank 0 is the engine: its process is named, or what it raised."""
    engine = ("the engine process", "rank 0", "injected at")
    return f"rank {rank} of {size}" in said or (rank == 0 and any(words in said for words in engine))


def left(pids: list[int]) -> bool:
    """Whether one still runs a moment after the engine has ended; those that nobody has waited for yet do not."""
    until = time.monotonic() + 2
    while running := any(_state(pid) not in ("", "Z") for pid in pids):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return running


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kinds", default="kill,exit,segv,error", help="of faults (default: %(default)s)")
    parser.add_argument("--ranks", help="which are lost (default: each in turn)")
    parser.add_argument("--phases", help="when (default: in each of the start, and while it serves)")
    arguments = parser.parse_args()
    config = EngineConfig(
        arguments.model, device=arguments.device, tensor_parallel_size=arguments.tensor_parallel_size,
        pipeline_parallel_size=arguments.pipeline_parallel_size,
    )  # fmt: skip
    size = config.world_size
    phases = [*STARTING, *(["graphs"] if arguments.device != "cpu" else []), *SERVING]
    chosen = arguments.phases.split(",") if arguments.phases else phases
    places = [phase if ":" in phase else f"phase:{phase}" for phase in chosen]
    ranks = [int(rank) for rank in arguments.ranks.split(",")] if arguments.ranks else range(size)
    failures = 0
    for kind in arguments.kinds.split(","):
        for place in places:
            for rank in ranks:
                seconds, said, pids = asyncio.run(lose(config, f"{place}:{kind}:{rank}"))
                wrong = seconds > LIMIT or not is_named(rank, size, said) or left(pids)
                failures += wrong
                print(f"{'FAULT ' if wrong else ''}rank {rank}, {place}, {kind}: {seconds:.1f} s: {said}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
