"""Limits of control groups, of both versions: of this process's group and of all above it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vserve.engine.options import cgroup
from vserve.engine.options.config import default_cpu_threads
from vserve.engine.planning import host_memory

MIB = 1 << 20


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)

    def write(path: str, text: object) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    return write


def test_without_groups_nothing_is_limited(write) -> None:
    assert (cgroup.num_cores(), cgroup.memory_limit(), cgroup.memory_left()) == (16, None, None)
    write("proc/self/cgroup", "0::/")
    write("sys/fs/cgroup/memory.max", "max")
    write("sys/fs/cgroup/cpu.max", "max 100000")
    assert (cgroup.num_cores(), cgroup.memory_limit(), cgroup.memory_left()) == (16, None, None)
    assert default_cpu_threads() == 15


def test_a_container(write) -> None:
    """Its group is the root of what it sees; the path may be the host's."""
    for path in ("/", "/docker/0123"):
        write("proc/self/cgroup", f"0::{path}")
        write("sys/fs/cgroup/cpu.max", "150000 100000")
        write("sys/fs/cgroup/memory.max", 100 * MIB)
        write("sys/fs/cgroup/memory.current", 90 * MIB)
        write("sys/fs/cgroup/memory.stat", f"anon {10 * MIB}\nfile {80 * MIB}\nshmem {5 * MIB}")
        assert cgroup.num_cores() == 2 and default_cpu_threads() == 1
        assert cgroup.memory_limit() == host_memory.machine_bytes() == 100 * MIB
        assert cgroup.memory_left() == (100 - 90 + 80 - 5) * MIB


@pytest.mark.parametrize(("outer", "inner"), [(4000, 700), (700, 4000), (700, None)])
def test_the_tightest_of_nested_groups(write, outer: int, inner: int | None) -> None:
    """systemd's MemoryMax and CPUQuota of a unit, and of the slice that it is in."""
    write("proc/self/cgroup", "0::/system.slice/vserve.service")
    for group, mib in (("system.slice", outer), ("system.slice/vserve.service", inner)):
        write(f"sys/fs/cgroup/{group}/memory.max", "max" if mib is None else mib * MIB)
        write(f"sys/fs/cgroup/{group}/memory.current", 600 * MIB)
        write(f"sys/fs/cgroup/{group}/memory.stat", f"anon {600 * MIB}\nfile 0\nshmem 0")
        write(f"sys/fs/cgroup/{group}/cpu.max", "max 100000" if mib is None else f"{mib * 1000} 1000000")
    assert cgroup.memory_limit() == 700 * MIB and cgroup.memory_left() == 100 * MIB
    assert cgroup.num_cores() == 1


def test_version_1(write) -> None:
    """A tree for each controller, whose mount may be named for two; "no limit" is a huge number."""
    write("proc/self/cgroup", "12:memory:/slurm/job_7\n4:cpu,cpuacct:/slurm/job_7\n1:name=systemd:/x")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    write("sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", 500 * MIB)
    write("sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes", 450 * MIB)
    write("sys/fs/cgroup/memory/slurm/job_7/memory.stat", f"total_cache {300 * MIB}\ntotal_shmem {50 * MIB}")
    write("sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us", 300000)
    write("sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_period_us", 100000)
    assert cgroup.memory_limit() == 500 * MIB and cgroup.memory_left() == (500 - 450 + 300 - 50) * MIB
    assert cgroup.num_cores() == 3
    write("sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us", -1)
    assert cgroup.num_cores() == 16


def test_what_cannot_be_read_limits_nothing(write) -> None:
    write("proc/self/cgroup", "nonsense\n0::/../..")
    write("sys/fs/cgroup/cpu.max", "0 0 0")
    write("sys/fs/cgroup/memory.max", "what")
    assert (cgroup.num_cores(), cgroup.memory_limit(), cgroup.memory_left()) == (16, None, None)
