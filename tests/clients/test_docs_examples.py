"""What README and docs/ show is what a server answers: their curls are run in a shell, their Python as a program."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYTHON = ("README.md", "docs/using/api.md", "docs/using/tools.md")


def blocks(page: str, language: str = "") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if kind == language
    ]


def curl(page: str, base_url: str) -> tuple[str, str]:
    """(what the server says, what the page says it does) of a page's first curl."""
    shown = next(body for body in blocks(page) if body.startswith("$ curl"))
    found = re.match(r"\$ (curl .*?'(?:\n|\Z))(?!\s)(.*)", shown, re.DOTALL)
    assert found is not None, shown
    command = found[1].replace("http://localhost:8000/v1", base_url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout, found[2]


def told(answer: Any) -> Any:
    """Without what is new in every answer."""
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def test_the_first_curl_of_readme(base_url: str) -> None:
    answer, shown = (json.loads(text) for text in curl("README.md", base_url))
    assert answer["choices"][0]["message"]["content"] == "Hello! I am vserve's demo model. How can I help you?"
    # Another request may have left this one's beginning in the cache.
    for usage in (answer["usage"], shown["usage"]):
        usage["prompt_tokens_details"] = None
    assert told(answer) == told(shown)


def joined(events: list[Any]) -> list[Any]:
    """With neighbours that carry nothing but text as one: tokens that are read at one moment share an event."""

    def text(event: Any) -> str | None:
        (choice,) = event["choices"] or [{"delta": {}}]
        only = choice["delta"].keys() == {"content"} and choice["finish_reason"] is None
        return choice["delta"]["content"] if only else None

    found: list[Any] = []
    for event in events:
        if found and text(event) is not None and text(found[-1]) is not None:
            found[-1]["choices"][0]["delta"]["content"] += text(event)
        else:
            found.append(event)
    return found


def test_the_stream_of_the_page_on_the_api(base_url: str) -> None:
    def events(text: str) -> list[Any]:
        *chunks, done, end = text.split("\n\n") if text.endswith("\n\n") else [*text.rstrip("\n").split("\n\n"), ""]
        assert (done, end) == ("data: [DONE]", "")
        return joined([told(json.loads(chunk.removeprefix("data: "))) for chunk in chunks])

    answer, shown = curl("docs/using/api.md", base_url)
    assert events(answer) == events(shown)


def test_the_curl_on_embeddings(base_url: str) -> None:
    answer, shown = (json.loads(text) for text in curl("docs/using/embeddings.md", base_url))
    assert answer["data"][0].pop("embedding") == pytest.approx(shown["data"][0].pop("embedding"), abs=1e-4)
    assert answer == shown


def test_the_curl_on_structured_output(base_url: str) -> None:
    answer, _ = curl("docs/using/structured-output.md", base_url)
    assert json.loads(answer)["choices"][0]["message"]["content"] == "Paris"
    assert "answers `Paris`" in (ROOT / "docs/using/structured-output.md").read_text()


@pytest.mark.parametrize("page", PYTHON)
def test_the_python_of_a_page_prints_what_the_page_says(page: str, base_url: str) -> None:
    program = "\n".join(blocks(page, "python"))
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = re.findall(r"^ *print\(.*\)  # (.*)$", program, re.MULTILINE)
    shown += [
        line
        for body in re.findall(r"^prints\n\n```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in body.splitlines()
    ]
    assert shown
    program = program.replace("http://localhost:8000/v1", base_url)
    program = program.replace("http://localhost:8000", base_url.removesuffix("/v1"))
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == shown


def test_the_python_without_a_server() -> None:
    (program,) = blocks("docs/using/offline.md", "python")
    assert '"/path/to/model"' in program
    done = subprocess.run(
        [sys.executable, "-c", program.replace("/path/to/model", str(ROOT / "configs" / "demo"))],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *text, embedding = done.stdout.splitlines()
    assert "".join(text) and len(json.loads(embedding)) == 256
