"""A test that fails is told at once, runs again with everything new, and counts as flaky where it passes then."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

CONFTEST = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("retries", {str(Path(__file__).with_name("retries.py"))!r})
retries = sys.modules["retries"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(retries)

def pytest_configure(config):
    retries.register(config, "7", lambda: 1.5)
"""
# Fails at its first try, in whatever part, and says what it was given at the second.
FLAKY = """
import pathlib
import pytest

HERE = pathlib.Path(__file__)

def once(name):
    try:
        HERE.with_name(name).touch(exist_ok=False)
    except FileExistsError:
        return
    raise ValueError("the machine stood still in " + name)

made = []

@pytest.fixture(scope="session")
def server():
    made.append("server")
    yield len(made)

@pytest.fixture
def fragile():
    if HERE.stem == "test_setup":
        once(HERE.stem + "-setup")
    yield
    if HERE.stem == "test_ends":
        once(HERE.stem + "-end")

def test_good(server): pass
"""
CALL = (
    FLAKY
    + """
def test_flaky(server):
    once(HERE.stem)
    assert server == 2, "the session's fixture is a new one"

def test_after(server):
    assert server == 1 and made == ["server"], "what runs again runs at the end"
"""
)
SETUP = FLAKY + "def test_setup(fragile): pass"
BAD = (
    FLAKY
    + """
def test_bad(server):
    assert server == 3
"""
)


def run(folder: Path, files: dict[str, str], *options: str, tries: bool = True) -> tuple[int, str]:
    """Exit code, and what it printed."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TEST_FLAKY": str(folder / "flaky.txt")}
    if not tries:
        del environment["TEST_FLAKY"]
    command = [sys.executable, "-m", "pytest", "-p", "xdist", f"--junitxml={folder / 'report.xml'}", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("processes", ["-n0", "-n2"])
def test_it_passes_then(tmp_path: Path, processes: str) -> None:
    code, said = run(tmp_path, {"call": CALL, "setup": SETUP}, processes, "--dist=loadfile")
    assert code == 0, said
    for line in (
        "FAILED ONCE test_call.py::test_flaky: (call) ValueError: the machine stood still in test_call; TEST_SEED=7, l",
        "FAILED ONCE test_setup.py::test_setup: (setup) ValueError: the machine stood still in test_setup-setup; ",
        "FLAKY test_call.py::test_flaky: it passes on the second try",
        "2 flaky tests so far, 2 at most",
    ):
        assert line in said, said
    assert said.index("FAILED ONCE test_call") < said.index("flaky: test_call"), "as it fails, and in the summary"
    assert "1.5 times as slow" in said and "5 passed" in said and "2 retried" in said
    assert "raise ValueError" in said, "the whole of its error stands in the summary"
    written = (tmp_path / "flaky.txt").read_text().splitlines()
    assert sorted(line.split(":")[0] for line in written) == ["test_call.py", "test_setup.py"]
    cases = [case.attrib["name"] for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase")]
    assert sorted(cases) == ["test_after", "test_flaky", "test_good", "test_good", "test_setup"]
    assert "failed once" in (tmp_path / "report.xml").read_text()


@pytest.mark.parametrize("processes", ["-n0", "-n1"])
def test_what_fails_twice_fails_the_run(tmp_path: Path, processes: str) -> None:
    code, said = run(tmp_path, {"bad": BAD}, processes)
    assert code == 1 and "FAILED TWICE test_bad.py::test_bad" in said and "1 failed" in said, said
    assert not (tmp_path / "flaky.txt").exists()


def test_the_third_flaky_test_of_all_runs_fails_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, {"call": CALL, "setup": SETUP})[0] == 0
    code, said = run(tmp_path, {"ends": SETUP}, "test_ends.py")
    assert code == 1 and "3 flaky tests so far, FAILED: more than 2" in said, said


def test_what_did_not_get_its_second_try_fails_the_run(tmp_path: Path) -> None:
    stopped = "def test_stopped():\n    raise KeyboardInterrupt\n"
    code, said = run(tmp_path, {"a": BAD, "b": stopped})
    assert code != 0 and "FAILED ONCE and did not run again: test_a.py::test_bad" in said, said


def test_who_looks_for_the_first_failure_gets_it(tmp_path: Path) -> None:
    code, said = run(tmp_path, {"call": CALL}, "-x")
    assert code == 1 and "FAILED ONCE" not in said
    (tmp_path / "test_call").unlink()
    code, said = run(tmp_path, {"call": CALL}, tries=False)
    assert code == 1 and "FAILED ONCE" not in said
