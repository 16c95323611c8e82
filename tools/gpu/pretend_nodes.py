"""One model over many ranks on two pretended nodes of this machine: starts, answers as one process does, dies rightly.

    python tools/gpu/pretend_nodes.py [MODEL] [-tp 8] [-pp 2] [--backend mp | ray] [--device cpu]

mp: two nodes are two loopback addresses, each with a `vserve` command of its own. ray: a cluster of two nodes on this
machine, whose actors start the ranks. Without MODEL a small one with eight heads and five layers is made, so that
stages are uneven. Each line is a step and the seconds it took; exit code 1 where answers differ, a death is not told
within ten seconds with the name of a rank, or a process is left. On the CPU a rank takes some 0.4 GiB and starts in
about five seconds of a core: sixteen want eight cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

DEMO = Path(__file__).parents[2] / "configs" / "demo"
PROMPTS = ("What is 12 + 30?", "The capital of France is", "Once upon a time", "a b c d e f g h i j k l m n o p " * 20)
LIMIT = 10.0  # seconds from a death to the word about it
PATIENCE = 600.0  # for a start of all ranks
OTHER_HOST = "127.0.0.2"
RANK = b"vserve.engine.start.rank_process"  # in the command line of each rank but the first
MARK = "PRETENDED_NODES"  # in the environment of all processes: ranks of others are none of ours


class Command:
    """A `vserve` command, and what it says."""

    def __init__(self, *options: str) -> None:
        environment = {"VSERVE_CLUSTER_SECRET": "of these two"} | os.environ
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vserve.server.cli.main", *options, "--log-format", "text"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.lines: list[str] = []
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr or ()), daemon=True).start()

    def said(self, text: str, since: int) -> str | None:
        return next((line.strip() for line in self.lines[since:] if text in line), None)


def make_model(folder: Path) -> Path:
    """Eight heads, four of keys, five layers, random weights; the demo model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1536, hidden_size=256, intermediate_size=640, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1024, initializer_range=0.2, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in DEMO.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def answers(url: str) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        response = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=300)
        response.raise_for_status()
        found.append(response.json()["choices"][0]["token_ids"])
    return found


def until(what: Callable[[], object], seconds: float = PATIENCE, *commands: Command) -> float:
    """→ how long it took. Raises SystemExit where it takes longer, or one of the commands ends."""
    begun = time.monotonic()
    while not what():
        for command in commands:
            if command.process.poll() is not None:
                raise SystemExit(f"exit code {command.process.returncode}:\n{''.join(command.lines[-5:])}")
        if time.monotonic() - begun > seconds:
            said = "".join(line for command in commands for line in command.lines[-5:])
            raise SystemExit(f"not within {seconds:.0f} s:\n{said}")
        time.sleep(0.05)
    return time.monotonic() - begun


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    return False


def ranks() -> list[int]:
    """Processes of all ranks but the first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mine = f"{MARK}={os.environ[MARK]}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if mine and RANK in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def ray_cluster(size: int) -> Iterator[None]:
    from ray.cluster_utils import Cluster

    os.environ |= {
        "RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    made = Cluster()
    for _ in range(2):
        made.add_node(num_cpus=-(-size // 2), object_store_memory=80 << 20, include_dashboard=False)
    os.environ["RAY_ADDRESS"] = made.address
    try:
        yield
    finally:
        made.shutdown()


def check(model: Path, device: str, options: list[str], size: int, two_commands: bool) -> int:
    failures = 0

    def tell(step: str, seconds: float, right: bool = True) -> None:
        nonlocal failures
        failures += not right
        print(f"{'' if right else 'FAULT '}{step}: {seconds:.1f} s", flush=True)

    common = [
        str(model),
        "--served-model-name",
        "m",
        "--max-model-len",
        "512",
        "--dtype",
        "float32",
        "--device",
        device,
    ]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    alone = Command(*common, "--port", str(port))
    try:
        tell("one process is ready", until(lambda: is_ready(url), PATIENCE, alone))
        expected = answers(url)
        alone.process.terminate()
        alone.process.wait(60)
    finally:
        alone.process.kill()

    nodes = ["--nnodes", "2", "--master-port", str(free_port())] if two_commands else []
    other = [*common, *options, *nodes, "--node-rank", "1", "--headless", "--host-ip", OTHER_HOST]
    commands = [Command(*other)] if two_commands else []
    first = Command(*common, *options, *nodes, "--port", str(port))
    commands.append(first)
    try:
        tell(f"{size} ranks are ready", until(lambda: is_ready(url), PATIENCE, *commands))
        begun, right = time.monotonic(), answers(url) == expected
        tell("the same tokens as of one process", time.monotonic() - begun, right)
        tell(f"{len(ranks())} ranks beside the first", 0.0, len(ranks()) == size - 1)
        for name, victim in (("the last rank is killed", -1), ("one in the middle is killed", len(ranks()) // 2)):
            seen = len(first.lines)
            os.kill(ranks()[victim], signal.SIGKILL)
            seconds = until(lambda seen=seen: first.said(f" of {size} (", seen), PATIENCE, *commands)  # type: ignore[misc]
            print(f"  {first.said(f' of {size} (', seen)}")
            tell(name, seconds, seconds <= LIMIT)
            tell("ready again", until(lambda: is_ready(url), PATIENCE, *commands))
            tell("the same tokens", 0.0, answers(url) == expected)
        if two_commands:
            seen = len(first.lines)
            commands.pop(0).process.kill()
            seconds = until(lambda: first.said(f" of {size} (", seen), PATIENCE, first)
            print(f"  {first.said(f' of {size} (', seen)}")
            tell("the other node is killed", seconds, seconds <= LIMIT)
            commands.insert(0, Command(*other))
            tell("ready again", until(lambda: is_ready(url), PATIENCE, *commands))
            tell("the same tokens", 0.0, answers(url) == expected)
        begun = time.monotonic()
        first.process.terminate()
        codes = [command.process.wait(120) for command in reversed(commands)]
        tell(f"all have ended, exit codes {codes}", time.monotonic() - begun, not any(codes))
        tell("no rank is left", until(lambda: not ranks(), LIMIT))
    finally:
        for command in commands:
            command.process.kill()
            command.process.wait()
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=8)
    parser.add_argument("-pp", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--backend", choices=("mp", "ray"), default="mp")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    tensor, stages = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
    options = ["-tp", str(tensor), "-pp", str(stages), "--cpu-threads", str(tensor * stages)]
    os.environ[MARK] = str(os.getpid())
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make_model(Path(folder))
        if arguments.backend == "mp":
            return int(check(model, arguments.device, options, tensor * stages, True) > 0)
        with ray_cluster(tensor * stages):
            options += ["--distributed-executor-backend", "ray"]
            return int(check(model, arguments.device, options, tensor * stages, False) > 0)


if __name__ == "__main__":
    sys.exit(main())
