"""POST /v1/messages: transcripts, what becomes of a request, and errors in Anthropic's shape."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

import httpx
import pytest

from vserve.server.http.front_door import FrontDoor

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"name": "get_weather", "description": "d", "input_schema": {"type": "object"}}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
BILLING = "x-anthropic-billing-header: cc_version=9.9.9.abc; cc_entrypoint=cli; cch=abcde;"
HI = [{"role": "user", "content": "Hi"}]


def post(client: Any, **body: Any) -> Any:
    return client.post("/v1/messages", {"messages": HI, "max_tokens": 100, **body}, headers={"x-request-id": "abc"})


def ask(client: Any, **body: Any) -> dict[str, Any]:
    answer = post(client, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == "abc"
    return answer.json()


def stream(client: Any, **body: Any) -> list[dict[str, Any]]:
    """The events; checks that nothing else is on the wire."""
    answer = post(client, stream=True, **body)
    assert answer.status_code == 200, answer.text
    events = []
    for event in answer.text.split("\n\n")[:-1]:
        name, data = re.fullmatch(r"event: (\S+)\ndata: (.+)", event).groups()
        events.append(json.loads(data))
        assert events[-1]["type"] == name
    return events


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message, put together as a client does it."""
    message: dict[str, Any] = {}
    texts: list[str] = []
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts = []
        elif kind == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                texts.append(delta["partial_json"])
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "content_block_stop" and texts:
            with contextlib.suppress(ValueError):  # it was cut off
                message["content"][event["index"]]["input"] = json.loads("".join(texts))
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def test_text_is_exact(client: Any) -> None:
    usage = '"input_tokens":16,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":%d,%s'
    details = '"output_tokens_details":{"thinking_tokens":0}'
    assert post(client, stream=True).text == (
        'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_abc","type":"message",'
        '"role":"assistant","model":"test","content":[],"stop_reason":null,"stop_sequence":null,'
        f'"usage":{{{usage % (0, details)}}}}}}}\n\n'
        'event: ping\ndata: {"type":"ping"}\n\n'
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        '"content_block":{"type":"text","text":""}}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"Hello"}}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":" world"}}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"!"}}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        f'"usage":{{{usage % (4, details)}}}}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )


def test_thinking_text_and_tool_use(thinking: Any) -> None:
    thinking.says(f"<think>So.</think>Wait.{CALL}")
    events = stream(thinking.client, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 50})
    kinds = [event["type"].removeprefix("content_") for event in events]
    assert [kind for kind in kinds if kind != "block_delta"] == [
        "message_start", "ping", *["block_start", "block_stop"] * 3, "message_delta", "message_stop"
    ]  # fmt: skip
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    thought, text, call = added_up(events)["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "So.") and len(thought["signature"]) > 20
    assert text == {"type": "text", "text": "Wait."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert thinking.engine.submitted[-1].sampling.thinking.budget == 50


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text", ["Hello", f"<think>So.</think>Wait.{CALL}\n{CALL}", CALL, "<think>Only", CALL[:50], ""]
)
def test_streamed_is_whole(thinking: Any, text: str, size: int) -> None:
    thinking.says(text, size)
    message = ask(thinking.client, tools=[TOOL])
    streamed = added_up(stream(thinking.client, tools=[TOOL]))
    for block in (*message["content"], *streamed["content"]):
        block.pop("id", None)
    assert streamed == message


@pytest.mark.parametrize(
    "text, fields, reason",
    [
        ("Hello you", {}, ("end_turn", None)),
        ("Hello you STOP now", {"stop_sequences": ["STOP"]}, ("stop_sequence", "STOP")),
        ("Hello you", {"max_tokens": 2}, ("max_tokens", None)),
        ("x" * 3000, {"max_tokens": 100_000}, ("model_context_window_exceeded", None)),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}, ("tool_use", None)),
    ],
)
def test_stop_reasons(thinking: Any, text: str, fields: dict[str, Any], reason: tuple[str, str | None]) -> None:
    thinking.says(text, size=50)
    message = ask(thinking.client, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == reason
    assert added_up(stream(thinking.client, **fields))["stop_reason"] == reason[0]


def test_blocks_become_messages(thinking: Any) -> None:
    use = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Paris"}}
    sun = {"type": "text", "text": "sun"}
    ask(
        thinking.client,
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}, sun],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "Wait"},
                    use,
                    {**use, "id": "b", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [sun]},
                    {"type": "tool_result", "tool_use_id": "b", "content": "no such city", "is_error": True},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    assert thinking.prompt == (
        "<|im_start|>system\nBe kind.\nsun<|im_end|>\n<|im_start|>user\nWeather\n?<|im_end|>\n"
        "<|im_start|>assistant\n<think>Hm</think>Wait"
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>tool\nError: no such city<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be kind."}],
        [{"type": "text", "text": f"{BILLING}\nBe kind."}],
        f"{BILLING}\nBe kind.",
    ],
)
def test_what_claude_code_says_of_billing_is_not_for_the_model(thinking: Any, system: Any) -> None:
    """It is another text in each request, and nothing behind it would be found in the prefix cache."""
    ask(thinking.client, system="Be kind.")
    plain = thinking.prompt
    counted = [thinking.client.post("/v1/messages/count_tokens", {"messages": HI, "system": "Be kind."}).json()]
    for said in (system, json.loads(json.dumps(system).replace("abcde", "fghij"))):
        ask(thinking.client, system=said)
        assert thinking.prompt == plain
        counted.append(thinking.client.post("/v1/messages/count_tokens", {"messages": HI, "system": said}).json())
    assert counted[1:] == counted[:1] * 2
    ask(thinking.client, system=[{"type": "text", "text": BILLING}])
    assert "system" not in thinking.prompt


