"""Codex CLI, as npm has it, asks a server with the demo model: one whole turn in processes of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

VERSION = "0.171.0"
CONTEXT = 32768  # tokens; Codex brings instructions and tools of twelve thousand


@pytest.fixture(scope="module")
def codex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, installed for this test; without npm, or without a registry, there is none."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    prefix = tmp_path_factory.mktemp("codex")
    command = ["npm", "install", "--prefix", str(prefix), "--no-audit", "--no-fund", f"@openai/codex@{VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        pytest.skip("npm install @openai/codex takes longer than three minutes")
    if done.returncode:
        pytest.skip(f"npm install @openai/codex fails: {done.stderr[-300:]}")
    return prefix / "node_modules" / ".bin" / "codex"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = [
        "--device", "cpu", "--cpu-threads", "1", "--host", "127.0.0.1", "--port", "0", "--served-model-name", "demo",
        "--max-model-len", str(CONTEXT), "--hf-overrides", f'{{"max_position_embeddings": {CONTEXT}}}',
    ]  # fmt: skip
    command = [sys.executable, "-m", "vserve.server.cli.main", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        log: list[str] = []
        threading.Thread(target=log.extend, args=(process.stderr,), daemon=True).start()
        try:
            urls = (found[1] for line in process.stdout if (found := re.match(r"(http://\S+)", line)))
            url = next(urls, None)
            assert url is not None, "".join(log)
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield url.replace("localhost", "127.0.0.1")
        finally:
            process.terminate()
            process.wait(60)


def test_a_turn(codex: Path, url: str, tmp_path: Path) -> None:
    """What a model of this size says to such a prompt means nothing: that it arrives is asked."""
    settings = {
        "model_provider": '"here"',
        "model_providers.here": f'{{name="here", base_url="{url}/v1", wire_api="responses"}}',
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    answer = tmp_path / "answer"
    command = [
        str(codex), "exec", "--skip-git-repo-check", "--sandbox", "read-only", "-m", "demo", *options,
        "--output-last-message", str(answer), "Hello",
    ]  # fmt: skip
    environment = {**os.environ, "HOME": str(tmp_path), "CODEX_HOME": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-2000:]
    assert "ERROR" not in said and answer.exists(), said[-2000:]
