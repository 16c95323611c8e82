"""Facts on this machine: cards, memory, limits, versions. Nothing here fails; what cannot be found out is None."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ...engine.options.cgroup import num_cores as num_cores
from ...engine.planning.host_memory import available_bytes, machine_bytes

# In a process of its own: a driver that crashes or hangs must not take the one that reports it along.
_PROBE = """
import json
found = {}
try:
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    if torch.version.cuda is not None:
        torch.cuda.init()
        found["architectures"] = torch.cuda.get_arch_list()
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            found.setdefault("cards", []).append(
                {"name": torch.cuda.get_device_name(i), "capability": torch.cuda.get_device_capability(i),
                 "free": free, "total": total})
except Exception as error:
    found["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
print(json.dumps(found))
"""
_PROBE_SECONDS = 120


@dataclass(frozen=True)
class Card:
    name: str
    capability: tuple[int, int]
    free: int  # bytes
    total: int


@dataclass(frozen=True)
class Torch:
    version: str | None = None
    cuda: str | None = None  # that torch was built with
    architectures: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()
    error: str | None = None


def probe_torch() -> Torch:
    """What torch says of itself and the cards; takes seconds."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Torch(error=f"torch does not answer within {_PROBE_SECONDS} s")
    except (OSError, ValueError, LookupError):
        return Torch(error=f"torch ends the process (exit code {done.returncode})")
    cards = [Card(c["name"], tuple(c["capability"]), c["free"], c["total"]) for c in found.get("cards", ())]
    return Torch(
        found.get("torch"), found.get("cuda"), tuple(found.get("architectures", ())), tuple(cards), found.get("error")
    )


def nvidia_smi() -> list[dict[str, str]] | None:
    """Of each card name, driver_version, memory.total and memory.free in MiB; None where there is no driver."""
    fields = ("name", "driver_version", "memory.total", "memory.free")
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    rows = (line.split(", ") for line in done.stdout.strip().splitlines())
    return [dict(zip(fields, row, strict=False)) for row in rows]


def memory() -> tuple[int, int]:
    """(available, total) bytes; a container's limit counts, and files in memory give way."""
    total = machine_bytes()
    return min(available_bytes(), total), total


def shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def open_files() -> tuple[int, int]:
    """(soft, hard) limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def compiler() -> str | None:
    """Path of the C compiler that Triton takes."""
    return shutil.which(os.environ.get("CC") or "") or shutil.which("gcc") or shutil.which("clang")


def package_versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, LookupError):
        name = platform.system()
    return f"{name}, {platform.machine()}, Linux {platform.release()}, {' '.join(platform.libc_ver())}"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
