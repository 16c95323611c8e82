"""Two engines of two ranks each behind one address: five processes, and one of them is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

BODY = {"prompt": "Hello there", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


def ranks_of(engine: int) -> list[int]:
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return [int(pid) for pid in children if "engine.start.rank_process" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.slow
def test_a_rank_takes_its_engine_along_and_no_other(serve, until, is_gone, tiny_model, slowness):
    """What the other replica answers goes on; the engine comes back with all of its ranks."""
    folder = str(tiny_model("llama", max_position_embeddings=4096))
    with serve(folder, "-dp", "2", "-tp", "2", "--engine-restarts", "9", "--served-model-name", "m") as server:

        def ask(replica: int) -> str:
            answer = httpx.post(
                f"{server.url}/v1/completions", json=BODY, headers={"X-data-parallel-rank": str(replica)}, timeout=240
            )
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        lines: dict[int, list[str]] = {0: [], 1: []}

        def stream(replica: int) -> None:
            body, headers = BODY | {"stream": True, "max_tokens": 1200}, {"X-data-parallel-rank": str(replica)}
            url = f"{server.url}/v1/completions"
            with httpx.stream("POST", url, json=body, headers=headers, timeout=240) as answer:
                lines[replica] += (line for line in answer.iter_lines() if line)

        expected = ask(0)
        assert ask(1) == expected
        engines = server.engine_pids()
        others = {engine: ranks_of(engine) for engine in engines}
        assert [len(each) for each in others.values()] == [1, 1]
        streams = [threading.Thread(target=stream, args=(replica,)) for replica in (0, 1)]
        for thread in streams:
            thread.start()

        def busy() -> int:
            page = httpx.get(f"{server.url}/metrics").text.splitlines()
            return sum(line.startswith("vllm:num_requests_running{") and line.endswith(" 1.0") for line in page)

        until(lambda: busy() == 2)
        killed = engines[1]
        os.kill(others[killed][0], signal.SIGKILL)
        begun = time.monotonic()
        until(lambda: is_gone(killed))
        assert time.monotonic() - begun < 10 * slowness
        assert server.health() == {}, "the other one serves"
        for thread in streams:
            thread.join(240)
        failed = [replica for replica in (0, 1) if "error" in lines[replica][-2]]
        assert len(failed) == 1 and '"finish_reason":"length"' in "".join(lines[1 - failed[0]][-3:])
        assert "rank 1 of 2 (cpu) was killed by signal 9 (SIGKILL)" in lines[failed[0]][-2]
        assert ask(1 - failed[0]) == expected
        until(lambda: any("the engine serves again" in line for line in server.stderr))
        assert ask(failed[0]) == expected
        assert engines[0] in server.engine_pids() and killed not in server.engine_pids()
        last = [rank for engine in server.engine_pids() for rank in ranks_of(engine)]
    until(lambda: all(map(is_gone, last)))
