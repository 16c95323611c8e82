"""check whether this machine can serve: each line is ok, or says what to do"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ...engine.errors import ConfigError
from ...engine.options.config import EngineConfig
from ..options.config import ServerConfig
from . import health, machine
from .finding import FAIL, OK, WARN, Finding
from .flags import add_flags, read_flags
from .listen import listen
from .machine import Torch, gib
from .model_finding import model_finding, of_config_alone
from .template_finding import template_findings
from .terminal import styled

_STYLES = {OK: "green", WARN: "yellow", FAIL: "red"}
MIN_OPEN_FILES = 4096
MIN_SHARED_MEMORY = 1 << 30  # where several cards exchange data through it
EXAMPLES = ("vserve doctor", "vserve doctor Qwen/Qwen3-0.6B --max-model-len 32K", "vserve doctor --health")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser, EngineConfig, ServerConfig,
        only=(
            "model", "revision", "max_model_len", "dtype", "device", "gpu_memory_utilization", "kv_cache_memory_bytes",
            "host", "port", "uds",
        ),
    )  # fmt: skip
    parser.add_argument(
        "--health", action="store_true", help="only ask the server that runs beside this, wherever it listens, whether "
        "it takes requests: a container's health check; --port or --uds say which, where there are several",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 where nothing is in the way of serving, 1 where something is, 2 for a wrong option."""
    if arguments.health:
        return _health(arguments.opt_host, arguments.opt_port, arguments.opt_uds)
    try:
        engine, server = read_flags(arguments)
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    failed = 0
    for finding in examine(engine, server):
        failed += finding.status == FAIL
        status = styled(f"{finding.status:<5}", _STYLES[finding.status], sys.stdout)
        print(f"{status} {finding.name:<14} {finding.text}", flush=True)
        if finding.remedy:
            print(f"{'':<21}→ {finding.remedy}", flush=True)
    print("not ready: repair what says FAIL" if failed else "ready to serve")
    return 1 if failed else 0


def _health(host: str | None, port: int | None, uds: str | None) -> int:
    if uds or port:
        places = [health.Place(uds) if uds else health.Place(host or "127.0.0.1", port or 0)]
    else:
        places = health.find()
    ready, line = health.check(places)
    print(line)
    return 0 if ready else 1


def examine(engine: EngineConfig, server: ServerConfig) -> Iterator[Finding]:
    if (finding := of_config_alone(engine)) is not None:  # at once: torch takes seconds
        yield finding
        return
    torch = machine.probe_torch()
    on_card = engine.device == "cuda" or (engine.device == "auto" and bool(torch.cards))
    yield _python()
    yield _driver(torch, engine.device)
    yield _torch(torch, engine.device)
    for index in range(len(torch.cards)):
        yield _card(torch, index)
    yield from _triton(on_card)
    yield _pillow()
    yield _memory()
    yield _shared_memory(len(torch.cards))
    yield _open_files()
    yield _port(server)
    yield model_finding(engine, torch, on_card)
    yield from template_findings(engine)


def _python() -> Finding:
    return Finding(OK, "python", f"{platform.python_version()}, {machine.num_cores()} cores")


def _driver(torch: Torch, device: str) -> Finding:
    cards = machine.nvidia_smi()
    if cards:
        return Finding(OK, "driver", f"NVIDIA {cards[0]['driver_version']}, {len(cards)} card{'s' * (len(cards) > 1)}")
    if torch.cards:
        return Finding(OK, "driver", "torch finds one; nvidia-smi is not installed")
    remedy = "install NVIDIA's driver; in a container: docker run --gpus all, with the NVIDIA container toolkit"
    if device == "cuda":
        return Finding(FAIL, "driver", "no NVIDIA driver", remedy)
    return Finding(OK, "driver", "no NVIDIA driver: the CPU serves")


