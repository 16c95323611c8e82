"""doctor, collect-env and completion: what they find, what they say, what they hide."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

import vserve
from vserve.engine.config import EngineConfig
from vserve.server.cli import collect_env, completion, doctor, machine, main
from vserve.server.cli.machine import Card, Torch
from vserve.server.options.config import ServerConfig

DEMO = Path(__file__).parents[2] / "configs" / "demo"
CARD = Card("H200", (9, 0), 140 << 30, 141 << 30)
ON_CARD = Torch("2.13.0", "13.0", ("sm_90",), (CARD,))
ON_CPU = Torch("2.13.0+cpu")


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine without faults; healthy(name, value) gives it one."""

    def make(name: str, value: Any) -> None:
        monkeypatch.setattr(machine, name, lambda *arguments: value)

    make("probe_torch", ON_CPU)
    make("nvidia_smi", None)
    make("memory", (32 << 30, 64 << 30))
    make("shared_memory", 64 << 20)
    make("open_files", (1024, 1 << 20))
    make("compiler", "/usr/bin/gcc")
    make("package_versions", {"triton": "3.7.1"})
    return make


def examine(model: Path | str = DEMO, port: int = 0, **options: Any) -> dict[str, doctor.Finding]:
    found = list(doctor.examine(EngineConfig(str(model), **options), ServerConfig(host="127.0.0.1", port=port)))
    assert all(finding.remedy for finding in found if finding.status == doctor.FAIL)
    return {finding.name: finding for finding in found}


def test_a_machine_without_faults(healthy: Any) -> None:
    found = examine()
    assert {finding.status for finding in found.values()} == {"ok"}
    assert "the CPU serves" in found["driver"].text and "9 MiB of weights" in found["model"].text


def test_a_card(healthy: Any) -> None:
    healthy("probe_torch", ON_CARD)
    healthy("nvidia_smi", [{"driver_version": "580.1", "name": "H200"}])
    found = examine()
    assert found["driver"].text == "NVIDIA 580.1, 1 card" and "compute 9.0" in found["card 0"].text
    healthy("compiler", None)
    assert "apt-get install gcc" in examine()["C compiler"].remedy
    healthy("package_versions", {"triton": "not installed"})
    assert examine()["triton"].status == "FAIL"
    healthy("probe_torch", Torch("2.13.0", "13.0", (), (Card("T4", (7, 5), 1 << 30, 16 << 30),) * 2))
    found = examine()
    assert "--dtype float16" in found["card 0"].remedy and "--ipc=host" in found["shared memory"].remedy


def test_a_card_that_torch_cannot_use(healthy: Any) -> None:
    healthy("nvidia_smi", [{"driver_version": "470.1", "name": "A100"}])
    healthy("probe_torch", Torch("2.13.0", "13.0", error="RuntimeError: the driver is too old"))
    assert examine()["torch"].status == "warn" and "too old" in examine()["torch"].text
    assert examine(device="cuda")["torch"].status == "FAIL"
    healthy("probe_torch", ON_CPU)
    assert "install torch from PyPI" in examine()["torch"].remedy
    healthy("nvidia_smi", None)
    assert examine(device="cuda")["driver"].status == "FAIL"
    healthy("probe_torch", Torch(error="ImportError: libfoo.so"))
    assert examine()["torch"].status == "FAIL"


def test_limits(healthy: Any) -> None:
    healthy("open_files", (256, 256))
    healthy("memory", (1 << 20, 4 << 30))
    found = examine()
    assert "nofile" in found["open files"].remedy and found["memory"].status == "warn"
    assert found["model"].status == "FAIL" and "has 1 MiB for vserve" in found["model"].remedy


