"""What /v1/responses makes of a request: the prompt, the parameters, and clear errors."""

from __future__ import annotations

from typing import Any

import pytest

TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
OTHER = {"type": "function", "name": "search"}
PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: ANY"},
}  # fmt: skip
AGENTS = {
    "type": "namespace", "name": "agents", "description": "Others.",
    "tools": [{**TOOL, "name": "spawn", "description": "New."}, {**OTHER, "name": "wait"}],
}  # fmt: skip


def ask(thinking: Any, input: Any = "Hi", **body: Any) -> dict[str, Any]:
    answer = thinking.client.post("/v1/responses", {"input": input, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_items_become_messages(thinking: Any) -> None:
    ask(
        thinking,
        [
            {"role": "developer", "content": "Be kind."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "Weather"}, {"type": "input_text", "text": "?"}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait"}]},
            {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": '{"city": "Paris"}'},
            {"type": "function_call", "call_id": "b", "name": "get_weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "a", "output": "sun"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "rain"}]},
            {"role": "assistant", "content": "Sun."},
            {"role": "user", "content": "Thanks"},
        ],
        instructions="Be brief.",
    )
    assert thinking.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>developer\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nWeather\n?<|im_end|>\n"
        "<|im_start|>assistant\n<think>Hm</think>Wait"
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\nSun.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    )


def test_parameters(thinking: Any) -> None:
    response = ask(
        thinking, temperature=0.5, top_p=0.9, max_output_tokens=7, top_k=3, seed=4, metadata={"a": "b"}, user="me",
        truncation="disabled", prompt_cache_key="k", service_tier="auto", background=False,
        stream_options={"include_obfuscation": False}, text={"format": {"type": "text"}},
    )  # fmt: skip
    sampling = thinking.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 7)
    assert (sampling.top_k, sampling.seed) == (3, 4)
    asked = {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 7, "metadata": {"a": "b"}, "user": "me"}
    assert asked.items() <= response.items()


@pytest.mark.parametrize(
    "choice, names, mode",
    [
        (None, ("get_weather", "search"), "auto"),
        ("required", ("get_weather", "search"), "required"),
        ({"type": "function", "name": "search"}, ("get_weather", "search"), "named"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "search"}]},
            ("get_weather", "search"), "required",
        ),
    ],
)  # fmt: skip
def test_tools_are_offered(thinking: Any, choice: Any, names: tuple[str, ...], mode: str) -> None:
    response = ask(thinking, tools=[TOOL, OTHER], tool_choice=choice)
    assert thinking.prompt.startswith("".join(f"{name};" for name in names) + "as")
    assert [tool["name"] for tool in response["tools"]] == ["get_weather", "search"]
    assert response["tool_choice"] == (choice or "auto")
    (param, constraint), *_ = thinking.grammars.asked
    assert param == "tools" and ("get_weather" in constraint.text) == (choice in (None, "required"))
    assert thinking.grammars.held == 0


def test_tools_of_codex(thinking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of a namespace and custom tools are functions to the model; what is built into OpenAI's is left out."""
    seen: list[Any] = []
    render = type(thinking.model.tokenizer).render

    def watched(tokenizer: Any, messages: Any, options: Any, *more: Any) -> str:
        seen.append([tool["function"] for tool in options.get("tools", [])])
        return render(tokenizer, messages, options, *more)

    monkeypatch.setattr(type(thinking.model.tokenizer), "render", watched)
    built_in = [{"type": "web_search", "external_web_access": False}, {"type": "local_shell"}, {"type": "web_search"}]
    body = {"input": "Hi", "tools": [AGENTS, TOOL, *built_in, PATCH], "text": {"verbosity": "low"}}
    answer = thinking.client.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-vserve-ignored-params"] == "tools.web_search, tools.local_shell, text.verbosity"
    assert [tool["type"] for tool in answer.json()["tools"]] == [tool["type"] for tool in body["tools"]]
    spawn, wait, weather, patch = seen[-1]
    assert (spawn["name"], spawn["description"]) == ("agents__spawn", "New.\n(Of all in agents: Others.)")
    assert spawn["parameters"] == TOOL["parameters"] and wait == {"name": "agents__wait"}
    assert weather["name"] == "get_weather"
    assert patch["name"] == "apply_patch" and patch["parameters"]["required"] == ["input"]
    assert patch["description"] == "Patches.\n'input' follows this grammar (lark):\nstart: ANY"
    for choice, name in (
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "wait", "namespace": "agents"}, "agents__wait"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "agents"}]}, "agents__"),
    ):
        thinking.grammars.asked.clear()
        assert thinking.client.post("/v1/responses", {**body, "tool_choice": choice}).status_code == 200
        (_, constraint), *_ = thinking.grammars.asked
        assert name in constraint.text and "get_weather" not in constraint.text
    ask(thinking, tools=built_in, tool_choice="auto")
    assert seen[-1] == []
    ask(thinking, tools=[TOOL, *built_in], tool_choice={"type": "allowed_tools", "tools": built_in[:1]})
    assert seen[-1] == []


