"""`vserve run-batch`: a file of requests in OpenAI's batch format, and what becomes of each of its lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 of - is no JSON"),
        ("\n[]", "line 2 of - has no 'custom_id'"),
        (line("a", prompt="x", url=TEXT) + "\n" + line("a"), "line 2 of - has the custom_id 'a' of an earlier line"),
        (line("a", url="/v1/rerank"), "url one of /v1/chat/completions, /v1/completions"),
        (line("a", method="GET"), "method must be POST"),
        (line("a", stream=True), "has 'stream'"),
        ("", "- has no requests"),
    ],
)
def test_a_wrong_file_is_said_before_a_model_is_loaded(text: str, message: str, monkeypatch: Any, capsys: Any) -> None:
    import io

    from vserve.server.cli.main import main

    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["run-batch", "/no/such/model", "-i", "-", "-o", "/no/such/folder/out"]) == 1
    assert message in capsys.readouterr().err


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
