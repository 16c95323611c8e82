"""Adapters over HTTP: the tokens of merged weights, on two engines, one of which dies."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow
PROMPTS = [[random.Random(seed).randrange(5, 290) for _ in range(30)] for seed in range(3)]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def folders(tiny_model: Any, adapter_files: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, base = tmp_path_factory.mktemp("adapters"), tiny_model("qwen3")
    written = {name: adapter_files.write_adapter(root / name, base, seed=seed) for seed, name in enumerate("abcd")}
    return {"tiny": base} | written


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], adapter_files: Any) -> dict[str, list[list[int]]]:
    """Of each name, behind each prompt."""
    base = folders["tiny"]
    found = {}
    for name, folder in folders.items():
        model = adapter_files.merged(base, folder if name != "tiny" else None)
        found[name] = [adapter_files.greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    return found


@pytest.fixture(scope="module")
def server(serve: Any, folders: dict[str, Path]) -> Any:
    modules = [f"{name}={folders[name]}" for name in "ab"]
    with serve(
        str(folders["tiny"]), "--served-model-name", "tiny", "-dp", "2", "--enable-lora", "--max-loras", "1",
        "--lora-modules", *modules, "--lora-dir", str(folders["a"].parent), "--engine-restarts", "9",
    ) as process:  # fmt: skip
        yield process


def ask(server: Any, name: str, index: int, rank: int | None = None) -> httpx.Response:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    body = {"model": name, "prompt": PROMPTS[index], "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_names_say_which_on_every_engine(server: Any, expected: dict[str, list[list[int]]]) -> None:
    for rank in (0, 1):
        for name in ("a", "tiny", "b"):
            assert tokens(ask(server, name, 0, rank)) == expected[name][0]
    cases = [(name, index) for name in ("a", "b", "tiny") for index in range(3)] * 3
    with ThreadPoolExecutor(9) as pool:
        assert list(pool.map(lambda case: tokens(ask(server, *case)), cases)) == [expected[n][i] for n, i in cases]


def test_an_engine_that_is_started_again_knows_them(server: Any, expected: dict[str, list[list[int]]]) -> None:
    """Those that were loaded while it served, too; and what was refused has harmed nobody."""
    url = f"{server.url}/v1/load_lora_adapter"
    answer = httpx.post(url, json={"lora_name": "c", "lora_path": "c"}, timeout=60)
    assert answer.text == "Success: LoRA adapter 'c' added successfully."
    refused = httpx.post(url, json={"lora_name": "d", "lora_path": "../tiny"}, timeout=60)
    assert refused.status_code == 400
    before = set(server.engine_pids())
    os.kill(min(before), signal.SIGKILL)
    end = time.monotonic() + 120
    # Both are there: what was sent to the dead one before anybody noticed is answered by the other.
    while (len(server.engine_pids()), len(set(server.engine_pids()) & before)) != (2, 1) or any(
        ask(server, name, 1, r).status_code != 200 for name in ("tiny", "c", "a") for r in (0, 1)
    ):
        assert time.monotonic() < end, "the engine does not come back"
        time.sleep(0.5)
    for rank in (0, 1):
        assert [tokens(ask(server, name, 1, rank)) for name in ("c", "a")] == [expected["c"][1], expected["a"][1]]
    assert httpx.post(url.replace("/load", "/unload"), json={"lora_name": "c"}, timeout=60).status_code == 200
    assert ask(server, "c", 0).status_code == 404
