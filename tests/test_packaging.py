"""What is installed is what is here."""

from __future__ import annotations

import runpy
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import vserve

ROOT = Path(__file__).parents[1]
REACHES = ("server/*", "engine/*", "kernels/*", "configs/*", "LICENSE", "__main__.py", "py.typed")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL = ROOT / "tools" / "publish" / "wheel.py"
ROOMS = ("configs", "engine", "kernels", "server")


def test_every_package_is_listed():
    listed = PROJECT["tool"]["setuptools"]["packages"]
    folders = [ROOT, *(init.parent for room in ROOMS for init in (ROOT / room).rglob("__init__.py"))]
    here = [".".join(("vserve", *folder.relative_to(ROOT).parts)) for folder in folders]
    assert sorted(listed) == sorted(here)
    for room in ROOMS:
        for script in (ROOT / room).rglob("*.py"):
            assert (script.parent / "__init__.py").exists(), script


def test_pinned_versions_are_those_that_pyproject_allows():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert pins["torch"] == "2.13.0" and pins["triton"] == "3.7.1"
    for requirement in PROJECT["project"]["dependencies"]:
        name = requirement.split(";")[0].split("[")[0].split(">")[0].split("<")[0].strip().lower()
        assert name in {pin.lower().replace("_", "-") for pin in pins}, f"{name} is not pinned in constraints.txt"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` leaves."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, WHEEL, "--out", folder], check=True, capture_output=True, timeout=240)
    return folder


@pytest.mark.slow
def test_the_same_commit_makes_the_same_wheel(published: Path, tmp_path: Path) -> None:
    """On another day, with another umask."""
    command = f"umask 077; exec {sys.executable} {WHEEL} --out {tmp_path}"
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, timeout=240)
    (mine,), (other,) = published.glob("*.whl"), tmp_path.glob("*.whl")
    assert mine.name == other.name == f"vserve-{vserve.__version__}-py3-none-any.whl"
    assert mine.read_bytes() == other.read_bytes()
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=published, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{mine.name}: OK\n"


def test_the_wheel_says_its_version_in_a_fresh_environment(published: Path, tmp_path: Path) -> None:
    (wheel,) = published.glob("*.whl")
    venv.create(tmp_path / "fresh", with_pip=False)
    python = tmp_path / "fresh" / "bin" / "python"
    (site,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])  # of this environment, not from an index
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], check=True, timeout=240)
    done = subprocess.run(
        [python.parent / "vserve", "version"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"vserve {vserve.__version__}\n", done.stderr
    command = [python, "-m", "vserve"]
    done = subprocess.run([*command, "version"], cwd=tmp_path, env={}, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"vserve {vserve.__version__}\n", done.stderr
    done = subprocess.run([*command, "sevre"], cwd=tmp_path, env={}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean serve?" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("tags", "changes", "problem", "notices"),
    [
        (["v1.2.0"], "", "", []),
        (["v1.2.0", "v1.1.0", "nightly"], "", "", []),
        (["v1.3.0"], "", "the commit's tag is v1.3.0, __init__.py says 1.2.0: change one of them", []),
        (["nightly"], "", "", ["the commit has no tag v1.2.0: set it before you publish"]),
        (["v1.2.0"], " M README.md", "", ["uncommitted changes are not in the wheel"]),
    ],
)
def test_a_tag_and_the_version_agree(tags: list[str], changes: str, problem: str, notices: list[str]) -> None:
    judge = runpy.run_path(str(WHEEL))["judge"]
    assert judge("1.2.0", tags, changes) == (problem, notices)


@pytest.mark.slow
def test_the_wheel_serves_the_demo_model_from_a_clean_environment(tmp_path, published):
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    (wheel,) = published.glob("vserve-*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    # The dependencies are taken from this environment: what is tested is the wheel, not the index.
    names = zipfile.ZipFile(wheel).namelist()
    pages = {name for name in files if name.startswith("server/web/")}
    assert {f"vserve/{name}" for name in pages} == {name for name in names if name.startswith("vserve/server/web/")}
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    script = (
        "import vserve, pathlib; here = pathlib.Path(vserve.__file__).parent; print(here)\n"
        "from vserve import LLM, SamplingParams\n"
        "with LLM(str(here / 'configs' / 'demo'), device='cpu', cpu_threads=1) as llm:\n"
        "    message = [{'role': 'user', 'content': 'What is 12 + 30?'}]\n"
        "    print(llm.chat(message, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0].text)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where, answer = done.stdout.strip().splitlines()
    assert where == str(site / "vserve") and answer == "42"
