"""Adapters over HTTP: the tokens of merged weights, on two engines, one of which dies."""

from __future__ import annotations

import asyncio
import os
import random
import runpy
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
CHURN = Path(__file__).parents[2] / "tools" / "benchmarks" / "adapter_churn.py"


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
    assert refused.status_code == 404
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


@pytest.fixture(scope="module")
def several(serve: Any, folders: dict[str, Path]) -> Any:
    """Three API processes before one engine."""
    with serve(
        str(folders["tiny"]), "--served-model-name", "tiny", "--api-server-count", "3", "--enable-lora", "--max-loras",
        "1", "--max-cpu-loras", "2", "--lora-modules", f"a={folders['a']}", "--lora-dir", str(folders["a"].parent),
        "--engine-restarts", "9",
    ) as process:  # fmt: skip
        yield process


def change(server: Any, verb: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{verb}_lora_adapter", json=body, timeout=120)


def names(server: Any) -> set[tuple[str, ...]]:
    """What the processes say there is; each question is a connection of its own."""
    lists = (httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"] for _ in range(12))
    return {tuple(sorted(card["id"] for card in cards)) for cards in lists}


def test_several_api_processes_know_the_same(several: Any, expected: dict[str, list[list[int]]]) -> None:
    """Whichever of them is asked, also one that was started later, and an engine that was."""

    def right(*served: str) -> None:
        cases = [(name, index) for name in (*served, "tiny") for index in range(3)] * 2
        with ThreadPoolExecutor(9) as pool:
            found = list(pool.map(lambda case: tokens(ask(several, *case)), cases))
        assert found == [expected[name][index] for name, index in cases]

    assert names(several) == {("a", "tiny")}
    right("a")
    for name in "bc":
        assert change(several, "load", lora_name=name, lora_path=name).status_code == 200
        assert change(several, "load", lora_name=name, lora_path=name).status_code == 400
    assert names(several) == {("a", "b", "c", "tiny")}
    right("a", "b", "c")
    assert change(several, "load", lora_name="b", lora_path="d", load_inplace=True).status_code == 200
    with ThreadPoolExecutor(9) as pool:
        answers = pool.map(lambda _: tokens(ask(several, "b", 0)), range(12))
        assert {tuple(answer) for answer in answers} == {tuple(expected["d"][0])}
    assert change(several, "unload", lora_name="b").status_code == 200
    assert names(several) == {("a", "c", "tiny")}
    assert {ask(several, "b", 0).status_code for _ in range(9)} == {404}
    for victim in (several.guests()[0], several.engine_pids()[0]):
        os.kill(victim, signal.SIGKILL)
        end = time.monotonic() + 120
        good = 0  # answers one after the other
        while good < 20:
            assert time.monotonic() < end, "it does not come back"
            try:
                good = good + 1 if ask(several, "c", 1).status_code == 200 else 0
            except httpx.TransportError:  # of the process that was killed
                good = 0
        right("a", "c")
        assert names(several) == {("a", "c", "tiny")}


def test_they_come_and_go_under_load(server: Any, expected: dict[str, list[list[int]]]) -> None:
    """With two engines of one slot each: every answer is that of merged weights. The tool does it for longer."""
    churn = runpy.run_path(str(CHURN))["Churn"]

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            one = churn(client, PROMPTS)
            await one.learn(list("abcd"))
            assert one.alone == {"": expected["tiny"]} | {name: expected[name] for name in "abcd"}
            for _ in range(10):  # a busy machine does less in a while
                await one.run(seconds=8, workers=4)
                if one.counts["/v1/load_lora_adapter"] > 10 and one.counts["/v1/completions"] > 100:
                    return
            raise AssertionError(one.counts)

    asyncio.run(main())
