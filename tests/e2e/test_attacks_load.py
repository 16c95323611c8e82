"""Attacks by honest-looking load, rows 17, 32, 33, 35 and 36: a cache too small for what is asked of it, and neighbours
who must neither be seen nor felt."""

from __future__ import annotations

import base64
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.usefixtures("unharmed")


@pytest.fixture(scope="module")
def server(serve):
    """2240 tokens of cache for 32 requests at once, and steps of 64 tokens."""
    with serve(
        "--num-gpu-blocks-override", "140", "--max-num-seqs", "32", "--max-num-batched-tokens", "64",
        "--max-num-queued-reqs", "0", "--served-model-name", "demo",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def before(server, attacks):
    return attacks.Invariants(server)


def complete(server: Any, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def test_row_17_encoded_tensors_are_refused_and_never_unpickled(server, attacks, tmp_path):
    bomb = base64.b64encode(pickle.dumps(Bomb(tmp_path / "mark"))).decode()
    for fields in (
        {"prompt_embeds": bomb}, {"prompt_embeds": [bomb]}, {"prompt": {"prompt_embeds": bomb}},
        {"prompt": "Hi", "prompt_embeds": bomb},
    ):  # fmt: skip
        answer = httpx.post(f"{server.url}/v1/completions", json={"model": "demo", **fields}, timeout=240)
        assert attacks.is_error(answer, 400)["param"].startswith("prompt")
    for kind in ("image_embeds", "audio_embeds", "prompt_embeds"):
        messages = [{"role": "user", "content": [{"type": kind, kind: bomb}]}]
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages}, timeout=240)
        assert attacks.is_error(answer, 400)["param"].startswith("messages")
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_row_32_more_is_asked_than_the_cache_holds(server, demo_server, before):
    """Who is preempted computes again what was lost, and says the same as on a server with room."""
    preempted = before.metric("vllm:num_preemptions_total")
    fields: dict[str, Any] = {"max_tokens": 220, "return_token_ids": True}
    prompts = [f"Story number {i} begins with {'a long walk ' * (i % 5)}" for i in range(16)]
    with ThreadPoolExecutor(16) as threads:
        expected = list(threads.map(lambda prompt: tokens(complete(demo_server, prompt, **fields)), prompts))
        answers = list(threads.map(lambda prompt: complete(server, prompt, **fields), prompts))
    assert [tokens(answer) for answer in answers] == expected
    assert before.metric("vllm:num_preemptions_total") > preempted


def test_row_32_a_prompt_larger_than_the_cache_is_refused_at_admission(serve, attacks):
    with serve("--num-gpu-blocks-override", "40", "--served-model-name", "demo") as small:
        invariants = attacks.Invariants(small)
        body = {"model": "demo", "prompt": [5] * 700, "max_tokens": 1}
        error = attacks.is_error(httpx.post(f"{small.url}/v1/completions", json=body, timeout=240), 400)
        assert error["code"] == "context_length_exceeded" and "640" in error["message"]
        invariants.check()


@pytest.mark.slow
@pytest.mark.alone
def test_row_33_a_long_prompt_and_many_short_ones_do_not_starve_each_other(server):
    """In one run, so that a busy machine stretches both sides; tests/engine/test_starvation.py counts in steps."""
    count = iter(range(10**9))

    def prompt(length: int) -> list[int]:
        """Nobody has sent it before."""
        start = next(count)
        return [5 + start % 500, 5 + start // 500, *(5 + (start * 31 + i * 7) % 500 for i in range(length - 2))]

    def ask(length: int) -> float:
        started = time.monotonic()
        complete(server, prompt(length), max_tokens=2)
        return time.monotonic() - started

    def ask_many(pause: float) -> list[float]:
        time.sleep(pause)
        with ThreadPoolExecutor(50) as threads:
            return sorted(threads.map(ask, [20] * 200))

    def together(long_after: float, short_after: float) -> tuple[float, list[float]]:
        with ThreadPoolExecutor(1) as thread:
            short = thread.submit(ask_many, short_after)
            time.sleep(long_after)
            return ask(2000), short.result()

    tries: list[str] = []

    def is_fair() -> bool:
        long_alone, p99_alone = ask(2000), ask_many(0)[-2]
        long, short = together(0, 0.05)
        long_second, _ = together(0.05, 0)
        tries.append(
            f"alone {long_alone:.1f} s and {p99_alone:.1f} s, together {long:.1f} s and {short[-2]:.1f} s, "
            f"the long one second {long_second:.1f} s"
        )
        return max(short[-2], long, long_second) < 3 * (p99_alone + long_alone) + 1

    assert any(is_fair() for _ in range(3)), tries  # who starves does so each time, who was disturbed does not


def test_row_35_tenants_with_different_salts_share_no_cache(server):
    prompt = [5 + i * 11 % 400 for i in range(100)]
    found = [
        cached(complete(server, prompt, max_tokens=1, **({} if salt is None else {"cache_salt": salt})))
        for salt in ("alice", "bob", None, "alice", "bob", None, "carol")
    ]
    assert found == [0, 0, 0, 96, 96, 96, 0]


def test_row_35_chats_are_salted_too(server):
    def ask(salt: str) -> int:
        messages = [{"role": "user", "content": "Say what you know of this. " * 10}]
        body = {"model": "demo", "messages": messages, "max_tokens": 1, "cache_salt": salt}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        return cached(answer.json())

    assert ask("dora") == ask("emil") == 0
    assert ask("dora") == ask("emil") > 0


@pytest.mark.slow
def test_row_36_a_seed_gives_the_same_tokens_in_any_company(server):
    hot: dict[str, Any] = {
        "prompt": "Once upon a time", "max_tokens": 40, "temperature": 1.3, "top_p": 0.95, "seed": 2**63 - 1, "n": 2,
        "return_token_ids": True,
    }  # fmt: skip
    alone = tokens(complete(server, **hot))
    assert alone[0] != alone[1]
    done = threading.Event()
    in_company: list[list[list[int]]] = []

    def crowd(i: int) -> None:
        while not done.is_set():
            complete(server, f"{i} others talk as well", temperature=i % 3 / 2, max_tokens=5 + i, frequency_penalty=1)

    threads = [threading.Thread(target=crowd, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    try:
        in_company = [tokens(complete(server, **hot)) for _ in range(5)]
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert in_company == [alone] * 5
    assert tokens(complete(server, **{**hot, "seed": 1})) != alone


def test_row_37_one_request_of_many_choices_is_not_the_whole_queue(demo_server):
    """80 choices take every place of the CPU's queue. Another address is let in, and is next when a row is free."""
    done, finished = threading.Event(), []

    def ask_much() -> None:
        body = {
            "model": demo_server.model, "prompt": "Tell me all", "n": 80, "temperature": 1, "max_tokens": 60,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with httpx.stream("POST", f"{demo_server.url}/v1/completions", json=body, timeout=240) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if '"finish_reason":"length"' in line:
                    finished.append(line)
                if line:
                    began.set()
                if done.is_set():
                    return

    began = threading.Event()
    thread = threading.Thread(target=ask_much)
    thread.start()
    try:
        assert began.wait(240)
        own = {"model": demo_server.model, "prompt": "Hello", "max_tokens": 1}
        same = httpx.post(f"{demo_server.url}/v1/completions", json=own, timeout=240)
        assert same.status_code == 429 and "this key or address has 80 requests open" in same.text
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=240) as other:
            answer = other.post(f"{demo_server.url}/v1/completions", json=own)
        assert answer.status_code == 200, answer.text
        assert len(finished) < 64, "it waited for all those that waited"
    finally:
        done.set()
        thread.join()