def test_items_of_other_tools_are_in_the_history(thinking: Any) -> None:
    answer = thinking.client.post("/v1/responses", {"input": [
        {"role": "user", "content": "Go"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "cats"}},
        {"type": "custom_tool_call", "call_id": "a", "name": "get_weather", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "patched"},
        {"type": "local_shell_call", "id": "s", "call_id": "b", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "city": "Ls"}},
        {"type": "local_shell_call_output", "id": "b", "output": "files"},
        {"type": "function_call", "call_id": "c", "name": "view", "namespace": "images",
         "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": []},
        {"role": "user"},
    ]})  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert thinking.prompt == (
        "<|im_start|>user\nGo<|im_end|>\n"
        '<|im_start|>assistant\n[web_search_call: {"action":{"type":"search","query":"cats"}}]'
        '<tool_call>{"name": "get_weather", "arguments": {"input": "x"}}</tool_call>'
        "<|im_end|>\n<|im_start|>tool\npatched<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>"
        '{"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"], "city": "Ls"}}'
        "</tool_call><|im_end|>\n<|im_start|>tool\nfiles<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>{"name": "images__view", "arguments": {"city": "Rome"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nSee\n[A picture was here. You cannot see pictures.]<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>user\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert answer.headers["x-vserve-ignored-params"] == (
        "input.web_search_call, input.local_shell_call, input.local_shell_call_output, input.input_image"
    )


