"""Embeddings of conversations, of which what the template makes is embedded, and of texts beyond the context."""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from vserve import LLM
from vserve.engine.errors import ConfigError
from vserve.engine.link.messages import RequestOutput
from vserve.server.options.config import ServerConfig
from vserve.server.text.model import load_text_model

MAX_MODEL_LEN = 128

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def embedding(client: Any, engine: Any) -> Any:
    async def embed(request: Any, mailbox: Any) -> None:
        engine._put(mailbox, RequestOutput(request.id, [], "stop", embedding=struct.pack("<2f", 0.5, 2.0)))

    engine._run = embed
    return client


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "<|im_start|>user\nHi<|im_end|>\n"),
        ({"add_generation_prompt": True}, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (
            {"add_generation_prompt": True, "chat_template_kwargs": {"style": "x"}},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[x]",
        ),
        ({"truncate_prompt_tokens": 2}, "<|im_end|>\n"),
        ({"input": None}, "<|im_start|>user\nHi<|im_end|>\n"),
    ],
)
def test_what_is_embedded(embedding: Any, engine: Any, text_model: Any, options: Any, text: str) -> None:
    answer = embedding.post("/v1/embeddings", {"messages": HI, **options})
    assert answer.status_code == 200, answer.text
    (request,) = engine.submitted
    assert text_model.tokenizer.core.decode(request.token_ids, skip_special_tokens=False) == text
    (entry,) = answer.json()["data"]
    assert entry["embedding"] == [0.5, 2.0] and answer.json()["usage"]["prompt_tokens"] == len(request.token_ids)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"), ({"input": "a", "messages": HI}, "messages"), ({"messages": []}, "messages"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"input": "a", "chat_template_kwargs": {"style": "x"}}, "chat_template_kwargs"),
        ({"messages": HI, "chat_template": "x"}, "chat_template"),
        ({"messages": HI, "add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"messages": [{"role": "user", "content": "word " * 500}]}, "messages"),
        ({"messages": [{"role": "user", "name": "nobody", "content": "x"}]}, "messages"),  # the template refuses it
    ],
)  # fmt: skip
def test_what_is_refused(embedding: Any, engine: Any, body: Any, param: str) -> None:
    answer = embedding.post("/v1/embeddings", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert not engine.submitted


def test_the_default_prompt_stands_before_every_text(
    embedding: Any, new_client: Any, engine: Any, model_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    prompts = {"prompts": {"query": "Say it: ", "document": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    model = load_text_model(str(folder), ServerConfig(served_model_name=("test",)))
    client, ids = new_client(model), model.tokenizer.encode("Hi", True)
    for path, body, texts in (
        ("/v1/embeddings", {"input": ["Hi", "Hello"]}, ["Say it: Hi", "Say it: Hello"]),
        ("/v1/embeddings", {"input": "Hi", "prompt_name": "document"}, ["Hi"]),
        ("/v1/embeddings", {"input": ids}, ["Hi"]),
        ("/pooling", {"input": "Hi"}, ["Say it: Hi"]),
        ("/score", {"text_1": "Hi", "text_2": "Hello"}, ["Say it: Hi", "Say it: Hello"]),
        ("/v2/embed", {"texts": ["Hi"], "model": "test"}, ["Say it: Hi"]),
        ("/v2/embed", {"texts": ["Hi"], "input_type": "search_document", "model": "test"}, ["Hi"]),
    ):  # fmt: skip
        engine.submitted.clear()
        assert client.post(path, body).status_code == 200, path
        assert [model.tokenizer.core.decode(request.token_ids) for request in engine.submitted] == texts, (path, body)


@pytest.fixture
def in_pieces(new_client: Any, engine: Any, model_folder: Any) -> Any:
    """in_pieces(config) → a server whose engine embeds as [the sum of the ids / their number, 1]: mean pooling."""

    async def embed(request: Any, mailbox: Any) -> None:
        mean = sum(request.token_ids) / len(request.token_ids)
        engine._put(mailbox, RequestOutput(request.id, [], "stop", embedding=struct.pack("<2f", mean, 1.0)))

    engine._run = embed

    def make(**config: Any) -> Any:
        options = {"served_model_name": ("test",), "pooler_config": json.dumps(config)}
        return new_client(load_text_model(str(model_folder), ServerConfig(**options)), **options)

    return make


def test_a_text_beyond_the_context_is_the_mean_of_its_pieces(in_pieces: Any, engine: Any) -> None:
    client = in_pieces(enable_chunked_processing=True, normalize=False)
    rng = random.Random(5)
    inputs = [[rng.randrange(3, 300) for _ in range(n)] for n in (MAX_MODEL_LEN, 2 * MAX_MODEL_LEN + 9, 5, 999)]
    answer = client.post("/v1/embeddings", {"input": inputs}).json()
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3]
    for one, ids in zip(answer["data"], inputs, strict=True):
        assert one["embedding"] == pytest.approx([sum(ids) / len(ids), 1.0], rel=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, inputs))
    sizes = [len(request.token_ids) for request in engine.submitted]
    assert max(sizes) == MAX_MODEL_LEN and sizes[:5] == [MAX_MODEL_LEN] * 3 + [9, 5]
    mean = sum(inputs[1]) / len(inputs[1])
    unit = client.post("/v1/embeddings", {"input": inputs[1], "normalize": True}).json()["data"][0]["embedding"]
    assert unit == pytest.approx([mean / math.hypot(mean, 1), 1 / math.hypot(mean, 1)], rel=1e-6)
    assert [request.sampling.pooling.normalize for request in engine.submitted[-3:]] == [False] * 3
    text = client.post("/v1/embeddings", {"input": "word " * 2000})
    assert text.status_code == 200 and text.json()["usage"]["prompt_tokens"] > 10 * MAX_MODEL_LEN
    chat = client.post("/v1/embeddings", {"messages": [{"role": "user", "content": "word " * 500}]})
    assert chat.status_code == 200 and len(chat.json()["data"]) == 1


def test_only_where_it_was_asked_for_and_so_far(in_pieces: Any, engine: Any) -> None:
    long = [5] * (MAX_MODEL_LEN + 1)
    for config in ({}, {"enable_chunked_processing": False}):
        assert in_pieces(**config).post("/v1/embeddings", {"input": long}).status_code == 400
    client = in_pieces(enable_chunked_processing=True, max_embed_len=200)
    assert client.post("/v1/embeddings", {"input": long}).status_code == 200
    refused = client.post("/v1/embeddings", {"input": [5] * 201})
    assert refused.status_code == 400 and "200 tokens" in refused.json()["error"]["message"]
    for wrong, message in (
        ({"max_embed_len": 9}, "max_embed_len without enable_chunked_processing"),
        ({"enable_chunked_processing": 1}, "it must be true or false"),
        ({"enable_chunked_processing": True, "max_embed_len": 0}, "an integer of at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            in_pieces(**wrong)


def test_offline_it_is_refused_rather_than_ignored() -> None:
    with pytest.raises(ConfigError, match="enable_chunked_processing, which is for the server: leave it out"):
        LLM("/no/model", pooler_config={"enable_chunked_processing": True})
