"""`vserve router` before two servers: real processes, and a client that knows nothing of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

COMMAND = [sys.executable, "-m", "vserve.server.cli.main", "router"]


@pytest.fixture(scope="module")
def servers(serve, demo_server) -> Iterator[list]:
    with serve("--served-model-name", "demo", "--disable-log-stats") as second:
        yield [demo_server, second]


@contextmanager
def routing(servers, until) -> Iterator[tuple[str, int]]:
    """→ (URL, process id) of a router before them."""
    process = subprocess.Popen(
        [*COMMAND, *(server.url for server in servers), "--port", "0", "--health-interval", "0.3"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    url = re.match(r"(http://\S+)", process.stdout.readline())[1].replace("localhost", "127.0.0.1")
    until(lambda: healthy(url) == [1] * len(servers))
    yield url, process.pid
    process.terminate()
    assert process.wait(30) == 0


@pytest.fixture(scope="module")
def router(servers, until) -> Iterator[str]:
    with routing(servers, until) as (url, _):
        yield url


def served(router: str) -> dict[str, float]:
    """Answers passed on, by server."""
    page = httpx.get(f"{router}/metrics").text
    found = re.findall(r'vserve_router_answers_total\{server="([^"]+)",status="2xx"\} (\S+)', page)
    return {server: float(count) for server, count in found}


def healthy(router: str) -> list[float]:
    return [
        float(n) for n in re.findall(r"vserve_router_server_healthy\{\S+ (\S+)", httpx.get(f"{router}/metrics").text)
    ]


@pytest.mark.slow
def test_the_sdk_notices_nothing(router, servers, until) -> None:
    until(lambda: healthy(router) == [1, 1])
    client = openai.OpenAI(base_url=f"{router}/v1", api_key="x", max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo"]
    ask = {"model": "demo", "temperature": 0, "max_tokens": 12}
    direct = openai.OpenAI(base_url=f"{servers[0].url}/v1", api_key="x")
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    expected = direct.chat.completions.create(messages=messages, **ask).choices[0].message.content
    assert client.chat.completions.create(messages=messages, **ask).choices[0].message.content == expected
    chunks = list(client.chat.completions.create(messages=messages, stream=True, **ask))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    longer = {**ask, "prompt": "1, 2, 3,", "max_tokens": 1000}  # a slow reader gets tokens joined
    assert len(list(client.completions.create(stream=True, extra_body={"ignore_eos": True}, **longer))) > 10
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda i: client.completions.create(prompt=f"{i} and", **ask), range(16))
        assert len({answer.id for answer in answers}) == 16
    assert all(count > 3 for count in served(router).values()) and len(served(router)) == 2
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="none", messages=messages)
    first = client.responses.create(model="demo", input="What is 2 + 2?", max_output_tokens=8)
    for _ in range(3):
        later = client.responses.create(
            model="demo", input="And 3?", previous_response_id=first.id, max_output_tokens=8
        )
        assert client.responses.retrieve(later.id).id == later.id


def test_another_router_finds_what_this_one_s_servers_have_stored(router, servers, until) -> None:
    """One that was started since, and knows nothing but the servers' addresses."""
    made = {}
    for number in range(50):
        body = {"input": f"{number} is a number. " * 50, "max_output_tokens": 2}  # whose cache has less in it gets it
        before = served(router)
        answer = httpx.post(f"{router}/v1/responses", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        home = next(url for url, count in served(router).items() if count > before.get(url, 0))
        made.setdefault(home, answer.json()["id"])
        if len(made) == 2:
            break
    assert len(made) == 2
    with routing(servers, until) as (other, _):
        for home, id in made.items():
            for _ in range(3):
                before = served(other).get(home, 0)
                body = {"input": "And?", "previous_response_id": id, "max_output_tokens": 2, "store": False}
                answer = httpx.post(f"{other}/v1/responses", json=body, timeout=240)
                assert answer.status_code == 200, answer.text
                assert served(other)[home] == before + 1
            assert httpx.get(f"{other}/v1/responses/{id}").json()["id"] == id
        assert "vserve_router_retries_total{" not in httpx.get(f"{other}/metrics").text, "asked at once where they are"


def test_a_large_body_holds_nobody_up(servers, until) -> None:
    """57 MB of lists: neither as values in memory, nor as seconds in which no question is answered."""
    body = b'{"model":"demo","messages":[{"role":"user","content":"x"}],"junk":[' + b"[]," * 19_000_000 + b"[]]}"
    with routing(servers, until) as (url, pid), ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url) as http:
        resting, longest = memory(pid), []
        for _ in range(3):  # the machine itself may stand still
            sending, gap = pool.submit(_post, f"{url}/v1/chat/completions", body), 0.0
            while not sending.done():
                began = time.monotonic()
                assert http.get("/livez", timeout=60).status_code == 200
                gap = max(gap, time.monotonic() - began)
            answer = sending.result()
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_many_values"
            longest.append(gap)
            if gap < 1:
                break
        assert memory(pid) - resting < 250 << 20 and min(longest) < 1, longest


def _post(url: str, body: bytes) -> httpx.Response:
    return httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=240)


def memory(pid: int) -> int:
    """The most bytes that it has ever had."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def test_a_stopped_server_and_a_dead_one(router, servers, until) -> None:
    """What it has not begun goes elsewhere; what it has begun ends with an error; the others go on."""
    second, begun, over = servers[1], threading.Event(), []
    prompts = [f"{index} is a number" for index in range(6)]

    def stream(session: str) -> None:
        body = {"prompt": "Hello", "stream": True, "max_tokens": 1500, "ignore_eos": True}
        url, headers = f"{router}/v1/completions", {"X-Session-ID": session}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=240) as answer:
            for line in answer.iter_lines():
                over.append(line)
                begun.set()

    def ask(prompt: str, session: str = "") -> httpx.Response:
        headers = {"X-Session-ID": session} if session else {}
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{router}/v1/completions", json=body, headers=headers, timeout=240)
        assert answer.status_code == 200, answer.text
        return answer

    expected = {prompt: ask(prompt).json()["choices"][0]["text"] for prompt in prompts}
    session = next(name for name in map(str, range(50)) if _goes_to(router, second.url, name, ask))
    streaming = threading.Thread(target=stream, args=(session,))
    streaming.start()
    assert begun.wait(60)
    for pid in (second.process.pid, *second.engine_pids()):
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(6) as pool:
        answers = dict(zip(prompts, pool.map(lambda prompt: ask(prompt, session), prompts), strict=True))
    assert {prompt: answer.json()["choices"][0]["text"] for prompt, answer in answers.items()} == expected
    assert healthy(router) == [1, 0]
    second.process.kill()
    streaming.join(30)
    assert "server_lost" in over[-4] + over[-3] and over[-2:] == ["data: [DONE]", ""]
    assert ask(prompts[0], session).status_code == 200 and httpx.get(f"{router}/health").status_code == 200


def _goes_to(router: str, url: str, session: str, ask) -> bool:
    before = served(router).get(url, 0)
    assert ask(f"{session} and so on " * 100, session).status_code == 200  # whose cache has less in it gets it
    return served(router).get(url, 0) > before


@pytest.mark.parametrize("url", ["gpu1:8000", "http://", "http://me:secret@gpu1", "http://x/?y", "ftp://x"])
def test_what_is_no_address(url: str) -> None:
    done = subprocess.run([*COMMAND, url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "is no address of a server" in done.stderr.splitlines()[-1]
