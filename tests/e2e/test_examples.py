"""The programs of docs/examples, run as they stand there against the demo model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
REACHES = ("docs/examples/*",)
# What they print, as a pattern.
SAID = {
    "offline": r"('The capital of France is' -> '.+'\n)('Once upon a time' -> '.+'\n)",
    "chat": r"> My name is Ada\.\nNice to meet you, Ada!\n> What is my name\?\nYour name is Ada\.\n",
    "streaming": r"(?s)1.*2.*3.*10.*\n\d+ \+ \d+ tokens\n",
    "tools": r"(?s)get_weather\(\{'city': '.*'\}\)\n.+\n",
    "structured": r"\{'name': '.*', 'age': \d+, 'mood': '(happy|sad)'\}\n",
    "embeddings": r"(-?\d\.\d{3})  Hi, how are you\?\n(-?\d\.\d{3})  The answer is 42\.\n",
    "metrics": r"num_requests_running +0\.0\nnum_requests_waiting +0\.0\nkv_cache_usage_perc +\S+\n"
    r"generation_tokens_total +\d\S*\n",
}


def test_all_are_run_and_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAID)
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[`{name}.py`]({name}.py)" in page for name in SAID)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_what_it_says(name: str, demo_server: Any, tmp_path: Path) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    address = "http://localhost:8000"
    assert (address in source) == (name != "offline")
    script = tmp_path / f"{name}.py"
    script.write_text(source.replace(address, demo_server.url))
    arguments = ["--max-model-len", "1k", "--cpu-threads", "1"] if name == "offline" else []
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(SAID[name], done.stdout), done.stdout
    if name == "embeddings":
        near, far = (float(value) for value in re.findall(r"-?\d\.\d{3}", done.stdout))
        assert near > far
