"""What the process that speaks HTTP is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx


def libraries(pid: int) -> set[str]:
    return {line.rpartition("/")[2].split(".")[0] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}


def test_torch_is_for_the_engine_only(demo_server: Any) -> None:
    """Importing torch or transformers takes seconds, and hundreds of megabytes."""
    body = {"messages": [{"role": "user", "content": "Hello!"}], "logprobs": True}
    assert httpx.post(f"{demo_server.url}/v1/chat/completions", json=body, timeout=240).status_code == 200
    assert "libtorch_cpu" in libraries(demo_server.engine_pid())
    assert "libtorch_cpu" not in libraries(demo_server.process.pid)
