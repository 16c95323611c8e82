"""tools/gpu/measure.py for real against a tiny model on the CPU, and what it does when something fails."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from vserve.engine.describe.reading import read_folder
from vserve.engine.files.checkpoint import read_headers
from vserve.engine.weights.loader import load_model

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu" / "measure.py"


@pytest.fixture
def measure(monkeypatch):
    """The script as a module, and those beside it that it imports."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    yield importlib.import_module("measure")
    for name in ("measure", "model_folder", "processes", "report"):
        del sys.modules[name]


def processes_with(folder: Path) -> list[str]:
    """Those whose environment names it, as that of every process that the script starts does."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it is gone, or somebody else's
    return found


@pytest.mark.slow
def test_every_workload_is_measured_against_a_real_server(measure, tiny_model, tmp_path):
    factor, output, work = 0.02, tmp_path / "results" / "all.json", tmp_path / "work"
    work.mkdir()
    run = subprocess.run(
        [sys.executable, str(SCRIPT), f"--model={tiny_model('llama')}", f"--scale={factor}", "--repeats=1",
         "--in-process", f"--work-dir={work}", f"--output={output}"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "VSERVE_METRICS_PREFIX": "other:", "VLLM_API_KEY": "unused"},
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert not list(work.iterdir()) and not processes_with(work)
    content = json.loads(output.read_text())
    assert content["failures"] == [] and "torch" in content["environment"]["packages"]
    (server,) = content["servers"]["default"]
    assert 0 < sum(server["phases"].values()) < server["ready"] < server["first_token"]

    rows = {row["name"]: row for row in content["rows"]}
    assert list(rows) == [*measure.WORKLOADS, "in-process"]
    lines = content["table"]
    assert "\n".join(lines) in run.stdout and "not measured" not in run.stdout
    assert len(lines) == 2 + sum(len(row["figures"]) for row in rows.values())
    for row in rows.values():
        (result,) = row["runs"]
        for figure in row["figures"]:
            value = measure.Figure(**figure).value(result)
            # On a busy machine the few tokens of an answer may arrive at once: then there is no time between them.
            assert value > 0 or (value == 0 and figure["label"].startswith(("TPOT", "ITL")))
            (line,) = (line for line in lines if line.startswith(f"| {row['title']} | {figure['label']} |"))
            median, runs = line.split(" | ")[3:5]
            assert float(median.replace(",", "")) == pytest.approx(value, rel=1e-3) and runs == median
    for name, workload in measure.WORKLOADS.items():
        workload, (result,) = workload.scaled(factor), rows[name]["runs"]
        bench = result["bench"]
        assert (bench["completed"], bench["failed"]) == (workload.num_requests, 0)
        assert bench["total_input_tokens"] == workload.num_requests * (workload.prefix_len + workload.input_len)
        assert bench["total_output_tokens"] == workload.num_requests * workload.output_len
        assert bench["max_concurrency"] == workload.concurrency and bench["seed"] is None
        assert bench["num_clients"] == min(4, workload.num_requests, workload.concurrency or 4)
        assert 0 < bench["sse_events_per_token"] < 2 and result["api_us_per_token"] >= 0
        assert result["counters"] == {"late compilations": 0, "missed graphs": 0, "preemptions": 0}
        if workload.rate is not None:
            assert bench["duration"] > (workload.num_requests - 1) / workload.rate
    assert sum(rows[name]["runs"][0]["api_us_per_token"] for name in measure.WORKLOADS) > 0


class FakeServer:
    """Starts and stops; a counter and its CPU time grow by one whenever they are read."""

    port = 1
    log: ClassVar[list[str]] = []

    def __init__(self, *_: object) -> None:
        self.log.append("start")
        self.compilations, self.seconds = 0, 0.0

    def wait_until_ready(self):
        return {"ready": 2.0, "first_token": 2.5, "phases": {"weights": 1.5}}

    def counters(self):
        self.compilations += 1
        return {"late compilations": self.compilations, "missed graphs": 0, "preemptions": 0}

    def cpu_seconds(self):
        self.seconds += 1
        return self.seconds

    def stop(self):
        self.log.append("stop")


class FakeVServe:
    """Its second benchmark fails."""

    timeout = 1.0

    def __init__(self, *_: object) -> None:
        self.count = 0

    def environment(self):
        return {}

    def bench(self, *_: str, json_flag: str):
        self.count += 1
        if self.count == 2:
            raise RuntimeError("out of luck")
        keys = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms", "total_token_throughput")
        return dict.fromkeys(keys, 100.0 * self.count) | {"total_output_tokens": 4, "sse_events_per_token": 1.0}


def test_what_was_measured_before_and_after_a_failure_is_kept(measure, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure, "Server", FakeServer)
    monkeypatch.setattr(measure, "VServe", FakeVServe)
    monkeypatch.setattr(measure.signal, "signal", lambda *_: None)
    monkeypatch.setattr(FakeServer, "log", [])
    output = tmp_path / "all.json"
    words = ["measure", "--only=long-prompt,sustained", "--repeats=2", f"--model={tmp_path}", f"--output={output}"]
    monkeypatch.setattr(sys, "argv", words)
    assert measure.main() == 1
    assert FakeServer.log == ["start", "stop", "start", "stop"]
    content = json.loads(output.read_text())
    assert content["failures"] == ["long-prompt (default): out of luck"]
    assert [len(row["runs"]) for row in content["rows"]] == [1, 2]
    head, rule, *lines = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if "|" in line)
    assert len(head) == 10 and set(rule) == {"---"}
    assert [line[1:5] for line in lines] == [
        ["TTFT p50, ms", "205", "**100**", "100"],
        ["total tok/s", "32,000", "350", "300 400"],
        ["TTFT p50, ms", "300", "350", "300 400"],
        ["ITL p99, ms", "", "350", "300 400"],
    ]
    assert lines[0][5:] == ["1.00", "1", "0", "0", "250,000"]
    assert lines[1][5:] == ["1.00 1.00", "2", "0", "0", "250,000"]


def test_weights_are_what_the_loader_wants(model_folder, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(model_folder, "NOISE_BYTES", 5000)  # shorter than some of the tensors
    source = tiny_model("llama", num_hidden_layers=3)
    size = model_folder.add_weights(source, tmp_path)
    expected, written = read_headers(source), read_headers(tmp_path)
    assert {name: info.shape for name, info in written.items()} == {name: info.shape for name, info in expected.items()}
    assert size == sum(info.num_bytes for info in written.values())
    assert len({info.file for info in written.values()}) == 4
    config = read_folder(tmp_path)
    model = load_model(tmp_path, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    for weight in model.parameters():
        assert weight.isfinite().all() and 0.01 < weight.std() < 0.03
    assert (tmp_path / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_weights_that_do_not_fit_are_not_written(model_folder, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(model_folder.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match="name another folder"):
        model_folder.add_weights(tiny_model("llama"), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
