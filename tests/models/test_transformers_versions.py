"""Parity with the oldest transformers that pyproject.toml allows; the newest is the one of constraints.txt, with which
all other tests run and which knows every family."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from transformers import CONFIG_MAPPING

from .. import tiny_models

ROOT = Path(__file__).parents[2]
OLDEST = re.findall(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[0]
TESTS = ("test_model_parity.py::test_logits_equal_transformers", "test_foreign_models.py")
# Its groups of a gated norm are normed as one: test_model_parity has them with the newest.
WRONG = ("granitemoehybrid", "bamba")
MOST_SKIPPED = 40  # of families that came later: none is native but InternLM 3


def install(folder: Path, requirement: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    done = subprocess.run([*pip, "--target", folder, requirement], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no index here has {requirement}: {done.stderr.strip().splitlines()[-1]}")


@pytest.mark.slow
def test_parity_with_the_oldest(tmp_path: Path) -> None:
    install(tmp_path, f"transformers=={OLDEST}.*")
    (old,) = importlib.metadata.distributions(name="transformers", path=[str(tmp_path)])
    needed = [Requirement(text) for text in old.requires or ()]
    hub = next(one for one in needed if one.name == "huggingface-hub" and one.marker is None)
    install(tmp_path, str(hub))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TEST_"))}
    environment["PYTHONPATH"] = path
    found = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    version = subprocess.run(found, env=environment, capture_output=True, text=True, check=True).stdout
    assert version.startswith(OLDEST), version
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not alone"]
    command += [f"tests/models/{name}" for name in TESTS]
    command += ["-k", " and ".join(f"not {family}" for family in WRONG)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-5000:]
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|skipped)", done.stdout)}
    assert counts["passed"] > 250 and counts.get("skipped", 0) <= MOST_SKIPPED, done.stdout[-500:]


def test_the_pinned_one_knows_all_that_is_tested() -> None:
    """A family that it did not know would be skipped without a word."""
    assert {*tiny_models.FAMILIES, *tiny_models.PICTURES} <= set(CONFIG_MAPPING)
