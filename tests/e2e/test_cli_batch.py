"""`vserve run-batch`: a file of requests in OpenAI's batch format, and what becomes of each of its lines."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

COMMAND = [sys.executable, "-m", "vserve.server.cli.main", "run-batch"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(name: str, url: str = CHAT, method: str = "POST", **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": method, "url": url, "body": body})


def run(*arguments: str, input: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments, "--device", "cpu", "--cpu-threads", "1"], input=input, capture_output=True, text=True,
        timeout=200, env=os.environ | env,
    )  # fmt: skip


def question(i: int) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": f"What is {i} + 30?"}], "temperature": 0}


@pytest.mark.slow
def test_a_batch(tmp_path: Path) -> None:
    """More requests than run at once, and a key in the environment, which guards servers and no batch."""
    lines = [line(f"sum {i}", **question(i)) for i in range(30)]
    lines += [line("text", TEXT, prompt="Hello", max_tokens=3), "", line("bad", messages=[], temperature=9)]
    lines += [line("vector", "/v1/embeddings", input="Hello")]
    lines += [line("other model", **{**question(1), "model": "gpt-4"})]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out.jsonl"
    done = run("-i", str(tmp_path / "in.jsonl"), "-o", str(out), "--max-num-seqs", "4", VSERVE_API_KEY="sesame")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("34 requests, 2 of them refused or failed\n")
    answers = {answer["custom_id"]: answer for answer in map(json.loads, out.read_text().splitlines())}
    assert len(answers) == 34 and len({answer["id"] for answer in answers.values()}) == 34
    for i in range(30):
        response = answers[f"sum {i}"]["response"]
        assert response["status_code"] == 200 and answers[f"sum {i}"]["error"] is None
        assert response["body"]["choices"][0]["message"]["content"] == str(i + 30)
        assert response["request_id"] in response["body"]["id"]
    assert answers["text"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert len(answers["vector"]["response"]["body"]["data"][0]["embedding"]) == 256
    assert answers["bad"]["response"]["status_code"] == 400
    assert answers["other model"]["response"]["status_code"] == 404


@pytest.mark.slow
def test_pipes() -> None:
    done = run("-i", "-", "-o", "-", input=line("a", **question(12)))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["response"]["body"]["choices"][0]["message"]["content"] == "42"


BAD = {
    "{": "line 1 of - is no JSON",
    "[]": "line 2 of - has no 'custom_id'",
    "\xe9": "line 3 of - is not text in UTF-8",
    line("a", url="/v1/images"): "url one of /v1/chat/completions, /v1/chat/completions/batch, /v1/completions",
    line("b", method="GET"): "method must be POST",
    line("c", stream=True): "has 'stream'",
    line("e", "/v1/embeddings", input="x", encoding_format="bytes"): "has 'encoding_format' bytes: take base64",
    json.dumps({"custom_id": "d", "url": TEXT}): "has no 'body'",
}


def batch(text: bytes, monkeypatch: Any, *arguments: str) -> int:
    import io

    from vserve.server.cli.main import main

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    return main(["run-batch", *arguments, "-i", "-"])


def test_bad_lines_need_no_model(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "out"
    text = "\n".join(BAD).encode("latin-1")
    assert batch(text, monkeypatch, "/no/such/model", "-o", str(out)) == 0
    answers = [json.loads(answer) for answer in out.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [None, None, None, "a", "b", "c", "e", "d"]
    for answer, message in zip(answers, BAD.values(), strict=True):
        assert answer["response"] is None and message in answer["error"]["message"]
    assert capsys.readouterr().err == "8 requests, 8 of them refused or failed\n"
    # A job that runs by night notices.
    assert batch(text, monkeypatch, "/no/such/model", "-o", str(out), "--fail-on-error") == 1


@pytest.mark.slow
def test_two_lines_of_one_name_and_metrics_meanwhile(tmp_path: Path) -> None:
    """As vLLM's own files have it: both are answered, and a line says so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = "\n".join(line("twice", **question(i), max_tokens=40) for i in range(40))
    command = [*COMMAND, "-i", "-", "-o", str(tmp_path / "out"), "--enable-metrics", "--host", "127.0.0.1", "--port",
               str(port), "--device", "cpu", "--cpu-threads", "1", "--max-concurrency", "1"]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(text)
        process.stdin.close()
        page = httpx.Response(503)
        while page.status_code != 200 and process.poll() is None:
            time.sleep(0.05)
            with contextlib.suppress(httpx.HTTPError):
                page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30)
                other = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=30)
        told = process.stderr.read()
    assert process.returncode == 0, told
    assert page.status_code == 200 and "vllm:num_requests_running" in page.text
    assert other.status_code == 404 and "only /metrics" in other.text
    assert "39 lines have the custom_id of an earlier one" in told
    assert len((tmp_path / "out").read_text().splitlines()) == 40