def test_a_schema_beside_json_object(thinking: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask(thinking, text={"format": {"type": "json_object", "schema": schema}})
    chat = {"messages": [{"role": "user", "content": "x"}]}
    formats = ({"type": "json_object", "schema": schema}, {"type": "json_object", "schema": None})
    for format in formats:
        assert thinking.client.post("/v1/chat/completions", {**chat, "response_format": format}).status_code == 200
    kinds = [(constraint.kind, '"a"' in constraint.text) for _, constraint in thinking.grammars.asked]
    assert kinds == [("json", True), ("json", True), ("json_object", False)]
    wrong = thinking.client.post("/v1/chat/completions", {**chat, "response_format": {**formats[0], "schema": 5}})
    assert wrong.status_code == 400 and "'response_format.schema'" in wrong.text


def test_without_tools(thinking: Any) -> None:
    for fields in ({"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tools": [TOOL], "tool_choice": "none"}):
        ask(thinking, **fields)
        assert thinking.prompt.startswith("<|im_start|>")
    assert not thinking.grammars.asked


def test_the_form_of_the_text(thinking: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    response = ask(thinking, text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
    ask(thinking, text={"format": {"type": "json_object"}})
    (_, first), (_, second) = thinking.grammars.asked
    assert (first.kind, second.kind) == ("json", "json_object") and '"a"' in first.text
    assert response["text"]["format"]["schema"] == schema


def test_effort(thinking: Any) -> None:
    assert ask(thinking, reasoning={"effort": "none", "summary": "auto"})["reasoning"]["effort"] == "none"
    assert thinking.prompt.endswith("<think>\n\n</think>\n\n")
    ask(thinking, reasoning={"effort": "high"})
    assert not thinking.prompt.endswith("</think>\n\n")


@pytest.mark.parametrize(
    "body, param, said",
    [
        ({}, "input", "Missing"),
        ({"input": 5}, "input", "a string or a list of items"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["x"]}, "input[0]", "must be an object"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool'"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "must be a list"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "input_image",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "Missing"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "previous_response_id"),
        ({"input": [{"type": "web_call"}]}, "input[0].type", "web_call"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].id", "Missing"),
        ({"input": [{"type": "custom_tool_call", "call_id": "x", "name": "f"}]}, "input[0].input", "Missing"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "Missing"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "Missing"),
        ({"input": "x", "tools": [{"type": 5}]}, "tools[0].type", "'5'"),
        ({"input": "x", "tools": [{"type": "custom"}]}, "tools[0].name", "Missing"),
        ({"input": "x", "tools": [{**PATCH, "description": 5}]}, "tools[0].description", "must be a string"),
        ({"input": "x", "tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format.definition", "Missing"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "must be a list"),
        ({"input": "x", "tools": [{**AGENTS, "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name", "Missing"),
        ({"input": "x", "tools": [{**AGENTS, "tools": [AGENTS]}], "tool_choice": "required"}, "tool_choice", "'tools'"),
        (
            {"input": "x", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [OTHER]}},
            "tool_choice.tools",
            "'search'",
        ),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "'tools[0].name'"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "y"}}, "tool_choice.name", "'y'"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "'mcp'"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "'tools'"),
        ({"input": "x", "background": True, "store": False}, "store", "'background' needs 'store'"),
        ({"input": "x", "background": 1}, "background", "boolean"),
        ({"input": "x", "conversation": "c"}, "conversation", "not supported"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include[0]", "file_search_call"),
        ({"input": "x", "text": {"verbosity": "huge"}}, "text.verbosity", "'low', 'medium' or 'high'"),
        ({"input": "x", "text": {"format": {"type": "regex"}}}, "text.format.type", "'regex'"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "'text.format.schema'"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "x", "max_output_tokens": 9999}, "max_output_tokens", "maximum context length"),
        ({"input": "x", "temperature": 3}, "temperature", "at most 2"),
        ({"input": "x", "top_logprobs": 50}, "top_logprobs", "at most 20"),
        ({"input": "x", "top_k": -5}, "top_k", "at least -1"),
        ({"input": "x", "metadata": {"a": "b" * 513}}, "metadata", "512"),
        ({"input": "x", "previous_response_id": "resp_x"}, "previous_response_id", "resp_x"),
        ({"input": "x" * 9000}, "input", "maximum context length"),
    ],
)
def test_errors(thinking: Any, body: dict[str, Any], param: str, said: str) -> None:
    answer = thinking.client.post("/v1/responses", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"], error
    assert "messages" not in error["message"] and "function." not in error["message"]


def test_unknown_model_and_fields(thinking: Any, new_thinking: Any) -> None:
    assert thinking.client.post("/v1/responses", {"input": "x", "model": "other"}).status_code == 404
    answer = thinking.client.post("/v1/responses", {"input": "x", "flavour": 1})
    assert answer.status_code == 200 and answer.headers["x-vserve-ignored-params"] == "flavour"
    strict = new_thinking(strict_params=True).client.post("/v1/responses", {"input": "x", "flavour": 1})
    assert strict.status_code == 400 and strict.json()["error"]["param"] == "flavour"
    assert new_thinking(strict_params=True).client.post("/v1/responses", {"input": "x", "top_k": 5}).status_code == 200


def test_old_turns_are_left_out(thinking: Any) -> None:
    turns = [message for i in range(30) for message in (
        {"role": "user", "content": f"question {i} " + "x" * 80}, {"role": "assistant", "content": f"answer {i}"}
    )]  # fmt: skip
    input = [{"role": "system", "content": "Be kind."}, *turns, {"role": "user", "content": "And now?"}]
    refused = thinking.client.post("/v1/responses", {"input": input})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    ask(thinking, input, truncation="auto", max_output_tokens=500)
    prompt = thinking.prompt
    num_tokens = len(thinking.engine.submitted[-1].token_ids)
    assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nquestion ")
    assert "And now?" in prompt and "question 0 " not in prompt and "question 29 " in prompt
    assert 1500 - 150 < num_tokens <= 1500, "not more is left out than must be"
    ask(thinking, input[:5], truncation="auto")
    assert "question 0 " in thinking.prompt
