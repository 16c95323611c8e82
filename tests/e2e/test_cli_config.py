"""A server with options from a file, the environment and a preset says so, in its log and at /server_info."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

COMMAND = [sys.executable, "-m", "vserve.server.cli.main"]


@pytest.mark.slow
def test_a_server_says_where_its_options_are_from(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("served-model-name: [one, two]\nmax_model_len: 512\nperformance-mode: latency\n")
    with serve(
        "--config", str(path), env={"VSERVE_STRICT_PARAMS": "yes", "VSERVE_MAX_LOGPROBS": "7", "VSERVE_PROT": "9"}
    ) as server:
        settings = httpx.get(f"{server.url}/server_info", timeout=240).json()["settings"]
        models = httpx.get(f"{server.url}/v1/models", timeout=240).json()
    found = {
        name: settings[name] for name in ("max_model_len", "strict_params", "max_logprobs", "max_num_seqs", "port")
    }
    assert found == {
        "max_model_len": {"value": 512, "source": "file"},
        "strict_params": {"value": True, "source": "environment"},
        "max_logprobs": {"value": 7, "source": "environment"},
        "max_num_seqs": {"value": 64, "source": "preset"},
        "port": {"value": 0, "source": "flag"},
    }
    assert [model["id"] for model in models["data"]] == ["one", "two"]
    server.wait()
    log = "".join(server.stderr)
    assert "set by --performance-mode latency: " in log and f"set by {path}: " in log
    (warning,) = [json.loads(line) for line in server.stderr if "VSERVE_PROT" in line]
    assert warning["level"] == "warning" and "did you mean VSERVE_PORT?" in warning["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-modle-len", "3"], "did you mean --max-model-len?"),
        (["--config", "/no/such/file"], "cannot be read"),
        (["sevre"], "did you mean serve?"),
        (["--port", "99999"], "--port is 99999"),
        # before any model is looked at: this one does not exist
        (["/no/model", "--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "is below --max-num-seqs 64"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], message: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


@pytest.mark.parametrize("command", ["--help", "serve --help", "completion zsh"])
@pytest.mark.slow
def test_a_reader_that_has_left_gets_no_traceback(command: str) -> None:
    script = f'sleep 2; exec "$@" {command}'  # when it writes, `:` has long ended
    done = subprocess.run(["bash", "-c", f"({script}) | :", "-", *COMMAND], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stderr == ""
