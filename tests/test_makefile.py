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
esac
"""
CPU_INDEX = "--no-deps --index-url https://download.pytorch.org/whl/cpu torch"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A checkout, and in bin/ all that the machine has: no driver."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("mkdir", "cp", "chmod", "touch", "ln"):
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


def make(machine: Path, *words: str) -> str:
    assert MAKE is not None
    done = subprocess.run(
        [MAKE, *words], cwd=machine, env={"PATH": str(machine / "bin")}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
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
