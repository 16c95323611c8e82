"""Several conversations in one request: each is answered as it would be alone."""

from __future__ import annotations

from typing import Any

import pytest

ROUTE = "/v1/chat/completions/batch"
CHATS = [[{"role": "user", "content": text}] for text in ("Hi", "How are you today?", "x" * 3000)]


def test_each_conversation_gets_the_choice_of_its_index(client: Any, engine: Any, text_model: Any) -> None:
    core = text_model.tokenizer.core
    engine.script = lambda request: [core.encode(f"{len(request.token_ids)}").ids, [2]]
    alone = [client.post("/v1/chat/completions", {"messages": chat, "seed": 3}) for chat in CHATS[:2]]
    together = client.post(ROUTE, {"messages": CHATS[:2], "seed": 3})
    assert together.status_code == 200, together.text
    answer = together.json()
    assert answer["object"] == "chat.completion" and [one["index"] for one in answer["choices"]] == [0, 1]
    for one, other in zip(answer["choices"], alone, strict=True):
        assert one | {"index": 0} == other.json()["choices"][0]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(other.json()["usage"][name] for other in alone)
    assert answer["choices"][0]["message"]["content"] != answer["choices"][1]["message"]["content"]


def test_reasoning_and_a_grammar_are_for_each(thinking: Any) -> None:
    thinking.says("<think>hm</think>ok")
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    answer = thinking.client.post(ROUTE, {"messages": chats})
    said = [one["message"] for one in answer.json()["choices"]]
    assert [(one["reasoning"], one["content"]) for one in said] == [("hm", "ok")] * 2
    schema = {"type": "json_object"}
    assert thinking.client.post(ROUTE, {"messages": chats, "response_format": schema}).status_code == 200
    keys = {request.sampling.grammar for request in thinking.engine.submitted[-2:]}
    assert len(keys) == 1 and None not in keys
    assert not thinking.grammars.held


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("stream", True, "stream"), ("n", 2, "n"), ("store", True, "store"), ("echo", True, "echo"),
        ("prompt_logprobs", 1, "prompt_logprobs"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "tools"),
        ("messages", [], "messages"), ("messages", "x", "messages"), ("messages", CHATS[0], "messages[0]"),
        ("messages", [CHATS[0], []], "messages[1]"),
        ("messages", [CHATS[0], [{"role": "nobody", "content": "x"}]], "messages[1][0].role"),
        ("messages", [CHATS[0]] * 1000, "messages"),
        ("messages", CHATS, "messages"),  # of which one is beyond the context
    ],
)  # fmt: skip
def test_what_it_is_not_for(client: Any, engine: Any, field: str, value: Any, param: str) -> None:
    answer = client.post(ROUTE, {"messages": CHATS[:2]} | {field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert not engine.submitted