def test_a_port_in_use(healthy: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = examine(port=taken.getsockname()[1])["port"]
    assert found.status == "FAIL" and "--port" in found.remedy


def test_models(healthy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert examine("/no/such/folder")["model"].status == "FAIL"
    monkeypatch.setattr(doctor, "_from_hub_cache", lambda engine: None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    found = examine("Qwen/Qwen3-0.6B")["model"]
    assert found.status == "warn" and str(tmp_path) in found.text
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert examine("Qwen/Qwen3-0.6B")["model"].status == "FAIL"
    folder = tmp_path / "model"
    folder.mkdir()
    assert "config.json" in examine(folder)["model"].text
    config = json.loads((DEMO / "config.json").read_text())
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    assert examine(folder)["model"].status == "FAIL"
    shutil.copy(DEMO / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    assert "NoSuchModel" in examine(folder)["model"].text and examine(folder)["model"].status == "FAIL"


def test_this_machine(capsys: Any) -> None:
    """Nothing is replaced here: whatever this machine is, the lines are there, and the exit code follows them."""
    code = main.main(["doctor", "--host", "127.0.0.1", "--port", "0", "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    python") and any(line.startswith("ok    model") for line in lines)
    assert code == (1 if any(line.startswith("FAIL") for line in lines) else 0)


def test_environment_report(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "sesame")
    monkeypatch.setenv("VSERVE_API_KEY", "sesame")
    monkeypatch.setenv("VSERVE_PORT", "8123")
    assert main.main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["environment"]["HF_TOKEN"] == "(hidden)" and "sesame" not in text
    assert found["environment"]["VSERVE_PORT"] == "8123"
    assert found["packages"]["torch"].startswith("2.") and found["torch"]["version"] == found["packages"]["torch"]
    monkeypatch.setattr(machine, "probe_torch", lambda: ON_CARD)
    monkeypatch.setenv("NVIDIA_DRIVER_CAPABILITIES", "compute," * 100)
    collect_env.run(collect_env.argparse.Namespace(json=False))
    text = capsys.readouterr().out
    assert "H200 (9.0)" in text
    assert "NVIDIA_DRIVER_CAPABILITIES compute,compute" in text and max(map(len, text.splitlines())) < 260


def complete_in_bash(script: str, *words: str) -> list[str]:
    line = " ".join(f"'{word}'" for word in words)
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words) - 1}\n"
         f"$(complete -p vserve | sed 's/.*-F \\([^ ]*\\).*/\\1/') vserve\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_completion(capsys: Any) -> None:
    scripts = {}
    for shell in completion.SHELLS:
        assert main.main(["completion", shell]) == 0
        scripts[shell] = capsys.readouterr().out
    bash = scripts["bash"]
    assert complete_in_bash(bash, "vserve", "comp") == ["complete", "completion"]
    assert complete_in_bash(bash, "vserve", "serve", "--max-num-q") == [
        "--max-num-queued-reqs", "--max-num-queued-tokens",
    ]  # fmt: skip
    assert complete_in_bash(bash, "vserve", "serve", "--dtype", "b") == ["bfloat16"]
    assert complete_in_bash(bash, "vserve", "bench", "serve", "--num-p") != []
    for script in scripts.values():
        assert "run-batch" in script and "gpu-memory-utilization" in script
    for shell, script in scripts.items():
        if shutil.which(shell):
            assert subprocess.run([shell, "-n"], input=script, text=True, timeout=240).returncode == 0


@pytest.mark.parametrize("name", [*main.COMMANDS, ""])
def test_help_ends_with_examples_that_work(name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = main.command_parser(name, main.load(name)).format_help() if name else main.overview()
    *_, examples = text.partition("examples:\n")
    commands = examples.strip().splitlines()
    assert len(commands) >= 2
    for command in commands:
        words = shlex.split(re.split(" [<>] ", command)[0])
        assert words.pop(0) == "vserve"
        called = words.pop(0) if words[0] in main.COMMANDS else "serve"
        assert called == name or not name or name == "serve"
        main.command_parser(called, main.load(called)).parse_args(words)  # exits where it is wrong


def test_help_shows_what_switches_are(monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = main.command_parser("serve", main.load("serve")).format_help()
    for switch, default in (("strict-params", "off"), ("access-log", "on"), ("enable-prefix-caching", "on")):
        (line,) = [line for line in text.replace("\n" + " " * 24, " ").splitlines() if f"--no-{switch}" in line[:90]]
        assert line.endswith(f"(default: {default})"), line


@pytest.mark.parametrize("word", ["version", "--version", "-V"])
def test_the_version(word: str, capsys: Any) -> None:
    assert main.main([word]) == 0 and capsys.readouterr().out == f"vserve {vserve.__version__}\n"
