"""JSON may hold characters at which Unicode ends lines. Only \\n ends those of files and streams of JSON."""

from __future__ import annotations

import argparse
import http.server
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from vserve.server.cli import talk
from vserve.server.cli.bench.datasets import CustomDataset
from vserve.server.cli.run_batch import open_output, read_requests

TEXT = "one\u2028two\u2029three\x85four"


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(line: dict[str, Any]) -> Path:
        path = tmp_path / "lines.jsonl"
        path.write_bytes((json.dumps(line, ensure_ascii=False) + "\r\n").encode())
        return path

    return write


def test_a_batch_of_requests(jsonl: Callable[..., Path]) -> None:
    body = {"prompt": TEXT}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    assert [json.loads(request.body) for request in read_requests(str(jsonl(line)))] == [body]


def test_a_batch_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"custom_id": "é"}'.encode("latin-1"))
    (line,) = read_requests(str(path))
    assert line.problem is not None and re.search(r"latin\.jsonl.* UTF-8", line.problem)


def test_an_id_that_utf_8_cannot_write(tmp_path: Path) -> None:
    """It is in the answers as it was in the requests."""
    path = tmp_path / "out.jsonl"
    with open_output(str(path)) as out:
        out.write(json.dumps({"custom_id": "\ud800 é"}, ensure_ascii=False))
    assert json.loads(path.read_text(encoding="utf-8")) == {"custom_id": "\ud800 é"}


def test_prompts_to_measure_with(jsonl: Callable[..., Path]) -> None:
    dataset = CustomDataset(jsonl({"prompt": TEXT}), np.random.default_rng(0), output_len=1)
    assert dataset.sample(1)[0].prompt == TEXT


def test_an_answer_in_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    event = json.dumps({"choices": [{"delta": {"content": TEXT}}]}, ensure_ascii=False)
    stream = f"data: {event}\r\n\r\ndata: [DONE]\n\n".encode()
    pieces = [stream[at : at + 1] for at in range(len(stream))]  # half a character, half a line end
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=iter(pieces)))
    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(**options, transport=transport))
    parser = argparse.ArgumentParser()
    talk.add_arguments(parser)
    connection = talk.Connection(parser.parse_args(["--model-name", "m"]))
    assert connection.answer("chat/completions", {"messages": []}).text == TEXT
    assert capsys.readouterr().out == TEXT


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_on_this_machine_is_not_asked_for_by_a_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Models(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m"}]}')

        def log_message(self, *arguments: Any) -> None: ...

    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")  # for which httpx lacks a library
    parser = argparse.ArgumentParser()
    talk.add_arguments(parser)
    with http.server.HTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        arguments = parser.parse_args(["--url", f"http://{host}:{server.server_port}/v1"])
        assert talk.Connection(arguments).model == "m"
        server.shutdown()
    with pytest.raises(talk.TalkError, match=r"cannot (use these settings|reach)"):
        talk.Connection(parser.parse_args(["--url", "http://192.0.2.1/v1"]))  # another machine: the proxy is asked
