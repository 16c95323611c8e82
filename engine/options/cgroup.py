"""Memory and cores that control groups leave to this process: a container's, systemd's, a batch system's."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_SYSTEM = "sys/fs/cgroup"


def num_cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than the quota of its groups, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return max(1, min([cores, *map(math.ceil, quotas)]))


def memory_limit() -> int | None:
    """Bytes that the tightest group allows; None: no group has a limit."""
    return min((limit for _, limit in _limited()), default=None)


def memory_left() -> int | None:
    """Bytes until the first group kills one of its processes, where files in memory give way; None: no limit."""
    left = [max(0, limit - used) for group, limit in _limited() if (used := _in_use(group)) is not None]
    return min(left, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's groups for "cpu" or "memory", from its own to the root; of version 1 (a tree for
    each controller) and 2. Inside a container the paths may be the host's: there the root of the mount is its group.
    """
    try:
        lines = (ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines or ["0::/"]:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not names:
            mounts = [ROOT / _SYSTEM, ROOT / _SYSTEM / "unified"]
        elif controller in names.split(","):
            mounts = [ROOT / _SYSTEM / controller, ROOT / _SYSTEM / names]
        else:
            continue
        for mount in mounts:
            group = mount / path.strip("/")
            while group != mount:
                if group.is_dir():
                    yield group
                group = group.parent
            yield mount


def _limited() -> list[tuple[Path, int]]:
    """Groups whose memory is limited, and to how many bytes."""
    found = []
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(group / name)
            if limit is not None and limit < 1 << 60:  # version 1 says "none" by a huge number
                found.append((group, limit))
    return found


def _in_use(group: Path) -> int | None:
    """Bytes that cannot give way. Both versions count files in memory as used, and shared memory as files."""
    try:
        words = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    for usage, file, shared in (
        ("memory.current", "file", "shmem"), ("memory.usage_in_bytes", "total_cache", "total_shmem"),
    ):  # fmt: skip
        used = _number(group / usage)
        if used is not None and file in words:
            return used - int(words[file]) + int(words.get(shared, 0))
    return None


def _quota(group: Path) -> float | None:
    """Cores' worth of time that the group gets; None: no limit."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us is not None and quota_us > 0 and period_us else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
