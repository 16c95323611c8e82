"""What is installed is what is here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
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


@pytest.mark.slow
def test_the_wheel_serves_the_demo_model_from_a_clean_environment(tmp_path):
    source = tmp_path / "source"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("vserve-*.whl")
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
