"""The machine's memory, or what a container may use of it, and what helps where it was not enough at the start.

Without torch: the process that watched an engine being killed says it too."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from ..options import cgroup
from ..options.config import EngineConfig
from ..options.scheduler_config import SchedulerConfig

GIB = 1 << 30


def machine_bytes() -> int:
    """In all."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup.memory_limit()
    return total if limit is None else min(total, limit)


def available_bytes() -> int:
    """What can be taken before somebody is killed: files in memory give way, and swap counts."""
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        found = {words[0]: int(words[1]) << 10 for words in lines}
        available = found["MemAvailable:"] + found.get("SwapFree:", 0)
    except (OSError, LookupError, ValueError):
        return machine_bytes()
    left = cgroup.memory_left()
    return available if left is None else min(available, left)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"


WORDS = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|not enough memory", re.IGNORECASE)
TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
DOING = {
    "weights": "loading the weights", "memory": "measuring a step and taking the cache", "warm-up": "warming up",
    "graphs": "capturing CUDA graphs",
}  # fmt: skip
MACHINE = "the machine"
WEIGHTS_ARE_THERE = ("memory", "warm-up", "graphs")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says so, in the words of Python, torch, CUDA, Triton or the system."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError | OSError) and WORDS.search(str(error)) is not None


def out_of_memory(
    error: BaseException, phase: str, config: EngineConfig, settings: SchedulerConfig | None, *, where: str = MACHINE,
    free: int, total: int, weights: int = 0,
) -> str:  # fmt: skip
    """Why the start ends, and what helps. `settings`, `weights`: None and 0 where they are not known yet; `where`: the
    card's name, or the machine, of which `free` of `total` bytes are left."""
    tried = TRIED.search(str(error))
    numbers = [f"{tried[1]} were asked for"] if tried else []
    numbers += [f"{where} has {gib(free)} free of {gib(total)}"]
    numbers += [f"the weights take {gib(weights)}"] if weights else []
    found = remedies(config, phase, settings, on_card=where != MACHINE)
    return f"out of memory while {_doing(phase)}: {', '.join(numbers)}; what helps, in this order: {found}"


def killed(phase: str, done: int, total: int, config: EngineConfig) -> str:
    """Of an engine that the system killed while it started, as it does when memory runs out. `done`: of `total` bytes
    of the phase; 0: unknown."""
    read = f" ({gib(done)} of {gib(total)} done)" if total else ""
    # Of the machine's own memory, whatever the model runs on: a card's is never a reason to be killed.
    found = ["serve a smaller model"]
    if config.data_parallel_size > 1:
        found = [f"lower --data-parallel-size (now {config.data_parallel_size})", *found]
    elif config.device == "cpu":
        found = [remedies(config, phase)]
    return (
        f"the engine process was killed by signal 9 while {_doing(phase)}{read}; out of memory is the usual reason "
        f"(dmesg tells): the machine has {gib(available_bytes())} free of {gib(machine_bytes())}; what helps, in this "
        f"order: give it (or the container) more memory, {', '.join(found)}"
    )


def remedies(config: EngineConfig, phase: str, settings: SchedulerConfig | None = None, on_card: bool = False) -> str:
    """Remedies that can help in this phase: before the weights are there, only smaller ones do."""
    found = ["end what else runs on the card"] if on_card and phase not in WEIGHTS_ARE_THERE else []
    if phase in WEIGHTS_ARE_THERE:
        limits = settings or config
        found += [_lower("max-model-len", limits.max_model_len), _lower("max-num-seqs", limits.max_num_seqs)]
        if on_card:
            found += [_lower("gpu-memory-utilization", config.gpu_memory_utilization)]
        elif config.kv_cache_memory_bytes is not None:
            found += [_lower("kv-cache-memory-bytes", config.kv_cache_memory_bytes)]
        if on_card and not config.enforce_eager:
            found += ["add --enforce-eager"]
    if config.quantization is None and not on_card:
        found += ["add -q int4 (to a checkpoint in 16 bit)"]
    return ", ".join([*found, "serve a smaller model"])


def _lower(name: str, value: float | None) -> str:
    return f"lower --{name}" + (f" (now {value})" if value is not None else "")


def _doing(phase: str) -> str:
    return DOING.get(phase, f"starting ({phase})")
