"""Streams with the oldest and the newest sse-starlette that pyproject.toml allows, for private parts are overridden."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REACHES = ("server/*",)
(OLDEST, LIMIT) = re.findall(r'"sse-starlette>=([\d.]+),<(\d+)"', (ROOT / "pyproject.toml").read_text())[0]
TESTS = ("test_sse_options.py", "test_sse_transcripts.py", "test_disconnect.py", "test_hops.py")


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [f"=={OLDEST}.*", f">={OLDEST},<{LIMIT}"], ids=["oldest", "newest"])
def test_streams_with_the_versions_that_are_allowed(tmp_path: Path, allowed: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"]
    done = subprocess.run([*pip, tmp_path, f"sse-starlette{allowed}"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no index here has sse-starlette{allowed}: {done.stderr.strip().splitlines()[-1]}")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TEST_"))}
    environment["PYTHONPATH"] = path
    found = [sys.executable, "-c", "import sse_starlette; print(sse_starlette.__file__)"]
    where = subprocess.run(found, env=environment, capture_output=True, text=True, check=True).stdout
    assert where.startswith(str(tmp_path)), where
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not alone"]
    command += [f"tests/server/{name}" for name in TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"\d+ passed", done.stdout)
