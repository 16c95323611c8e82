"""What `make` says and runs before vserve is there; stand-ins for Python, pip and nvidia-smi fetch nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")
pytestmark = pytest.mark.skipif(MAKE is None, reason="there is no make")
# Makes a .venv whose python is another of these; says what pip would do, which knows torch where `installed` is.
PYTHON = """#!/bin/sh
case "$*" in
  "-m venv "*)
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
    printf '#!/bin/sh\\necho serves "$@"' > "$3/bin/vserve" && chmod +x "$3/bin/vserve" ;;
  "-m pip show"*) [ -e installed ] ;;
  "-m pip"*) echo "runs $*" ;;
  "-m pytest"*) echo "examples=$TEST_EXAMPLES flaky=$TEST_FLAKY tests $*"; exit $((${NOTHING:-0})) ;;
  tests/selection.py*) echo "asked $*" >&2; echo $CHOSEN; exit ${REFUSED:-0} ;;
esac
"""
CPU_INDEX = "--no-deps --index-url https://download.pytorch.org/whl/cpu torch"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A checkout, and in bin/ all that the machine has: no driver."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("mkdir", "cp", "chmod", "touch", "ln", "rm", "tr", "grep"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    add(tmp_path, "python3", PYTHON)
    add(tmp_path, "uname", "#!/bin/sh\necho Linux")
    return tmp_path


def add(machine: Path, tool: str, script: str) -> None:
    path = machine / "bin" / tool
    path.unlink(missing_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def make(machine: Path, *words: str, environment: dict[str, str] | None = None, fails: bool = False) -> str:
    assert MAKE is not None
    given = {"PATH": str(machine / "bin"), **(environment or {})}
    done = subprocess.run([MAKE, *words], cwd=machine, env=given, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("driver", ["absent", "broken"])
def test_without_a_driver_serve_says_what_it_fetches_and_what_is_enough(machine: Path, driver: str) -> None:
    if driver == "broken":
        add(machine, "nvidia-smi", "#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9")
    said = make(machine, "serve", "ARGS=--port 9000")
    install = said.index("runs -m pip install")
    assert "2.5 GB" in said[:install] and "make serve TORCH=cpu" in said[:install]
    assert CPU_INDEX not in said and said.endswith("serves --port 9000\n")


def test_with_a_driver_nothing_of_it_is_said(machine: Path) -> None:
    add(machine, "nvidia-smi", "#!/bin/sh\necho GPU 0: NVIDIA H200")
    said = make(machine, "serve")
    assert "runs -m pip install" in said and "TORCH" not in said and "GB" not in said


def test_where_torch_is_installed_or_comes_without_cuda_nothing_of_it_is_said(machine: Path) -> None:
    (machine / "installed").touch()
    assert "TORCH" not in make(machine, "serve")
    shutil.rmtree(machine / ".venv")
    (machine / "installed").unlink()
    add(machine, "uname", "#!/bin/sh\necho Darwin")
    assert "TORCH" not in make(machine, "serve")


@pytest.mark.parametrize("goal", ["serve", "test", "lint"])
def test_torch_for_the_cpu_is_installed_before_the_rest_asks_for_it(machine: Path, goal: str) -> None:
    lines = make(machine, "--dry-run", goal, "TORCH=cpu").splitlines()
    installs = [line for line in lines if " pip install " in line]
    assert installs[0].endswith(CPU_INDEX) and "--constraint constraints.txt" in installs[0]
    assert installs[1].endswith("--editable .") and "download.pytorch.org" not in "".join(installs[1:])
    assert len(installs) == (2 if goal == "serve" else 3)
    assert "--quiet" not in installs[0] and all("--quiet" in line for line in installs[1:]), "the bar is torch's"


def test_torch_comes_first_and_with_a_bar_with_cuda_too(machine: Path) -> None:
    installs = [line for line in make(machine, "--dry-run", "serve").splitlines() if " pip install " in line]
    assert [line.split("constraints.txt ")[1] for line in installs] == ["torch", "--quiet --editable ."]


def test_another_index_can_be_given(machine: Path) -> None:
    said = make(machine, "--dry-run", "serve", "TORCH=cpu", "TORCH_INDEX=https://mirror.example/cpu")
    assert "--index-url https://mirror.example/cpu torch" in said and "download.pytorch.org" not in said


def test_a_line_says_why_there_is_no_dot_yet(machine: Path) -> None:
    said = make(machine, "test", "CHANGED=1", environment={"CHOSEN": "tests/test_a.py"})
    assert said.index("a minute or two before the first dot") < said.index("tests -m pytest")


def test_changed_runs_what_is_selected_and_all_of_the_slow_ones_without_near(machine: Path) -> None:
    chosen = {"CHOSEN": "tests/test_a.py tests/b/test_b.py"}
    runs = [line for line in make(machine, "test", "CHANGED=1", environment=chosen).splitlines() if " pytest " in line]
    assert len(runs) == 2 and all(line.endswith(chosen["CHOSEN"]) for line in runs)
    assert "not slow and not alone" in runs[0] and "not slow and (alone" in runs[1]
    runs = [
        line for line in make(machine, "test-slow", "CHANGED=main", environment=chosen).splitlines() if "pytest" in line
    ]
    assert len(runs) == 2 and "-m slow and not alone" in runs[0] and "-m slow and (alone" in runs[1]
    assert [said for _, said in asked_for(machine, chosen)] == ["1 --near", "main "]


def asked_for(machine: Path, chosen: dict[str, str]) -> list[tuple[str, str]]:
    assert MAKE is not None
    found = []
    for words in (("test", "CHANGED=1"), ("test-slow", "CHANGED=main")):
        environment = {"PATH": str(machine / "bin"), **chosen}
        done = subprocess.run([MAKE, *words], cwd=machine, env=environment, capture_output=True, text=True, timeout=60)
        found += re.findall(r"^(asked) tests/selection.py (.*)$", done.stderr, re.MULTILINE)
    return [(word, said if "near" in said else f"{said.strip()} ") for word, said in found]


@pytest.mark.parametrize("goal", ["test", "test-slow"])
def test_a_commit_that_nobody_knows_fails(machine: Path, goal: str) -> None:
    said = make(machine, goal, "CHANGED=nothing", environment={"CHOSEN": "", "REFUSED": "1"}, fails=True)
    assert " pytest " not in said


def test_changed_with_nothing_to_run_passes(machine: Path) -> None:
    said = make(machine, "test", "CHANGED=1", environment={"CHOSEN": ""})
    assert "No test reads it." in said and "pytest" not in said
    assert "tests -m pytest" in make(machine, "test", "CHANGED=1", environment={"CHOSEN": "a", "NOTHING": "5"})
    for code in ("1", "2"):
        make(machine, "test", "CHANGED=1", environment={"CHOSEN": "a", "NOTHING": code}, fails=True)


def test_all_examples_are_for_all_tests(machine: Path) -> None:
    add(machine, "id", "#!/bin/sh\necho 1000")
    for goal, examples in (("test", ""), ("test-all", "all")):
        runs = [line for line in make(machine, goal).splitlines() if " pytest " in line and "examples=" in line]
        assert len(runs) == 2 and all(f"examples={examples} flaky=build/flaky.txt" in line for line in runs)


def test_what_has_passed_is_written_where_ci_reads_it(machine: Path) -> None:
    make(machine, "proved", fails=True)
    (machine / ".ci").mkdir()
    for state, passed in (("", True), (" M server/app.py", False)):
        (machine / ".ci" / "base").unlink(missing_ok=True)
        add(
            machine,
            "git",
            f"#!/bin/sh\ncase $1 in status) echo '{state}' | tr -d '\\n';; rev-parse) echo 0123abc;; esac",
        )
        assert ("make proved" in make(machine, "test-all")) == passed
        make(machine, "proved", fails=not passed)
        assert (machine / ".ci" / "base").exists() == passed


def test_another_torch_is_refused(machine: Path) -> None:
    assert MAKE is not None
    done = subprocess.run([MAKE, "serve", "TORCH=gpu"], cwd=machine, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "TORCH is gpu: it can only be cpu" in done.stderr


def test_an_image_has_its_version_and_labels(machine: Path) -> None:
    """Docker's stand-in says what it was asked for, and leaves the image's digest."""
    shutil.copy(ROOT / "__init__.py", machine)
    for tool in ("sed", "date", "cat"):
        found = shutil.which(tool)
        assert found is not None
        (machine / "bin" / tool).symlink_to(found)
    add(machine, "git", '#!/bin/sh\ncase "$1" in describe) echo 0123abc-dirty;; log) echo 1700000000;; esac')
    digest = "while [ $# -gt 0 ]; do case $1 in --iidfile) echo sha256:feed > $2;; esac; shift; done"
    add(machine, "docker", f'#!/bin/sh\necho "$SOURCE_DATE_EPOCH $*"\n{digest}')
    said = make(machine, "image", "IMAGE=example.com/team/vserve", "PIP_EXTRA_INDEX_URL=https://x/cpu")
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "__init__.py").read_text(), re.MULTILINE)
    (run,) = (line for line in said.splitlines() if line.startswith("1700000000 build "))
    for words in (
        f"--build-arg VERSION={version} ", "--build-arg REVISION=0123abc-dirty ",
        f"-t example.com/team/vserve:{version} ",
        "--build-arg CREATED=2023-11-14T22:13:20Z ", "--build-arg PIP_EXTRA_INDEX_URL=https://x/cpu ",
        f"--iidfile dist/vserve-{version}.image ", "-t example.com/team/vserve:latest .",
    ):  # fmt: skip
        assert words in run, run
    assert said.endswith(f"example.com/team/vserve:{version} is sha256:feed\n")
    given = set(re.findall(r"--build-arg (\w+)=", run))
    assert given <= set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))


def test_a_wheel_is_made_by_the_script(machine: Path) -> None:
    assert make(machine, "--dry-run", "wheel").splitlines()[-1] == ".venv/bin/python tools/publish/wheel.py --out dist"
