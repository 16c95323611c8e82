"""The machine's memory, or what a container may use of it. Without torch: whoever watches a start asks as well."""

from __future__ import annotations

import os
from pathlib import Path

from ..options import cgroup

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
