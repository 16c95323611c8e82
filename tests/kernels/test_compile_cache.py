"""What compile-only checks keep: nothing is compiled twice from the same sources, and nothing old is taken for new."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = "import time\nprint(json.dumps([sys.argv[1:], time.time_ns()]))"


@pytest.fixture
def conftest(run_for_hopper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module that the fixture is from, at work in a folder of its own."""
    module = sys.modules[run_for_hopper.__module__]
    for folder in ("kernels", "engine", "configs/tiles"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("kernels", "engine"):
        (tmp_path / folder / "one.py").write_text("tile = 1")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    module._sources.cache_clear()
    yield module
    module._sources.cache_clear()


def test_the_same_is_kept(conftest: Any, run_for_hopper: Callable[..., Any]) -> None:
    first = run_for_hopper(SCRIPT, "a")
    assert first[0] == ["a"] and run_for_hopper(SCRIPT, "a") == first


@pytest.mark.parametrize("what", ["script", "arguments", "kernel", "engine", "tiles", "environment"])
def test_what_could_be_another_is_made_anew(
    what: str, conftest: Any, run_for_hopper: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = f"# as vserve.engine has it\n{SCRIPT}"
    first = run_for_hopper(usual, "a")
    script, argument = (usual + "#", "a") if what == "script" else (usual, "b" if what == "arguments" else "a")
    if what in ("kernel", "engine"):
        (tmp_path / what.replace("kernel", "kernels") / "one.py").write_text("tile = 2")
    elif what == "tiles":
        (tmp_path / "configs" / "tiles" / "card.json").write_text("{}")
    elif what == "environment":
        monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    conftest._sources.cache_clear()  # as the next run of pytest has it
    assert run_for_hopper(script, argument)[1] > first[1]


def test_of_the_engine_only_those_know_that_name_it(
    conftest: Any, run_for_hopper: Callable[..., Any], tmp_path: Path
) -> None:
    first = run_for_hopper(SCRIPT, "a")
    (tmp_path / "engine" / "one.py").write_text("tile = 2")
    conftest._sources.cache_clear()
    assert run_for_hopper(SCRIPT, "a") == first


def test_no_kernel_imports_the_engine() -> None:
    """Else the scripts above would have it too."""
    for path in (Path(__file__).parents[2] / "kernels").rglob("*.py"):
        assert not re.search(r"^\s*(?:from|import) \S*\b(?:engine|server)\b", path.read_text(), re.MULTILINE), path


def test_a_script_that_writes_files_writes_them_each_time(conftest: Any, run_for_hopper: Any, tmp_path: Path) -> None:
    script = "open(sys.argv[1], 'w')\nprint('1')"
    for _ in range(2):
        assert run_for_hopper(script, str(tmp_path / "kernel")) == 1
        (tmp_path / "kernel").unlink()


def test_a_failure_is_not_kept(conftest: Any, run_for_hopper: Callable[..., Any]) -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match="no such tile"):
            run_for_hopper("raise ValueError('no such tile')")
