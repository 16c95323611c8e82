"""What an answer may weigh: small requests for large ones are refused before anything is computed, unless streamed."""

from __future__ import annotations

import json
import tracemalloc
from array import array
from typing import Any

import msgspec
import pytest

from vserve.engine.link.messages import RequestOutput
from vserve.engine.link.sampling_params import ALL
from vserve.server.generation.weight import ENTRY, NUMBER, TOKEN, VECTOR, bytes_per_token

HI = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def refused(answer: Any, param: str) -> str:
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "answer_too_large", answer.text
    assert error["param"] == param
    return error["message"]


def test_33_gigabytes_of_a_small_request(new_client: Any, engine: Any) -> None:
    engine.info = msgspec.structs.replace(engine.info, max_model_len=4096, max_num_seqs=1024)
    client = new_client()
    huge = {"messages": HI, "n": 1024, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20, "temperature": 1}
    message = refused(client.post(CHAT, huge), "n")
    assert str(1024 * 4000 * (TOKEN + 21 * ENTRY)) in message and str(256 << 20) in message
    assert "--max-answer-bytes" in message and "stream it" in message
    assert not engine.submitted and not client.app.state.server.admission.num_requests
    refused(client.post(CHAT, {**huge, "stream": True, "store": True}), "n")
    assert client.post(CHAT, {**huge, "n": 2, "max_tokens": 4}).status_code == 200
    streamed = client.post(CHAT, {**huge, "n": 64, "stream": True})
    assert streamed.status_code == 200 and len(engine.submitted) == 2 + 64


@pytest.mark.parametrize(
    ("url", "few", "many", "param"),
    [
        (CHAT, {"messages": HI, "n": 2, "max_tokens": 9}, {"n": 9}, "n"),
        (CHAT, {"messages": HI, "max_tokens": 9}, {"max_tokens": 90}, "max_tokens"),
        (CHAT, {"messages": HI, "max_tokens": 9}, {"max_tokens": None}, "max_tokens"),
        (CHAT, {"messages": HI, "max_tokens": 9}, {"logprobs": True, "top_logprobs": 5}, "max_tokens"),
        (CHAT + "/batch", {"messages": [HI] * 2, "max_tokens": 9}, {"messages": [HI] * 9}, "max_tokens"),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 9}, {"prompt": ["Hi"] * 9}, "max_tokens"),
        (COMPLETIONS, {"prompt": [5] * 20, "max_tokens": 9}, {"echo": True, "n": 2}, "n"),
        (COMPLETIONS, {"prompt": [5] * 20, "max_tokens": 9}, {"echo": True, "logprobs": 1}, "max_tokens"),
        (COMPLETIONS, {"prompt": [5] * 20, "max_tokens": 9}, {"return_token_ids": True, "n": 2}, "n"),
        (COMPLETIONS, {"prompt": [5] * 20, "max_tokens": 9}, {"prompt_logprobs": 2}, "max_tokens"),
        (COMPLETIONS, {"prompt": [5] * 20, "max_tokens": 9}, {"prompt_logprobs": 2, "stream": True}, "max_tokens"),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 9}, {"max_output_tokens": 90}, "max_output_tokens"),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 9, "background": True}, {"max_output_tokens": 90},
         "max_output_tokens"),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 9, "stream": True}, {"max_output_tokens": 90},
         "max_output_tokens"),
    ],
)  # fmt: skip
def test_each_way_to_a_large_answer(new_client: Any, url: str, few: Any, many: Any, param: str) -> None:
    client = new_client(max_answer_bytes=30 * TOKEN)
    few = {"temperature": 1, **few}
    answer = client.post(url, few)
    assert answer.status_code == 200, answer.text
    refused(client.post(url, {**few, **many}), param)
    assert new_client(max_answer_bytes=0).post(url, {**few, **many}).status_code == 200


def embeds(engine: Any, hidden_size: int = 64) -> None:
    engine.info = msgspec.structs.replace(engine.info, hidden_size=hidden_size)

    async def embed(request: Any, mailbox: Any) -> None:
        width = request.sampling.pooling.dimensions or engine.info.hidden_size
        count = len(request.token_ids) if request.sampling.pooling.kind == ALL else 1
        vector = array("f", [index / 7 for index in range(width * count)]).tobytes()
        engine._put(mailbox, RequestOutput(request.id, [], "stop", embedding=vector))

    engine._run = embed


@pytest.mark.parametrize(
    ("url", "few", "many"),
    [
        ("/v1/embeddings", {"input": ["Hi"] * 3}, {"input": ["Hi"] * 4}),
        ("/v1/embeddings", {"input": ["Hi"] * 4, "dimensions": 4}, {"dimensions": None}),
        ("/v1/embeddings", {"input": ["Hi"] * 3, "encoding_format": "base64"}, {"input": ["Hi"] * 4}),
        ("/v2/embed", {"texts": ["Hi"] * 3, "input_type": "search_query", "model": "test"}, {"texts": ["Hi"] * 4}),
        ("/pooling", {"input": ["Hi"] * 3}, {"input": ["Hi"] * 4}),
        ("/pooling", {"input": [[5, 6]], "task": "token_embed"}, {"input": [[5, 6] * 8]}),
    ],
)
def test_vectors_too(new_client: Any, engine: Any, url: str, few: Any, many: Any) -> None:
    embeds(engine)
    client = new_client(max_answer_bytes=3 * (VECTOR + engine.info.hidden_size * NUMBER))
    answer = client.post(url, few)
    assert answer.status_code == 200, answer.text
    answer, before = client.post(url, {**few, **many}), len(engine.submitted)
    message = answer.json().get("error", answer.json())["message"]
    assert answer.status_code == 400 and "--max-answer-bytes" in message, answer.text
    assert len(engine.submitted) == before
    for unlimited in (new_client(), new_client(max_answer_bytes=0)):
        assert unlimited.post(url, {**few, **many}).status_code == 200


def test_what_a_vector_is_said_to_need_is_about_what_it_needs(new_client: Any, engine: Any) -> None:
    embeds(engine, 2048)
    client, inputs = new_client(), ["Hi"] * 100
    client.post("/v1/embeddings", {"input": inputs[:1]})
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    assert client.post("/v1/embeddings", {"input": inputs}).status_code == 200
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    need = (peak - before) / len(inputs) / 2048
    assert need / 3 < NUMBER < 8 * need, need


def test_messages_too(new_client: Any) -> None:
    client = new_client(max_answer_bytes=30 * TOKEN)
    body = {"model": "test", "messages": HI, "max_tokens": 90}
    answer = client.post("/v1/messages", body)
    assert answer.status_code == 400 and "--max-answer-bytes" in answer.json()["error"]["message"]
    assert client.post("/v1/messages", {**body, "stream": True}).status_code == 200


def test_what_is_said_to_be_needed_is_about_what_is_needed(new_client: Any, engine: Any) -> None:
    """Measured at the peak, when the JSON is made. Less would let in more than fits, far more refuse what does."""
    engine.info = msgspec.structs.replace(engine.info, max_model_len=4096)
    engine.script = lambda request: [[50 + i % 9] for i in range(600)]
    client = new_client()
    for logprobs in (None, 20):
        fields = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
        body = {"messages": HI, "max_tokens": 600, "ignore_eos": True, **fields}
        client.post(CHAT, {**body, "max_tokens": 2})
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        answer = client.post(CHAT, body)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert json.loads(answer.text)["usage"]["completion_tokens"] == 600
        need = (peak - before) / 600
        assert need / 3 < bytes_per_token(logprobs) < 8 * need, (logprobs, need)
