"""Embeddings over HTTP and offline are the pooled hidden states of transformers."""

from __future__ import annotations

import base64
import json
import random
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from vserve import LLM, PoolingParams
from vserve.engine.describe.reading import parse_model_config
from vserve.engine.errors import ConfigError, ModelError
from vserve.server.text.pooling import PoolingDefaults, read_pooling

TOLERANCE = 1e-4
HIDDEN, CONTEXT = 64, 512
TEXTS = ["hello there", "the answer is that there are seven of them, not eleven " * 4, "x"]
MODULE = "sentence_transformers.models."


def as_sentence_transformers(folder: Path, *types: str, **pooling: Any) -> Path:
    """Adds the files that say so; `types`: of its modules."""
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{t}" if i else "", "type": MODULE + t} for i, t in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for i, kind in enumerate(types):
        if kind == "Pooling":
            (folder / f"{i}_Pooling").mkdir(parents=True, exist_ok=True)
            (folder / f"{i}_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture(scope="module")
def folder(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that pools the mean of all tokens."""
    copy = tmp_path_factory.mktemp("embedder") / "model"
    shutil.copytree(tiny_model("qwen3"), copy)
    return as_sentence_transformers(
        copy, "Transformer", "Pooling", "Normalize", pooling_mode_mean_tokens=True, pooling_mode_cls_token=False
    )


@pytest.fixture(scope="module")
def states(folder: Path) -> Any:
    """states(token ids) → transformers' hidden states."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def run(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(torch.tensor([token_ids])).last_hidden_state[0]
        return found

    return run


@pytest.fixture(scope="module")
def url(folder: Path, serve: Any) -> Iterator[str]:
    """A real server that cuts prompts into chunks of 32 tokens."""
    with serve(str(folder), "--max-num-batched-tokens", "32", "--served-model-name", "tiny") as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=240) as client:
        yield client


def tokens(http: httpx.Client, text: str) -> list[int]:
    found: list[int] = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return found


def unit(vector: torch.Tensor) -> list[float]:
    found: list[float] = (vector / vector.norm()).tolist()
    return found


def test_the_openai_package(client: openai.OpenAI, http: httpx.Client, states: Any) -> None:
    """It asks for base64 unless told otherwise, and decodes it itself."""
    ids = [tokens(http, text) for text in TEXTS]
    wanted = [unit(states(one).mean(0)) for one in ids]
    answers: list[Any] = [
        client.embeddings.create(model="tiny", input=TEXTS),
        client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float", user="me"),
        client.embeddings.create(model="tiny", input=ids),
    ]
    for answer in answers:
        assert (answer.object, answer.model) == ("list", "tiny")
        assert [(one.object, one.index) for one in answer.data] == [("embedding", i) for i in range(3)]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        for one, vector in zip(answer.data, wanted, strict=True):
            assert one.embedding == pytest.approx(vector, abs=TOLERANCE)
    for single in (TEXTS[0], ids[0]):
        (one,) = client.embeddings.create(model="tiny", input=single, dimensions=9).data
        assert one.embedding == pytest.approx(unit(states(ids[0]).mean(0)[:9]), abs=TOLERANCE)
    encoded = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="base64").data[0].embedding
    assert struct.unpack(f"<{HIDDEN}f", base64.b64decode(str(encoded))) == tuple(answers[1].data[0].embedding)


def test_our_own_parameters(http: httpx.Client, states: Any) -> None:
    rng = random.Random(3)
    long = [rng.randrange(5, 290) for _ in range(CONTEXT + 40)]

    def embed(**body: Any) -> list[float]:
        response = http.post("/v1/embeddings", json={"input": long, **body})
        assert response.status_code == 200, response.text
        vector: list[float] = response.json()["data"][0]["embedding"]
        return vector

    assert embed(truncate_prompt_tokens=70) == pytest.approx(unit(states(long[-70:]).mean(0)), abs=TOLERANCE)
    assert embed(truncate_prompt_tokens=-1) == pytest.approx(unit(states(long[-CONTEXT:]).mean(0)), abs=TOLERANCE)
    first = embed(truncate_prompt_tokens=70, truncation_side="right")
    assert first == pytest.approx(unit(states(long[:70]).mean(0)), abs=TOLERANCE)
    raw = embed(input=long[:40], normalize=False, cache_salt="me", request_id="mine", add_special_tokens=False)
    assert raw == pytest.approx(states(long[:40]).mean(0).tolist(), abs=TOLERANCE)
    assert embed(input=long[:40], use_activation=False, embed_dtype="float32", endianness="little") == raw
    assert embed(input=long[:40], use_activation=True) == pytest.approx(unit(states(long[:40]).mean(0)), abs=TOLERANCE)
    ignored = http.post("/v1/embeddings", json={"input": "a", "mine": "x"}).headers["x-vserve-ignored-params"]
    assert ignored == "mine"