def test_a_file_of_nothing(monkeypatch: Any, capsys: Any) -> None:
    assert batch(b"\n \n", monkeypatch, "/no/such/model", "-o", "/no/such/folder/out") == 1
    assert "- has no requests" in capsys.readouterr().err


@pytest.mark.slow
def test_every_endpoint_that_generates_and_all_options_of_serve(tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "Hello!"}]
    lines = [
        "{", line("chat", messages=hello), line("text", TEXT, prompt="Hello", max_tokens=2),
        line("response", "/v1/responses", input="Hello!"),
        line("message", "/v1/messages", messages=hello, max_tokens=9),
        line("vector", "/v1/embeddings", input="Hello"), line("odd", "/v1/messages", messages=hello, max_tokens=9, x=1),
    ]  # fmt: skip
    options = ("--strict-params", "--response-store-size", "3", "--port", "1", "--enable-chunked-prefill")
    done = run("-i", "-", "-o", str(tmp_path / "out"), *options, input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    answers = {answer["custom_id"]: answer for answer in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert "line 1 of - is no JSON" in answers.pop(None)["error"]["message"]
    codes = {name: answer["response"]["status_code"] for name, answer in answers.items()}
    assert codes == {"chat": 200, "text": 200, "response": 200, "message": 200, "vector": 200, "odd": 400}
    assert answers["response"]["response"]["body"]["object"] == "response"
    assert answers["message"]["response"]["body"]["type"] == "message"


@pytest.mark.slow
def test_adapters_answer(tmp_path: Path, tiny_model: Any, adapter_files: Any) -> None:
    base = tiny_model("qwen3")
    adapter = adapter_files.write_adapter(tmp_path / "sql", base)
    lines = [line(name, TEXT, model=name, prompt="Hello", max_tokens=2) for name in ("sql", "base")]
    options = ("--enable-lora", "--lora-modules", f"sql={adapter}", "--served-model-name", "base", "--fail-on-error")
    done = run(str(base), "-i", "-", "-o", str(tmp_path / "out"), *options, input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    answers = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert {answer["response"]["body"]["model"] for answer in answers} == {"sql", "base"}


@pytest.mark.slow
def test_what_cannot_run(tmp_path: Path) -> None:
    text = line("a", **question(1))
    out = str(tmp_path / "out")
    done = run("/no/such/model", "-i", "-", "-o", out, input=text)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("vserve: ")
    assert run("-i", "/no/such/file", "-o", out).returncode == 1
    assert run("-i", "-", "-o", out, "--max-concurrency", "0", input=text).returncode == 2


@pytest.mark.slow
def test_a_dead_engine_ends_the_batch(tmp_path: Path) -> None:
    text = "\n".join(line(f"{i}", **question(i)) for i in range(3))
    done = run("-i", "-", "-o", str(tmp_path / "out"), input=text, VSERVE_FAULT="step:1:kill", VSERVE_ALLOW_FAULTS="1")
    assert done.returncode == 1 and "the engine died" in done.stderr
    codes = [json.loads(answer)["response"]["status_code"] for answer in (tmp_path / "out").read_text().splitlines()]
    assert codes == [503] * 3
