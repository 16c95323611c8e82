"""Log-probabilities over HTTP are those of transformers: how evaluation harnesses score text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def server(tiny_model: Any, live_server: Any) -> Iterator[tuple[httpx.Client, Any]]:
    """(a client, transformers' model), on a server that cuts prompts into chunks of 32 tokens."""
    from transformers import AutoModelForCausalLM

    folder = tiny_model("qwen3")
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with live_server(folder, max_num_batched_tokens=32) as url, httpx.Client(base_url=url, timeout=240) as client:
        yield client, oracle


def scores(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    """Row i: the log-probabilities of what follows token i."""
    with torch.inference_mode():
        rows: torch.Tensor = oracle(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return rows


def complete(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    response = client.post("/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def some_prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 300) for _ in range(20)]
    lengths = (1, 2, 5, 31, 32, 33, 70, 3)
    return [shared[: length // 2] + [rng.randrange(3, 300) for _ in range(length - length // 2)] for length in lengths]


def test_a_batch_of_echoes_scores_exactly(server: tuple[httpx.Client, Any]) -> None:
    """lm-eval: token-id prompts, echo, max_tokens 1, logprobs 1. Twice: the second time with a warm prefix cache."""
    client, oracle = server
    prompts = some_prompts()
    for _ in range(2):
        choices = complete(client, prompt=prompts, echo=True, max_tokens=1, logprobs=1)
        assert [choice["index"] for choice in choices] == list(range(len(prompts)))
        for prompt, choice in zip(prompts, choices, strict=True):
            logprobs = choice["logprobs"]
            values, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
            assert len(values) == len(tops) == len(logprobs["tokens"]) == len(prompt) + 1
            assert values[0] is None and tops[0] is None
            rows = scores(oracle, prompt)
            expected = [rows[i - 1, prompt[i]].item() for i in range(1, len(prompt))] + [rows[-1].max().item()]
            assert values[1:] == pytest.approx(expected, abs=TOLERANCE)
            for value, top, row in zip(values[1:], tops[1:], rows, strict=True):
                assert max(top.values()) == pytest.approx(row.max().item(), abs=TOLERANCE)
                greedy = value > row.max().item() - 1e-4
                assert (value == max(top.values())) == greedy  # what a harness calls greedy


def test_max_tokens_0_and_streams_say_the_same(server: tuple[httpx.Client, Any]) -> None:
    client, _ = server
    prompt = some_prompts()[-2]
    (whole,) = complete(client, prompt=prompt, echo=True, max_tokens=1, logprobs=2)
    (only,) = complete(client, prompt=prompt, echo=True, max_tokens=0, logprobs=2)
    for name in ("tokens", "text_offset"):
        assert only["logprobs"][name] == whole["logprobs"][name][:-1]
    assert only["logprobs"]["token_logprobs"][1:] == pytest.approx(
        whole["logprobs"]["token_logprobs"][1:-1], abs=TOLERANCE
    )
    assert only["finish_reason"] == "length" and whole["text"].startswith(only["text"])
    assert whole["text"][whole["logprobs"]["text_offset"][-1] :] == whole["text"][len(only["text"]) :]
    body = {"prompt": prompt, "echo": True, "max_tokens": 1, "logprobs": 2, "temperature": 0, "stream": True}
    lines = client.post("/v1/completions", json=body).text.split("\n\n")[:-2]
    chunks = [json.loads(line[6:])["choices"][0] for line in lines]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    tokens = [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"]


def test_prompt_logprobs_of_a_chat(server: tuple[httpx.Client, Any]) -> None:
    client, oracle = server
    body = {"messages": [{"role": "user", "content": "hello there " * 8}], "prompt_logprobs": 3, "max_tokens": 2,
            "return_token_ids": True, "n": 2, "seed": 1}  # fmt: skip
    answer = client.post("/v1/chat/completions", json=body).json()
    prompt, table = answer["prompt_token_ids"], answer["prompt_logprobs"]
    assert len(prompt) == len(table) > 40 and table[0] is None
    rows = scores(oracle, prompt)
    for token, entries, row in zip(prompt[1:], table[1:], rows, strict=False):
        values, ids = row.topk(3)
        assert set(map(int, entries)) == {token, *ids.tolist()}
        for id, value in zip([token, *ids.tolist()], [row[token].item(), *values.tolist()], strict=True):
            assert entries[str(id)]["logprob"] == pytest.approx(value, abs=TOLERANCE)
        assert entries[str(token)]["rank"] == (row > row[token]).sum().item() + 1


def test_what_may_be_sampled(server: tuple[httpx.Client, Any]) -> None:
    client, _ = server
    (free,) = complete(client, prompt=[40, 41], max_tokens=12, return_token_ids=True)
    (allowed,) = complete(client, prompt=[40, 41], max_tokens=12, return_token_ids=True, allowed_token_ids=[70, 80])
    assert set(allowed["token_ids"]) <= {70, 80}
    answer = complete(client, prompt=[40, 41], max_tokens=12, n=3, seed=5, temperature=1, allowed_token_ids=[70, 80])
    assert len({choice["text"] for choice in answer}) > 1
    banned = free["token_ids"][4]
    word = complete(client, prompt=[banned], max_tokens=0, echo=True)[0]["text"]
    assert word.isascii() and word.strip(), "choose another token: this one has no text of its own"
    (without,) = complete(client, prompt=[40, 41], max_tokens=12, bad_words=[word], return_token_ids=True)
    before = free["token_ids"].index(banned)
    assert without["token_ids"][:before] == free["token_ids"][:before] and banned not in without["token_ids"]