def test_beside_running_generations(http: httpx.Client, states: Any) -> None:
    body = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    alone = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    beside: list[str] = []
    thread = threading.Thread(
        target=lambda: beside.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])
    )
    thread.start()
    inputs = [[5 + (i + j) % 200 for j in range(1 + 7 * i)] for i in range(20)]
    data = http.post("/v1/embeddings", json={"input": inputs}).json()["data"]
    thread.join(240)
    assert beside == [alone]
    for one, token_ids in zip(data, inputs, strict=True):
        assert one["embedding"] == pytest.approx(unit(states(token_ids).mean(0)), abs=TOLERANCE)


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({}, "input", "Missing required parameter: 'input'"),
    "null": ({"input": None}, "input", "Missing required parameter"),
    "empty text": ({"input": ""}, "input", "must not be empty"),
    "no inputs": ({"input": []}, "input", "must not be empty"),
    "one empty text": ({"input": ["a", ""]}, "input", "must not be empty"),
    "no tokens": ({"input": [[]]}, "input", "must not be empty"),
    "both kinds": ({"input": ["a", [5]]}, "input", "must be a string"),
    "floats": ({"input": [1.5]}, "input", "must be a string"),
    "too many": ({"input": ["a"] * 2049}, "input", "has 2049 entries; at most 2048"),
    "unknown token": ({"input": [5, 300]}, "input", "has the token id 300; the vocabulary ends at 299"),
    "too long": ({"input": [5] * (CONTEXT + 1)}, "input", f"maximum context length is {CONTEXT} tokens"),
    "format": ({"input": "a", "encoding_format": "hex"}, "encoding_format", "be 'float', 'base64', 'bytes'"),
    "no dimensions": ({"input": "a", "dimensions": 0}, "dimensions", "must be at least 1"),
    "too many dimensions": ({"input": "a", "dimensions": HIDDEN + 1}, "dimensions", "is 65; this model's embeddings"),
    "truncated to nothing": ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
    "truncated too late": ({"input": "a", "truncate_prompt_tokens": 600}, "truncate_prompt_tokens", "holds 512 tokens"),
    "truncated where": ({"input": "a", "truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
    "element": ({"input": "a", "embed_dtype": "int8"}, "embed_dtype", "'float32'"),
    "byte order": ({"input": "a", "endianness": "big"}, "endianness", "only for 'encoding_format' base64"),
    "length": ({"input": "a", "normalize": True, "use_activation": False}, "use_activation", "the two differ"),
    "priority": ({"input": "a", "priority": 1}, "priority", "--scheduling-policy priority"),
    "other model": ({"input": "a", "model": "other"}, "model", "does not exist"),
}  # fmt: skip


def test_wrong_requests(http: httpx.Client) -> None:
    for name, (body, param, words) in REFUSALS.items():
        response = http.post("/v1/embeddings", json=body)
        assert response.status_code == (404 if name == "other model" else 400), (name, response.text)
        error = response.json()["error"]
        assert error["param"] == param and words in error["message"], (name, error)
    assert http.post("/v1/embeddings", json={"input": [5] * CONTEXT}).status_code == 200


def metric(http: httpx.Client, name: str, **labels: str) -> float:
    """The sum over all series with these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted))


def test_counted_as_prompts_without_output(http: httpx.Client) -> None:
    names = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:e2e_request_latency_seconds_count",
             "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count",
             "vllm:request_generation_tokens_count")  # fmt: skip
    before = [metric(http, name) for name in names]
    assert http.post("/v1/embeddings", json={"input": [[5, 6, 7], [8]]}).status_code == 200
    assert [metric(http, name) - then for name, then in zip(names, before, strict=True)] == [2, 4, 2, 0, 0, 0]


def test_whoever_leaves_is_aborted(http: httpx.Client, url: str, until: Any) -> None:
    body = json.dumps({"input": [[5 + (i + j) % 200 for j in range(CONTEXT)] for i in range(1000)]}).encode()
    aborted = metric(http, "vllm:request_success_total", finished_reason="abort")
    head = (
        f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as leaving:
        leaving.sendall(head.encode() + b"\r\n" + body)
        until(lambda: metric(http, "vllm:num_requests_running") > 0)
    until(lambda: metric(http, "vllm:request_success_total", finished_reason="abort") > aborted)
    until(lambda: http.get("/load").json()["server_load"] == 0)
    until(lambda: metric(http, "vllm:num_requests_running") + metric(http, "vllm:num_requests_waiting") == 0)
    assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200


# ---- without HTTP ----
def test_offline(folder: Path, states: Any) -> None:
    with LLM(str(folder), device="cpu", cpu_threads=1, engine_in_process=True, pooling="cls") as llm:
        prompts = ["hello there", [5, 6, 7], {"prompt_token_ids": [8] * 50}]
        outputs = llm.embed(prompts, use_tqdm=False)
        ids = [llm.model.tokenizer.encode("hello there", True), [5, 6, 7], [8] * 50]
        assert [output.prompt_token_ids for output in outputs] == ids and all(output.finished for output in outputs)
        for output, token_ids in zip(outputs, ids, strict=True):
            assert output.outputs.embedding == pytest.approx(unit(states(token_ids)[0]), abs=TOLERANCE)
        params = PoolingParams(dimensions=5, normalize=False, truncate_prompt_tokens=2)
        (output,) = llm.embed([[5, 6, 7]], pooling_params=params)
        assert output.prompt_token_ids == [6, 7]
        assert output.outputs.embedding == pytest.approx(states([6, 7])[0][:5].tolist(), abs=TOLERANCE)
        with pytest.raises(ValueError, match="'input' has the token id 300"):
            llm.embed([[300]])
        with pytest.raises(ValueError, match="this model's embeddings have 64"):
            llm.embed("a", pooling_params=PoolingParams(dimensions=65))
        assert len(llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids) > 0
    with pytest.raises(RuntimeError, match="closed"):
        llm.embed("a")
    with pytest.raises(ValueError, match="'dimensions' must be at least 1"):
        PoolingParams(dimensions=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_without_its_head(tied: bool, tiny_model: Any, tmp_path: Path) -> None:
    """As the authors of embedding models save them: parts without "model." before their names."""
    from transformers import AutoModel, AutoTokenizer

    origin = tiny_model("qwen3", tie_word_embeddings=tied)
    model = AutoModel.from_pretrained(origin, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(origin).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    with LLM(str(tmp_path), device="cpu", cpu_threads=1, engine_in_process=True) as llm, torch.inference_mode():
        (output,) = llm.embed([[5, 6, 7]], use_tqdm=False)
        wanted = model(torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1]
    assert output.outputs.embedding == pytest.approx(unit(wanted), abs=TOLERANCE)


# ---- what a model's folder says ----
LASTTOKEN = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
NAME = "1_Pooling/config.json"


def test_the_folder_says_how(tmp_path: Path) -> None:
    three = ("Transformer", "Pooling", "Normalize")
    assert read_pooling(tmp_path, "auto") == PoolingDefaults("last", True, "default")
    assert read_pooling(tmp_path, "mean") == PoolingDefaults("mean", True, "flag")
    as_sentence_transformers(tmp_path, *three, **LASTTOKEN)
    assert read_pooling(tmp_path, "auto") == PoolingDefaults("last", True, NAME)
    as_sentence_transformers(tmp_path, *three[:2], pooling_mode="cls")
    assert read_pooling(tmp_path, "auto") == PoolingDefaults("cls", False, NAME)
    assert read_pooling(tmp_path, "last") == PoolingDefaults("last", False, "flag")
    as_sentence_transformers(tmp_path, "Transformer", "Normalize")
    assert read_pooling(tmp_path, "auto") == PoolingDefaults("last", True, "default")


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    """Better no embedding than one that its author would not know."""
    for types, pooling, words in (
        (("Transformer", "Dense", "Pooling"), LASTTOKEN, "has the module 'Dense'"),
        (("Transformer", "Pooling", "LSTM"), LASTTOKEN, "has the module 'LSTM'"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "asks for pooling pooling_mode_max_tokens"),
        (("Transformer", "Pooling"), {**LASTTOKEN, "pooling_mode_cls_token": True}, " and pooling_mode_cls_token"),
        (("Transformer", "Pooling"), {}, "of no kind"),
    ):  # fmt: skip
        as_sentence_transformers(tmp_path, *types, **pooling)
        assert words in (read_pooling(tmp_path, "auto").problem or "")
        assert read_pooling(tmp_path, "mean").problem is None
    for content in ("{", "{}", "[1]"):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(ConfigError, match="repair or delete"):
            read_pooling(tmp_path, "auto")
    with pytest.raises(ConfigError, match="choose one of auto, last, mean, cls"):
        read_pooling(tmp_path, "max")
    with pytest.raises(ModelError, match=r"both ways .* without windows"):
        parse_model_config({"architectures": ["Gemma2ForCausalLM"], "is_causal": False})


def test_a_refusal_names_the_module_and_the_remedy(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    as_sentence_transformers(tmp_path / "model", "Transformer", "Pooling", "LSTM", **LASTTOKEN)
    with LLM(str(tmp_path / "model"), device="cpu", cpu_threads=1, engine_in_process=True) as llm:
        with pytest.raises(ValueError, match="module 'LSTM', which is not supported; pooling overrides it"):
            llm.embed("a")
        assert llm.generate("a", use_tqdm=False)
