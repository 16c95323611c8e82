"""The faults of `make faults` can be planted, one a room, and what finds them is told; so is what nobody finds."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "planted.py"
REACHES = ("server/*.py", "engine/*.py", "kernels/*.py")
ROOMS = 20  # at least


@pytest.fixture(scope="module")
def planted(load_module: Callable[[Path], Any]) -> Any:
    return load_module(SCRIPT)


def test_every_fault_can_be_planted(planted: Any, tmp_path: Path) -> None:
    """Whoever changes such a line gives the table another text."""
    for fault in planted.read(SCRIPT.with_suffix(".toml")):
        path = tmp_path / fault.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / fault.file).read_text(encoding="utf-8"), encoding="utf-8")
        whole = fault.plant(tmp_path)
        broken = path.read_text(encoding="utf-8")
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(whole)), fault.name


def test_they_are_of_many_rooms(planted: Any) -> None:
    faults = planted.read(SCRIPT.with_suffix(".toml"))
    assert len({fault.name for fault in faults}) == len(faults)
    assert len({fault.room for fault in faults}) >= ROOMS
    assert {fault.file.split("/")[0] for fault in faults} == {"server", "engine", "kernels"}


TREE = {
    "__init__.py": "",
    "server/__init__.py": '"""A room."""\n',
    "server/sums.py": "def total(numbers):\n    return sum(numbers)\n\n\ndef most(numbers):\n    return max(numbers)\n",
    "tests/test_sums.py": (
        "from vserve.server.sums import most, total\n\n\ndef test_broken():\n    assert not 'always'\n\n\n"
        "def test_total():\n    assert total([1, 2]) == 3\n\n\ndef test_most():\n    assert most([1])\n"
    ),
    "pyproject.toml": (
        '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib -ra -p no:langsmith_plugin -p no:schemathesis"\n'
    ),
}
FAULTS = "".join(
    f'[[fault]]\nname = "{name}"\nfile = "server/sums.py"\nold = "{old}"\nnew = "{new}"\n'
    for name, old, new in (("seen", "sum(numbers)", "0"), ("unseen", "max(numbers)", "numbers[0]"))
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {**TREE, "faults.toml": FAULTS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, f"--root={tree}", f"--faults={tree / 'faults.toml'}", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow  # pytest starts five times
def test_who_finds_a_fault_is_told(tree: Path) -> None:
    """A test that fails in any case is no finder; the tree itself stays whole."""
    done = run(tree)
    assert "| server/sums.py | seen | 1 | tests/test_sums.py::test_total |" in done.stdout, done.stdout + done.stderr
    assert "| server/sums.py | unseen | 1 | **nobody** |" in done.stdout
    assert "fails without any fault: tests/test_sums.py::test_broken" in done.stdout
    assert done.returncode == 1 and done.stdout.rstrip().endswith("1 of 2 are found")
    assert (tree / "server/sums.py").read_text() == TREE["server/sums.py"]


def test_none_of_that_name_is_a_failure(tree: Path) -> None:
    done = run(tree, "no fault has this name")
    assert done.returncode == 1 and done.stdout.rstrip().endswith("0 of 0 are found")


def test_a_finder_fails_with_the_fault_alone(
    planted: Any, tree: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = planted.Copy(tree, tmp_path_factory.mktemp("copy"))
    fault, _ = planted.read(tree / "faults.toml")
    asked: list[tuple[bool, list[str]]] = []

    def first_failure(tests: list[str], jobs: int) -> str | None:
        """Of three tests the first always fails, the second with the fault, the third never."""
        is_planted = "return 0" in (copy.root / fault.file).read_text()
        asked.append((is_planted, tests))
        whole = tests == copy.tests_of(fault)
        failing = [name for name in ["always", *["planted"] * is_planted] if name not in copy.broken]
        return next((name for name in failing if whole or name in tests), None)

    monkeypatch.setattr(copy, "first_failure", first_failure)
    files = copy.tests_of(fault)
    assert files == ["tests/test_sums.py"]
    assert copy.finder(fault, files, 1) == "planted" and copy.broken == {"always"}
    assert asked == [(True, files), (False, ["always"]), (True, files), (False, ["planted"])]


def test_a_text_that_is_not_there_is_no_fault(planted: Any, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one, one = 1, 1\n")
    for old, count in (("two", 0), ("one", 2)):
        with pytest.raises(ValueError, match=f"a.py has '{old}' {count} times"):
            planted.Fault("it", "a.py", old, "").plant(tmp_path)
