"""Kernels compiled before a deployment: where they are kept, what is run for them, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vserve.engine.start.engine as engine_module
from vserve.engine.describe import model_source
from vserve.engine.errors import ConfigError
from vserve.engine.link import logs
from vserve.engine.options.config import EngineConfig
from vserve.engine.start import precompile
from vserve.engine.start.precompile import CacheSize, fingerprint, use_kernel_cache
from vserve.server.cli import main

VARIABLES = ("TRITON_CACHE_DIR", "TRITON_HOME", "VSERVE_CACHE", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def _logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets it up for a whole process, and this one goes on."""
    monkeypatch.setattr(logs, "configure", lambda *_: None)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back whatever is set meanwhile
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HOME": "/h"}, "/h/.cache/vserve/kernels"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/vserve/kernels"),
        ({"XDG_CACHE_HOME": "/x", "VSERVE_CACHE": "/v"}, "/v/kernels"),
        ({"VSERVE_CACHE": "/v", "TRITON_HOME": "/t"}, "/t/.triton/cache"),
        ({"VSERVE_CACHE": "/v", "TRITON_HOME": "/t", "TRITON_CACHE_DIR": "/c"}, "/c"),
    ],
    ids=str,
)
def test_one_folder_for_kernels(bare: pytest.MonkeyPatch, variables: dict[str, str], folder: str) -> None:
    for name, value in variables.items():
        bare.setenv(name, value)
    assert precompile.kernel_cache() == Path(folder)


def test_triton_writes_there(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    bare.setenv("VSERVE_CACHE", str(tmp_path))
    assert use_kernel_cache() == tmp_path / "kernels"
    cache.get_cache_manager("0123").put(b"code", "one.cubin")
    cache.get_cache_manager("0123").put(b"more", "one.ttir")
    assert CacheSize.of(tmp_path / "kernels") == CacheSize(1, 8)
    assert CacheSize.of(tmp_path / "nowhere") == CacheSize(0, 0)


def test_the_cpu_has_nothing_to_warm(bare: pytest.MonkeyPatch, capsys: Any) -> None:
    bare.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(["warm", "--device", "cpu"]) == 1
    assert "nothing is compiled for the CPU" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"torch sees no card here.* run `vserve warm` there"):
        precompile.warm(EngineConfig("m"), lambda progress: None)


def test_a_start_on_made_up_weights_fills_the_cache(
    bare: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Any, capsys: Any
) -> None:
    """With a card of straw: its start compiles two kernels, a helper was asked for the rest."""
    bare.setenv("VSERVE_CACHE", str(tmp_path))
    bare.setattr(torch.cuda, "is_available", lambda: True)
    ran: list[Any] = []

    class Start:
        def __init__(self, config: EngineConfig, report: Any, before_memory: Any) -> None:
            ran.append(config)
            before_memory()
            for name in ("a", "b"):
                (tmp_path / "kernels" / name).mkdir(parents=True)
                (tmp_path / "kernels" / name / "kernel.cubin").write_bytes(bytes(1 << 20))
            self.info = SimpleNamespace(device="H100", startup_seconds={"weights": 1.25, "warm-up": 7.0})

    helpers = SimpleNamespace(wait=lambda: ran.append("wait"), kill=lambda: ran.append("kill"))
    bare.setattr(engine_module, "Engine", Start)
    bare.setattr(precompile.Precompile, "start", lambda config: ran.append(config) or helpers)
    folder = str(tiny_model("llama"))
    assert main.main(["warm", folder, "--max-model-len", "64", "--port", "9000"]) == 0
    assert ran[0] is ran[1] and ran[2:] == ["wait", "kill"]
    assert (ran[0].model, ran[0].load_format, ran[0].max_model_len) == (folder, "dummy", 64)
    served = EngineConfig(folder, max_model_len=64)
    assert fingerprint(ran[0]) == fingerprint(served), "a server with these options finds all compiled"
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["weights"] == "1.2 s" and said["warm-up"] == "7.0 s" and "imports included" in said["in"]
    assert said["kernels"] == "2 compiled for H100, 0 were there"
    assert said["cache"] == f"{tmp_path / 'kernels'}, 2 MiB"


def test_made_up_weights_are_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(model_source, "from_hub", lambda name, revision, files, where: asked.append(files) or tmp_path)
    assert model_source.resolve_model_path("org/model", load_format="dummy") == tmp_path
    (files,) = asked
    assert "*.json" in files and not any("safetensors" in pattern or "bin" in pattern for pattern in files)


def test_helpers_compile_for_a_gguf_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precompile.os.path, "exists", lambda path: True)
    monkeypatch.setattr(precompile, "num_helpers", lambda *_: 2)
    monkeypatch.setattr(precompile, "read_config", lambda path: {"read": path.name})
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).touch()
        assert precompile.Precompile.start(EngineConfig(str(tmp_path / name))) is not None
    assert len(started) == 4
    one, two = (fingerprint(EngineConfig(str(tmp_path / name))) for name in ("one.gguf", "two.gguf"))
    assert one != two
