"""Messages as chat templates get them."""

from __future__ import annotations

from typing import Any

from vserve.server.text.conversation import messages


def one(**message: Any) -> dict[str, Any]:
    (clean,) = messages([message])
    return clean


def test_content_is_a_string_or_several_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        assert one(role=role, content="x", name="n") == {"role": role, "name": "n", "content": "x"}
        assert one(role=role, content=parts)["content"] == parts
        assert one(role=role, content=parts[:1])["content"] == "a"
    assert one(role="assistant", content=[{"type": "refusal", "refusal": "no"}])["content"] == "no"


def test_content_that_is_empty_is_an_empty_text() -> None:
    """An answer that was cut off while it thought has null, and clients send it back."""
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        for content in ({}, {"content": None}, {"content": []}, {"content": ""}):
            assert one(role=role, **content) == {"role": role, "content": ""}


def test_an_answer_that_called_tools() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
    for content in ({}, {"content": None}, {"content": ""}):
        message = one(role="assistant", tool_calls=[call], refusal=None, audio=None, **content)
        parsed = {**call, "function": {"name": "f", "arguments": {"x": [1, "é"]}}}
        assert message == {"role": "assistant", "tool_calls": [parsed], "content": ""}
    assert one(role="assistant", content="Hi", tool_calls=[]) == {"role": "assistant", "content": "Hi"}
    assert one(role="tool", content="42", tool_call_id="call_1")["tool_call_id"] == "call_1"
    function = one(role="assistant", function_call={"name": "f", "arguments": ""})["function_call"]
    assert function == {"name": "f", "arguments": {}}


def test_arguments_that_a_model_got_wrong_stay_text() -> None:
    for arguments in ('{"x": ', "[1]", "5", "[" * 10**5):
        call = {"function": {"name": "f", "arguments": arguments}}
        (parsed,) = one(role="assistant", tool_calls=[call])["tool_calls"]
        assert parsed == {"type": "function", "function": {"name": "f", "arguments": arguments}}


def test_reasoning_has_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = one(role="assistant", content="Hi", **{name: "hm"})
        assert message["reasoning"] == message["reasoning_content"] == "hm"
    assert one(role="assistant", reasoning="hm")["content"] == ""
    assert one(role="assistant", content=None, refusal="no")["content"] == "no"


def test_templates_get_all_of_it(client: Any, engine: Any, text_model: Any, new_client: Any) -> None:
    def prompt(client: Any, **body: Any) -> str:
        response = client.chat(**body)
        assert response.status_code == 200, response.text
        return text_model.tokenizer.core.decode(engine.submitted[-1].token_ids, skip_special_tokens=False)

    refused = client.chat(chat_template="{{ 1 }}")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %};{% endfor %}"
        "{{ documents[0].text }}{{ effort }}"
    )
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}], "reasoning": "hm"},
        {"role": "tool", "content": "2"},
    ]
    rendered = prompt(
        new_client(trust_request_chat_template=True), messages=history, chat_template=template,
        documents=[{"text": "doc"}], chat_template_kwargs={"effort": 3},
    )  # fmt: skip
    assert rendered == "user:Hi;assistant:hmf(1);tool:2;doc3"
