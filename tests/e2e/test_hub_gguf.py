"""`vserve owner/model:Q8_0`: a GGUF file of a repository on a hub, which here is a server of this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.describe.model_source import choose, hub_gguf, resolve_model_path
from vserve.engine.errors import ModelError
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.model_path import find_model
from vserve.server.cli import model_finding
from vserve.server.cli.machine import Torch
from vserve.server.offline.llm import LLM
from vserve.server.offline.sampling_params import SamplingParams

COMMIT = "0" * 40
MANY = ["mine-Q4_K_M.gguf", "mine-Q4_K_S.gguf", "big/mine-F16-00001-of-00002.gguf", "big/mine-F16-00002-of-00002.gguf",
        "mine-UD-Q8_K_XL.gguf", "mine.q8_0.gguf"]  # fmt: skip


class Hub:
    """Repositories by name, their files by path; `fetched`: what was downloaded."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.fetched: list[str] = []

    def answer(self, path: str) -> tuple[int, bytes]:
        for name, files in self.repositories.items():
            if path in (f"/api/models/{name}", f"/api/models/{name}/revision/main"):
                siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
                return 200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            if path == f"/api/models/{name}/tree/{COMMIT}":
                tree = [{"type": "file", "path": f, "size": len(files[f]), "oid": "0" * 40} for f in files]
                return 200, json.dumps(tree).encode()
            file = path.removeprefix(f"/{name}/resolve/{COMMIT}/")
            if file in files:
                return 200, files[file]
        return 404, b"{}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants

    shared = Hub({"org/many": {file: f"of {file}".encode() for file in ("config.json", "mmproj-F16.gguf", *MANY)}})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status, body = shared.answer(path)
            if self.command == "GET" and "/resolve/" in path:
                shared.fetched.append(path.partition(f"{COMMIT}/")[2])
            self.send_response(status)
            if status == 404:
                self.send_header("x-error-code", "RepoNotFound")
            self.send_header("content-length", str(len(body)))
            self.send_header("etag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("x-repo-commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *arguments: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield shared
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        ("Q4_K_M", MANY[:1]), ("q4_k_s", MANY[1:2]), ("F16", MANY[2:4]), ("Q8_0", MANY[5:]), ("Q8_K_XL", MANY[4:5]),
        ("UD-Q8_K_XL", MANY[4:5]), ("mine-Q4_K_S", MANY[1:2]), ("", MANY[:1]),
    ],
)  # fmt: skip
def test_the_file_that_is_meant(wanted: str, files: list[str]) -> None:
    assert choose("org/many", MANY, wanted) == files


def test_a_choice_that_is_not_clear_is_refused_with_the_names() -> None:
    with pytest.raises(ModelError, match=r"no GGUF file for Q4_K: it has mine-F16, mine-Q4_K_M, mine-Q4_K_S, mine-UD"):
        choose("org/many", MANY, "Q4_K")
    with pytest.raises(ModelError, match=r"has 2 GGUF models: a-Q5_0, b-Q5_0; name one .* such as o/r:a-Q5_0"):
        choose("o/r", ["a-Q5_0.gguf", "b-Q5_0.gguf"], "")
    with pytest.raises(ModelError, match=r"o/r has no GGUF file for Q4_0: it has no GGUF files"):
        choose("o/r", [], "Q4_0")
    assert choose("o/r", ["only-IQ3_S.gguf"], "") == ["only-IQ3_S.gguf"]


def test_only_that_file_is_downloaded_and_found_again_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    assert find_model("org/many:F16") is None, "it may be a name on the hub"
    path = resolve_model_path("org/many:F16")
    assert path.is_file() and path.name == "mine-F16-00001-of-00002.gguf" and sorted(hub.fetched) == sorted(MANY[2:4])
    hub.fetched.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_model_path("org/many:f16") == path and not hub.fetched
    with pytest.raises(ModelError, match="no GGUF file for Q4_K_M: it has mine-F16"):
        resolve_model_path("org/many:Q4_K_M")


def test_a_repository_without_other_weights(hub: Hub) -> None:
    assert resolve_model_path("org/many").name == "mine-Q4_K_M.gguf"
    assert hub_gguf("org/many", None, None) == resolve_model_path("org/many")
    with pytest.raises(ModelError, match=r"cannot get org/none:Q4_0 from the hub \(RepositoryNotFoundError"):
        resolve_model_path("org/none:Q4_0")


def test_the_doctor_knows_its_size_before_it_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    room = EngineConfig("org/many:F16", download_dir=str(tmp_path))
    found = model_finding.model_finding(room, Torch("2.13.0+cpu"), on_card=False)
    assert found.status == "ok" and "0 MiB of weights; what fits" in found.text and not hub.fetched
    found = model_finding.model_finding(dataclasses.replace(room, model="org/many:Q2_K"), Torch("2.13.0+cpu"), False)
    assert found.status == "FAIL" and "org/many has no GGUF file for Q2_K" in found.text and "mine-F16" in found.remedy


@pytest.mark.parametrize("name", ["org/tiny:Q8_0", "org/tiny"])
def test_it_is_served(
    hub: Hub, tiny_model: Any, gguf_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = gguf_models.write_gguf(tiny_model("llama"), tmp_path / "tiny-Q8_0.gguf", lambda name: "Q8_0")
    hub.repositories["org/tiny"] = {"README.md": b"#", path.name: path.read_bytes()}

    def answer(model: str) -> list[int]:
        with LLM(model, engine_in_process=True, max_num_seqs=2, cpu_threads=1, max_model_len=128) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            (output,) = llm.generate("hello there", params, use_tqdm=False)
            return [*output.prompt_token_ids, *output.outputs[0].token_ids]

    assert answer(name) == answer(str(path))
    assert hub.fetched == [path.name]