def _torch(torch: Torch, device: str) -> Finding:
    if torch.version is None:
        return Finding(FAIL, "torch", torch.error or "missing", "pip install -c constraints.txt .")
    built = f"{torch.version}, CUDA {torch.cuda}" if torch.cuda else f"{torch.version}, without CUDA"
    if torch.cards:
        return Finding(OK, "torch", built)
    if machine.nvidia_smi() or device == "cuda":
        reason = torch.error or "it finds no card"
        remedy = "install a driver that is as new as this CUDA, or torch for an older one (https://pytorch.org)"
        if torch.cuda is None:
            reason, remedy = "this build knows no CUDA", "install torch from PyPI: pip install -c constraints.txt torch"
        return Finding(FAIL if device == "cuda" else WARN, "torch", f"{built}: {reason}", remedy)
    return Finding(OK, "torch", built)


def _card(torch: Torch, index: int) -> Finding:
    card = torch.cards[index]
    major, minor = card.capability
    name, text = f"card {index}", f"{card.name}, {gib(card.free)} of {gib(card.total)} free, compute {major}.{minor}"
    if card.capability < (8, 0):
        return Finding(WARN, name, text, "cards before 8.0 (Ampere) have no bfloat16: add --dtype float16")
    if card.free < 0.8 * card.total:
        return Finding(WARN, name, text, "others use its memory (nvidia-smi lists them): end them, or lower "
                       "--gpu-memory-utilization")  # fmt: skip
    return Finding(OK, name, text)


def _triton(on_card: bool) -> Iterator[Finding]:
    version = machine.package_versions(("triton",))["triton"]
    if not on_card:
        yield Finding(OK, "triton", f"{version} (not used on the CPU)")
        return
    if version == "not installed":
        yield Finding(FAIL, "triton", version, "pip install -c constraints.txt triton")
        return
    yield Finding(OK, "triton", version)
    compiler = machine.compiler()
    header = Path(sysconfig.get_paths(scheme="posix_prefix")["include"]) / "Python.h"
    if compiler is None:
        yield Finding(FAIL, "C compiler", "none, and Triton builds its driver module with one",
                      "apt-get install gcc libc6-dev, or name one in CC")  # fmt: skip
    elif not header.exists():
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        yield Finding(FAIL, "C compiler", f"{compiler}, but {header} is missing", f"apt-get install {python}-dev")
    else:
        yield Finding(OK, "C compiler", f"{compiler}, with Python's headers")


def _pillow() -> Finding:
    version = machine.package_versions(("pillow",))["pillow"]
    if version == "not installed":
        return Finding(WARN, "pillow", f"{version}: pictures are refused", "pip install -c constraints.txt pillow")
    return Finding(OK, "pillow", version)


def _memory() -> Finding:
    available, total = machine.memory()
    text = f"{gib(available)} of {gib(total)} available"
    if available < 2 << 30:
        return Finding(WARN, "memory", text, "end other programs, or raise the container's limit: 2 GiB are little")
    return Finding(OK, "memory", text)


def _shared_memory(num_cards: int) -> Finding:
    size = machine.shared_memory()
    if size is None:
        return Finding(WARN, "shared memory", "no /dev/shm", "mount one: docker run --ipc=host")
    if size < MIN_SHARED_MEMORY and num_cards > 1:
        return Finding(WARN, "shared memory", f"/dev/shm has {gib(size)}, little for several cards",
                       "docker run --ipc=host, or --shm-size=4g")  # fmt: skip
    return Finding(OK, "shared memory", f"/dev/shm has {gib(size)}")


def _open_files() -> Finding:
    soft, hard = machine.open_files()
    text = f"at most {hard}" if hard >= 0 else "no limit"
    if 0 <= hard < MIN_OPEN_FILES:  # the server itself raises the soft limit
        return Finding(WARN, "open files", f"{text}, and each connection is one",
                       "ulimit -Hn 65536, LimitNOFILE=65536, or docker run --ulimit nofile=65536")  # fmt: skip
    return Finding(OK, "open files", text if soft == hard else f"{text} ({soft} before vserve raises it)")


def _port(server: ServerConfig) -> Finding:
    place = server.uds or f"{server.host}:{server.port}"
    existed = server.uds is not None and os.path.exists(server.uds)
    try:
        listen(server).close()
    except ConfigError as error:
        what, _, remedy = str(error).partition(";")
        return Finding(FAIL, "port", what, remedy.strip())
    if server.uds is not None and not existed:
        os.unlink(server.uds)
    return Finding(OK, "port", f"{place} is free")