def test_what_is_no_text_in_a_history_becomes_a_line_of_it(thinking: Any) -> None:
    """Or every later request of the session would be refused."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    history = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "cats"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
                {"type": "web_search_result", "title": "Cats", "url": "http://cats", "encrypted_content": "??"}]},
            {"type": "code_execution_tool_result", "tool_use_id": "t", "content": {
                "type": "code_execution_result", "stdout": "OUT", "stderr": "", "return_code": 0, "content": []}},
            {"type": "mcp_tool_result", "tool_use_id": "u", "content": [{"type": "text", "text": "MCP"}]},
            {"type": "web_fetch_tool_result", "tool_use_id": "v", "content": {
                "type": "web_fetch_result", "url": "http://dogs", "content": {"type": "document", "source": {}}}},
            {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Paris"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [
                {"type": "text", "text": "before"}, image, {"type": "text", "text": "after"},
                {"type": "tool_reference", "tool_name": "get_weather"},
                {"type": "search_result", "title": "Title", "source": "http://s",
                 "content": [{"type": "text", "text": "found"}]}]},
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
            {"type": "document", "title": "Notes", "source": {
                "type": "text", "media_type": "text/plain", "data": "NOTED"}},
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "PARTS"}]}}]},
    ]  # fmt: skip
    answer = post(thinking.client, messages=history, tools=[TOOL])
    assert answer.status_code == 200, answer.text
    said = re.sub(r"<\|im_start\|>|<\|im_end\|>", "", thinking.prompt)
    assert said.endswith(
        'user\nLook.\nassistant\n[The tool web_search was called with {"query":"cats"}]\n'
        "[Its result (web_search):]\nCats\nhttp://cats\n[Its result (code_execution):]\nOUT\n[Its result (mcp):]\nMCP\n"
        "[Its result (web_fetch):]\nhttp://dogs"
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n'
        "tool\nbefore\n[A picture was here. You cannot see pictures.]\nafter\n[The tool get_weather can be called.]\n"
        "Title\nhttp://s\nfound\n"
        "user\n[A document was here. You cannot read documents of this kind.]\nNotes\nNOTED\nPARTS\n"
        "assistant\n<think>\n\n</think>\n\n"
    )
    assert answer.headers["x-vserve-ignored-params"] == (
        "messages.server_tool_use, messages.web_search_tool_result, messages.code_execution_tool_result, "
        "messages.mcp_tool_result, messages.web_fetch_tool_result, messages.image, messages.tool_reference, "
        "messages.search_result, messages.document"
    )
    counted = thinking.client.post("/v1/messages/count_tokens", {"messages": history, "tools": [TOOL]})
    usage = answer.json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert counted.headers["x-vserve-ignored-params"] == answer.headers["x-vserve-ignored-params"]


def test_tools_of_anthropics_servers_are_left_out_and_named(thinking: Any, new_thinking: Any) -> None:
    others = [WEB_SEARCH, {"type": "tool_search_tool_bm25_20251119", "name": "find"}, {"type": "mcp_toolset"}]
    ask(thinking.client, tools=[TOOL])
    plain = thinking.prompt
    answer = post(thinking.client, tools=[others[0], TOOL, *others], tool_choice={"type": "auto"})
    assert answer.status_code == 200 and thinking.prompt == plain
    assert answer.headers["x-vserve-ignored-params"] == (
        "tools.web_search_20250305, tools.tool_search_tool_bm25_20251119, tools.mcp_toolset"
    )
    alone = post(thinking.client, tools=others, tool_choice={"type": "auto"})  # as if there were none
    assert alone.status_code == 200 and "get_weather" not in thinking.prompt
    strict = post(new_thinking(strict_params=True).client, tools=others)
    assert strict.status_code == 400 and "tools.web_search_20250305" in strict.text


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}], "missing"])
def test_content_that_is_empty_is_an_empty_text(thinking: Any, content: Any) -> None:
    """What an answer was that had been cut off within its thinking."""
    said = {"role": "assistant", "content": content}
    if content == "missing":
        del said["content"]
    ask(thinking.client, messages=[*HI, said, *HI])
    assert "<|im_start|>assistant\n<|im_end|>" in thinking.prompt
    ask(thinking.client, messages=[*HI, {**said, "role": "user"}])
    assert "<|im_start|>user\n<|im_end|>" in thinking.prompt


def test_thinking_that_is_not_to_be_shown(thinking: Any) -> None:
    thinking.says("<think>Hm</think>Yes")
    assert [b["type"] for b in ask(thinking.client, thinking={"type": "adaptive"})["content"]] == ["thinking", "text"]
    thinking.says("<think>Hm</think>Yes")
    message = ask(thinking.client, thinking={"type": "adaptive", "display": "omitted"})
    assert message["content"] == [{"type": "text", "text": "Yes"}]


def test_an_answer_that_has_begun_goes_on(thinking: Any) -> None:
    ask(thinking.client, messages=[*HI, {"role": "assistant", "content": "The answer"}])
    assert thinking.prompt.endswith("<|im_start|>assistant\nThe answer")


def test_parameters(thinking: Any) -> None:
    ask(
        thinking.client, temperature=0.5, top_p=0.9, top_k=3, max_tokens=7, metadata={"user_id": "me"},
        service_tier="auto", cache_control={"type": "ephemeral"}, stop_sequences=["x"],
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )  # fmt: skip
    sampling = thinking.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 3, 7)
    assert [constraint.kind for _, constraint in thinking.grammars.asked] == ["json"]


@pytest.mark.parametrize(
    "choice, begins, several",
    [
        ({"type": "auto"}, "dispatch", True),
        ({"type": "any"}, "sequence", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "sequence", False),
        ({"type": "tool", "name": "get_weather"}, "sequence", False),
    ],
)
def test_tool_choice(thinking: Any, choice: dict[str, Any], begins: str, several: bool) -> None:
    thinking.says(f"{CALL}\n{CALL}")
    message = ask(thinking.client, tools=[TOOL], tool_choice=choice, max_tokens=500)
    assert len(message["content"]) == 1 + several
    (_, constraint), *_ = thinking.grammars.asked
    assert json.loads(constraint.text)["format"]["type"] == begins


def test_thinking_is_switched(thinking: Any) -> None:
    for fields, closed in (({}, True), ({"type": "disabled"}, True), ({"type": "adaptive"}, False)):
        ask(thinking.client, **({"thinking": fields} if fields else {}))
        assert thinking.prompt.endswith("</think>\n\n") == closed


def test_count_tokens(thinking: Any) -> None:
    body = {"messages": HI, "system": "Be kind.", "tools": [TOOL], "model": "test"}
    answer = thinking.client.post("/v1/messages/count_tokens", body)
    message = ask(thinking.client, **body)
    usage = message["usage"]
    assert answer.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    refused = thinking.client.post("/v1/messages/count_tokens", {**body, "model": "other"})
    assert refused.status_code == 404 and refused.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    "body, said",
    [
        ({"max_tokens": None}, "'max_tokens'"),
        ({"max_tokens": 0}, "at least 1"),
        ({"messages": []}, "'messages' must not be empty"),
        ({"messages": "x"}, "'messages' must be a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'messages[0].role'"),
        ({"messages": [{"role": "user", "content": 7}]}, "'messages[0].content'"),
        ({"messages": [{"role": "user", "content": [{"type": "thing"}]}]}, "type 'thing' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type 'image' is not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "'messages[0].content[0].tool_use_id'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f"}]}]},
            "'messages[0].content[0].input'",
        ),
        ({"system": [{"type": "image"}]}, "'image'"),
        ({"tools": [{"type": "web_search", "name": "web_search"}]}, "'web_search'"),
        ({"tools": [{"type": 7, "name": "web_search"}]}, "type '7'"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "'tools'"),
        ({"tools": [{"name": "f"}]}, "'tools[0].input_schema'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "'tools[0].name'"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "'tools[0].input_schema'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "'tool_choice'"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "'some'"),
        ({"tool_choice": {"type": "any"}}, "'tools'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "'thinking.budget_tokens' is 100"),
        ({"output_config": {"format": {"type": "regex"}}}, "'output_config.format'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "'output_config.format.schema'"),
        ({"stop_sequences": [""]}, "'stop_sequences'"),
        ({"container": "x"}, "'container' is not supported"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "maximum context length"),
    ],
)
def test_errors(thinking: Any, body: dict[str, Any], said: str) -> None:
    answer = post(thinking.client, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error.keys() == {"type", "error", "request_id"} and error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error" and error["request_id"] == "abc"
    assert said in error["error"]["message"] and "function." not in error["error"]["message"], error
    assert answer.headers["request-id"] == "abc"


def test_errors_from_elsewhere_have_this_shape_too(new_client: Any, engine: Any) -> None:
    client = new_client(api_key=("one",), max_body_size=1000)
    codes = {413: "body_too_large", 400: "invalid_json", 503: "engine_dead"}
    key = {"x-api-key": "one", "anthropic-version": "2023-06-01"}

    def kind(answer: Any, status: int) -> str:
        assert answer.status_code == status, answer.text
        assert answer.json()["type"] == "error" and answer.json()["request_id"] == answer.headers["x-request-id"]
        if status in codes:  # the body has no place for it
            assert answer.headers["x-error-code"] == codes[status]
        return answer.json()["error"]["type"]

    body = {"messages": HI, "max_tokens": 5}
    assert client.post("/v1/messages", body, headers=key).status_code == 200
    assert kind(client.post("/v1/messages", body), 401) == "authentication_error"
    assert kind(client.post("/v1/messages", body, headers={"x-api-key": "two"}), 401) == "authentication_error"
    both = [("x-api-key", "one"), ("x-api-key", "one")]
    assert kind(client.post("/v1/messages", body, headers=both), 401) == "authentication_error"
    assert kind(client.get("/v1/messages", headers=key), 405) == "invalid_request_error"
    assert kind(client.get("/v1/messages/batches", headers=key), 404) == "not_found_error"
    assert kind(client.post("/v1/messages", content=b"{}", headers=key), 415) == "invalid_request_error"
    typed = key | {"content-type": "application/json"}
    assert kind(client.post("/v1/messages", content=b"{", headers=typed), 400) == "invalid_request_error"
    assert kind(client.post("/v1/messages", content=b"x" * 2000, headers=key), 413) == "request_too_large"
    assert kind(client.post("/v1/messages", {**body, "model": "other"}, headers=key), 404) == "not_found_error"
    engine.die("out of luck")
    assert kind(client.post("/v1/messages", body, headers=key), 503) == "overloaded_error"
    # and the others keep theirs
    assert "param" in client.post("/v1/chat/completions", {}, headers=key).json()["error"]


def test_while_the_model_loads(engine: Any) -> None:
    async def ask(path: str) -> dict[str, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(FrontDoor(engine)), base_url="http://test") as http:
            answer = await http.post(path)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            return answer.json()["error"]

    assert asyncio.run(ask("/v1/messages"))["type"] == "overloaded_error"
    assert asyncio.run(ask("/v1/responses"))["code"] == "model_loading"


def test_an_error_in_the_stream(client: Any, engine: Any) -> None:
    engine.script = lambda request: [[50]]
    engine.fail_with = "out of luck"
    last = stream(client)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and last["request_id"] == "abc"
    assert "out of luck" in last["error"]["message"]


def test_cancelled_by_its_id(serve: Any, engine: Any) -> None:
    engine.delay, engine.script = 0.01, lambda request: [[50]] * 10_000

    async def test(port: int) -> None:
        base = f"http://127.0.0.1:{port}/v1"
        body = {"messages": HI, "max_tokens": 10_000, "stream": True}
        async with (
            httpx.AsyncClient() as other,
            httpx.AsyncClient() as http,
            http.stream("POST", f"{base}/messages", json=body) as answer,
        ):
            lines = answer.aiter_lines()
            async for line in lines:
                if "content_block_delta" in line:
                    break
            assert (await other.post(f"{base}/requests/msg_{answer.headers['request-id']}/cancel")).status_code == 200
            rest = [line async for line in lines]
            assert any('"stop_reason":"end_turn"' in line for line in rest) and "message_stop" in rest[-2]

    serve(test)
