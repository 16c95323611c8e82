"""A folder of tests that takes more than one and a half times its seconds fails the run of all tests."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
REACHES = ("tests/*test_*.py",)
SLOW = """import time
import pytest

@pytest.fixture(scope="module")
def thing():
    time.sleep(0.4)
    yield
    time.sleep(0.4)

def test_one(thing):
    time.sleep(0.2)
"""
REST = """class TestIt:
    def test_one(self):
        pass
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two runs: `big` takes a second in two processes at a time and another one alone, the rest nothing."""
    folder = tmp_path_factory.mktemp("checkout")
    files = {"big/test_a.py": SLOW, "big/test_b.py": SLOW, "small/test_c.py": REST, "test_top.py": REST}
    for name, text in files.items():
        (folder / "tests" / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / "tests" / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    runs = {"together": ("-n2", "--dist=loadfile"), "alone": ("-n0", "tests/big/test_a.py")}
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whatever is installed takes its time
    paths = []
    for name, options in runs.items():
        paths.append(folder / "build" / f"{name}.xml")
        command = [sys.executable, "-m", "pytest", "-p", "xdist", f"--junitxml={paths[-1]}", *options]
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, timeout=120)
    return paths


def judge(
    reports: list[Path], big: float, *, small: str = "small = 5\n", minutes: float = 5, pace: Path | None = None
) -> tuple[int, list[str]]:
    budgets = reports[0].with_name("budgets.toml")
    budgets.write_text(f'[test]\nminutes = {minutes}\n[test.seconds]\nbig = {big}\n{small}"." = 5\n')
    command = [sys.executable, str(TESTS / "budgets.py"), "test", *map(str, reports), f"--budgets={budgets}"]
    command += [] if pace is None else [f"--pace={pace}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_seconds_are_added_over_processes_and_runs(reports: list[Path]) -> None:
    code, lines = judge(reports, 100)
    assert code == 0
    words = [line.split() for line in lines]
    assert words[0] == ["tests", "of", "used,", "s", "allowed,", "s"]
    assert [row[0] for row in words[1:]] == [".", "big", "small", "all,"]
    assert words[1] == [".", "0", "5"] and words[3] == ["small", "0", "5"] and words[4][-1] == "300"
    assert 3 <= int(words[2][1]) < 30 and words[2][2] == "100"


def seconds_of_big(reports: list[Path]) -> float:
    """Exactly: the table has whole ones."""
    seconds, _ = runpy.run_path(str(TESTS / "budgets.py"))["read_reports"](reports)
    return float(seconds["big"])


def test_a_folder_may_take_half_as_much_again_and_no_more(reports: list[Path]) -> None:
    used = seconds_of_big(reports)
    code, lines = judge(reports, used / 1.3)
    assert code == 0 and lines[2].endswith("above it")
    code, lines = judge(reports, used / 1.8)
    assert code == 1 and lines[-1].startswith(f"FAILED: the tests of big took {used:.0f} s, more than 1.5 times the")


def test_a_slow_machine_may_take_longer_and_a_fast_one_no_less(reports: list[Path], tmp_path: Path) -> None:
    used, pace = seconds_of_big(reports), tmp_path / "pace.txt"
    pace.write_text("0.5\n0.018\n0.018\n0.001\n")
    code, lines = judge(reports, used / 2.7, pace=pace)
    assert code == 0 and lines[-1] == "this machine took 2.0 times as long as the one that the budgets are of"
    code, lines = judge(reports, used / 3.4, pace=pace)
    assert code == 1 and "more than 1.5 times (and 2.0 times, for the machine is slow) the" in lines[-1]
    pace.write_text("0.001\n")
    assert judge(reports, used / 1.3, pace=pace)[0] == 0 and judge(reports, used / 1.8, pace=pace)[0] == 1
    assert judge(reports, used / 1.8, pace=tmp_path / "none")[0] == 1, "where nobody measured"


def test_a_folder_without_a_budget_needs_one(reports: list[Path]) -> None:
    code, lines = judge(reports, 100, small="")
    assert code == 1 and lines[-1] == "FAILED: the tests of small have no budget: give them one in budgets.toml"


def test_all_together_have_a_limit_too(reports: list[Path]) -> None:
    code, lines = judge(reports, 100, minutes=0.001)
    assert code == 1 and lines[-1].endswith("times the 0.001 that budgets.toml allows: make some faster")


def test_every_folder_has_its_budget() -> None:
    folders = {path.parent.name if path.parent != TESTS else "." for path in TESTS.rglob("test_*.py")}
    said = tomllib.loads((TESTS / "budgets.toml").read_text())
    assert said.keys() == {"test", "test-all"}
    for target in said.values():
        assert target["seconds"].keys() == folders
        assert target["minutes"] <= 30
    for folder, seconds in said["test"]["seconds"].items():
        assert seconds <= said["test-all"]["seconds"][folder]
