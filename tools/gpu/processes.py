"""The processes of a measurement: `vserve` commands of this checkout, each with a time limit, all ended in the end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
FAULTS = CHECKOUT / "tests" / "gpu" / "faults.py"
LAST_LINES = 20  # of a log, where something failed
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
PATIENCE = 60.0  # seconds that a process gets to end in order
COUNTERS = {  # by their names in tables
    "late compilations": "late_kernel_compilations_total",
    "missed graphs": "cudagraph_misses_total",
    "preemptions": "num_preemptions_total",
}


class MeasurementError(Exception):
    """Something could not be measured; the message says why, with the last lines of the log."""


class VServe:
    """The command of this checkout, whatever is installed, with its defaults, whatever the environment says."""

    def __init__(self, scratch: Path, timeout: float, checkout: Path = CHECKOUT) -> None:
        """`scratch`: a folder for logs and results; `timeout`: seconds for a start or a run; `checkout`: another one,
        to compare with."""
        self.scratch = scratch
        self.timeout = timeout
        packages = scratch / "packages"
        packages.mkdir()
        (packages / "vserve").symlink_to(checkout.resolve())
        sys.path.insert(0, str(packages))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("VSERVE_") and k != "VLLM_API_KEY"}
        paths = [str(packages), *filter(None, [kept.get("PYTHONPATH")])]
        self._environment = kept | {"PYTHONPATH": os.pathsep.join(paths)}
        self._count = 0

    def start(self, *arguments: str, fault: str = "") -> Process:
        """`fault`: of tests/gpu/faults.py, to be planted."""
        command = [str(FAULTS), fault] if fault else ["-m", "vserve.server.cli.main"]
        return Process([sys.executable, *command, *arguments], self._file("log"), self._environment)

    def bench(self, *arguments: str, json_flag: str, times: int = 1) -> dict[str, Any]:
        """What `vserve bench` wrote as JSON. `times`: how often it may take the timeout. Raises MeasurementError."""
        file = self._file("json")
        if json_flag == "save-result":
            save = ["--save-result", f"--result-dir={file.parent}", f"--result-filename={file.name}"]
        else:
            save = [f"--{json_flag}={file}"]
        limit = times * self.timeout
        with contextlib.closing(self.start("bench", *arguments, *save)) as process:
            code = process.wait(limit)
            if code != 0:
                why = f"took more than {limit:.0f} s (--timeout)" if code is None else f"ended with exit code {code}"
                raise process.failure(f"vserve bench {arguments[0]} {why}")
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    def environment(self) -> dict[str, Any]:
        """Versions and hardware."""
        with contextlib.closing(self.start("collect-env", "--json")) as process:
            process.wait(self.timeout)
            text = process.log.read_text(errors="replace")
            try:
                found: dict[str, Any] = json.loads(text)
            except ValueError:  # warnings between the lines, say: no reason to measure nothing
                return {"text": text}
            return found

    def _file(self, suffix: str) -> Path:
        self._count += 1
        return self.scratch / f"{self._count}.{suffix}"


class Process:
    """A command in a session of its own, so that whatever it starts ends with it. Whoever makes one must close it."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self.begun = time.monotonic()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
                cwd=log.parent, start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        self.pid = self._process.pid

    def wait(self, timeout: float) -> int | None:
        """The exit code; None where it still runs after so many seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def failure(self, why: str) -> MeasurementError:
        lines = self.log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        return MeasurementError("\n  ".join([why, *lines]))

    def close(self) -> None:
        """In order where it can be, and at once where not; the memory of the card is free afterwards."""
        if self._process.poll() is None:
            self._process.terminate()
            self.wait(PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def _end_with_parent() -> None:
    """In the child: SIGTERM when this script ends in a way that leaves it no time to close anything."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Server:
    """`vserve MODEL` on a free port of this machine."""

    def __init__(self, vserve: VServe, model: Path, options: Sequence[str], fault: str = "") -> None:
        # Bound, never listening: nobody else is given the port. The server, which sets SO_REUSEADDR too, can use it.
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self.port: int = self._reservation.getsockname()[1]
        self._timeout = vserve.timeout
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        place = "--host=127.0.0.1", f"--port={self.port}"
        self._process = vserve.start(str(model), *options, *place, fault=fault)

    def wait_until_ready(self) -> dict[str, Any]:
        """Seconds from the command to ready and to the first token, the phases in between, and every setting.

        Raises MeasurementError.
        """
        while not self._is_ready():
            code = self._process.wait(0.01)
            if code is not None:
                raise self._process.failure(f"the server ended with exit code {code}")
            if time.monotonic() - self._process.begun > self._timeout:
                raise self._process.failure(f"the server was not ready in {self._timeout:.0f} s (--timeout)")
        ready = time.monotonic() - self._process.begun
        self.get("/v1/completions", {"prompt": "Say something.", "max_tokens": 1})
        first_token = time.monotonic() - self._process.begun
        info = json.loads(self.get("/server_info"))
        return {"ready": ready, "first_token": first_token, "phases": info["startup_seconds"], "server_info": info}

    def counters(self) -> dict[str, float]:
        """COUNTERS, since the server started. Raises MeasurementError."""
        page = self.get("/metrics")
        found = {}
        for key, name in COUNTERS.items():
            values = re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
            if not values:
                raise MeasurementError(f"/metrics has no vllm:{name}")
            found[key] = sum(map(float, values))
        return found

    def cpu_seconds(self) -> float:
        """User and system time of the API process so far, to a hundredth. Raises MeasurementError when it is gone."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            raise self._process.failure("the server is gone") from None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def processes(self) -> dict[str, int]:
        """The ids of the server's process and of its children, by what they are."""
        found = {"the server": self._process.pid}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[1]) == self._process.pid:
                    found[f"its child {len(found)}"] = int(stat.parent.name)
        return found

    def stop(self) -> None:
        self._process.close()
        self._reservation.close()

    def _is_ready(self) -> bool:
        """By an endpoint of the API: what a request needs beside the engine may be there later than the engine is."""
        try:
            with self._opener.open(f"http://127.0.0.1:{self.port}/v1/models", timeout=5):
                return True
        except OSError:
            return False

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        """With a body, it is posted. Raises MeasurementError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                text: str = response.read().decode()
                return text
        except OSError as error:
            raise self._process.failure(f"the server does not answer {path} ({error})") from None
