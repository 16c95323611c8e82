"""What /v1/responses puts on the wire: every event, and that they add up to the answer that is not streamed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from vserve.server.dialects.responses.tools import InputText

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
# What is different each time.
CHANGING = {"id", "item_id", "call_id", "created_at", "completed_at"}


def stream(client: Any, **body: Any) -> list[dict[str, Any]]:
    """The events; checks that nothing else is on the wire and that they are numbered."""
    answer = client.post("/v1/responses", {"input": "Hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("\n\n") and "\r" not in answer.text
    events = []
    for number, event in enumerate(answer.text.split("\n\n")[:-1]):
        name, data = re.fullmatch(r"event: (\S+)\ndata: (.+)", event).groups()
        events.append(json.loads(data))
        assert events[-1]["type"] == name and events[-1]["sequence_number"] == number
    return events


def whole(client: Any, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/responses", {"input": "Hi", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def steady(value: Any) -> Any:
    """Without what is different each time."""
    if isinstance(value, dict):
        return {name: steady(entry) for name, entry in value.items() if name not in CHANGING}
    return [steady(entry) for entry in value] if isinstance(value, list) else value


def outline(events: list[dict[str, Any]]) -> list[str]:
    """A line an event: its type, and where and what it says."""
    lines = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        place = "".join(f" {event[name]}" for name in ("output_index", "content_index") if name in event)
        said = next((event[name] for name in ("delta", "text", "arguments") if name in event), None)
        lines.append(kind + place + ("" if said is None else f" {said!r}"))
    return lines


def test_text_is_exact(client: Any) -> None:
    answer = client.post("/v1/responses", {"input": "Hi", "stream": True})
    first = json.loads(answer.text.split("\n\n")[0].partition("data: ")[2])["response"]
    last = json.loads(answer.text.split("\n\n")[-2].partition("data: ")[2])["response"]
    id = first["id"].removeprefix("resp_")
    where = f'"item_id":"msg_{id}_0","output_index":0,"content_index":0'
    item = f'"type":"message","id":"msg_{id}_0","status":"%s","role":"assistant","content":['
    part = '{"type":"output_text","text":"%s","annotations":[],"logprobs":[]}'

    def event(kind: str, number: int, rest: str, moved: str = "") -> str:
        kind = f"response.{kind}"
        head = f'"type":"{kind}",{moved}"sequence_number":{number}'
        return f"event: {kind}\ndata: {{{head},{rest}}}\n\n"

    def response(value: dict[str, Any]) -> str:
        return '"response":' + json.dumps(value, separators=(",", ":"))

    assert answer.text == (
        event("created", 0, response(first))
        + event("in_progress", 1, response(first))
        + event("output_item.added", 2, f'"output_index":0,"item":{{{item % "in_progress"}]}}')
        + event("content_part.added", 3, f'{where},"part":{part % ""}')
        + event("output_text.delta", 4, '"delta":"Hello","logprobs":[]', where + ",")
        + event("output_text.delta", 5, '"delta":" world","logprobs":[]', where + ",")
        + event("output_text.delta", 6, '"delta":"!","logprobs":[]', where + ",")
        + event("output_text.done", 7, f'{where},"text":"Hello world!","logprobs":[]')
        + event("content_part.done", 8, f'{where},"part":{part % "Hello world!"}')
        + event("output_item.done", 9, f'"output_index":0,"item":{{{item % "completed"}{part % "Hello world!"}]}}')
        + event("completed", 10, response(last))
    )
    assert last["completed_at"] >= last["created_at"] == first["created_at"] and first["completed_at"] is None
    assert last["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 24,
    }
    assert first["status"] == "in_progress" and first["output"] == [] and first["usage"] is None
    assert last["status"] == "completed"
    changed = ("status", "output", "usage", "completed_at")
    assert first | {name: last[name] for name in changed} == last


def test_reasoning_text_and_calls(thinking: Any) -> None:
    thinking.says(f"<think>So.</think>Wait.{CALL}\n{CALL}")
    events = stream(thinking.client, tools=[TOOL], input="Weather?")
    lines = outline(events)
    deltas = [line for line in lines if ".delta" in line]
    assert [line for line in lines if ".delta" not in line] == [
        "created", "in_progress",
        "output_item.added 0", "content_part.added 0 0", "reasoning_text.done 0 0 'So.'", "content_part.done 0 0",
        "output_item.done 0",
        "output_item.added 1", "content_part.added 1 0", "output_text.done 1 0 'Wait.'", "content_part.done 1 0",
        "output_item.done 1",
        "output_item.added 2", "function_call_arguments.done 2 '{\"city\": \"Paris\"}'", "output_item.done 2",
        "output_item.added 3", "function_call_arguments.done 3 '{\"city\": \"Paris\"}'", "output_item.done 3",
        "completed",
    ]  # fmt: skip
    assert {line.split()[0] for line in deltas} == {
        "reasoning_text.delta", "output_text.delta", "function_call_arguments.delta"
    }  # fmt: skip
    done = {}
    for event in events:
        if event["type"].endswith(".delta"):
            done[event["output_index"]] = done.get(event["output_index"], "") + event["delta"]
    assert done == {0: "So.", 1: "Wait.", 2: '{"city": "Paris"}', 3: '{"city": "Paris"}'}
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "So."}]
    assert response["output"][0]["summary"] == []
    ids = [event["item"]["id"] for event in events if event["type"] == "response.output_item.done"]
    assert len(set(ids)) == 4 and [item["id"] for item in response["output"]] == ids
    assert len({item["call_id"] for item in response["output"][2:]}) == 2
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_calls_of_custom_tools_and_of_namespaces(thinking: Any) -> None:
    """As Codex reads them: the first has text for its input, the second its namespace beside its name."""
    patch = {"type": "custom", "name": "apply_patch"}
    agents = {"type": "namespace", "name": "agents", "tools": [TOOL, {"type": "custom", "name": "say"}]}
    calls = [
        {"name": "apply_patch", "arguments": {"input": 'a "patch"\n'}},
        {"name": "agents__get_weather", "arguments": {"city": "Paris"}},
        {"name": "agents__say", "arguments": {"input": ""}},
    ]
    text = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    thinking.says(f"<think>So.</think>{text}")
    body = {"tools": [patch, agents], "input": "Weather?"}
    events = stream(thinking.client, **body)
    response = events[-1]["response"]
    assert steady(response) == steady(whole(thinking.client, **body))
    found = [
        {name: value for name, value in item.items() if name not in ("id", "call_id", "status")}
        for item in response["output"][1:]
    ]
    assert found == [
        {"type": "custom_tool_call", "name": "apply_patch", "input": 'a "patch"\n'},
        {"type": "function_call", "name": "get_weather", "namespace": "agents", "arguments": '{"city": "Paris"}'},
        {"type": "custom_tool_call", "name": "say", "namespace": "agents", "input": ""},
    ]
    told = [line.split(" ")[0] for line in outline(events) if "custom_tool_call_input" in line]
    assert told[-2:] == ["custom_tool_call_input.done"] * 2 and set(told[:-2]) == {"custom_tool_call_input.delta"}
    # What was answered comes back, stored or sent, and is the same to the model.
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"}
        for item in response["output"][1:]
    ]
    whole(thinking.client, tools=body["tools"], input=results, previous_response_id=response["id"])
    stored = thinking.prompt
    history = [{"role": "user", "content": "Weather?"}, *response["output"], *results]
    whole(thinking.client, tools=body["tools"], input=history)
    assert thinking.prompt == stored and "Paris" in stored


def test_a_custom_call_that_is_cut_off(thinking: Any) -> None:
    thinking.says('<tool_call>\n{"name": "apply_patch", "arguments": {"input": "a', ends=False)
    body = {"tools": [{"type": "custom", "name": "apply_patch"}], "input": "x", "max_output_tokens": 40}
    answer = whole(thinking.client, **body)
    assert answer["status"] == "incomplete", answer
    assert all(item["status"] in ("completed", "incomplete") for item in answer["output"])


def test_the_input_of_a_custom_tool_is_streamed(thinking: Any) -> None:
    """Where a grammar guards the arguments, each piece of the input goes out as it comes, its escapes read."""
    patch = {"type": "custom", "name": "apply_patch"}
    said = 'a "b"\n\\ é 👩 c'
    call = {"name": "apply_patch", "arguments": {"input": said}}
    thinking.says(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    events = stream(thinking.client, tools=[patch], input="x")
    pieces = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    done = [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert "".join(pieces) == said and done == [said] and len(pieces) > 5
    assert events[-1]["response"]["output"][0]["input"] == said


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a \\"b\\"\\n\\u00e9\\ud83d\\ude00"}', 'a "b"\né😀'),
        (' { "input" : "" } ', ""),
        ('{"input": "cut o', "cut o"),
        ('{"input": "cut \\u00', "cut "),
        ('{"other": "a"}', '{"other": "a"}'),
        ('["a"', '["a"'),
        ("", ""),
    ],
)  # fmt: skip
def test_the_input_in_pieces(arguments: str, text: str, size: int) -> None:
    reader = InputText()
    pieces = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    assert "".join(pieces) + reader.finish() == text


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text", ["Hello", f"<think>So.</think>Wait.{CALL}", CALL, "<think>Only thought", f"{CALL[:50]}", ""]
)
def test_streamed_is_whole(thinking: Any, text: str, size: int) -> None:
    thinking.says(text, size)
    body = {"tools": [TOOL], "input": "Weather?"}
    answer = whole(thinking.client, **body)
    events = stream(thinking.client, **body)
    assert steady(events[-1]["response"]) == steady(answer)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert steady(done) == steady(answer["output"])
    assert answer["output"], "agents wait for an item"


def test_cut_by_its_limit(thinking: Any) -> None:
    limit = thinking.says("<think>So.</think>Hello you") - 2
    events = stream(thinking.client, max_output_tokens=limit)
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert steady(whole(thinking.client, max_output_tokens=limit)) == steady(response)


def test_log_probabilities_are_those_of_the_text(thinking: Any) -> None:
    thinking.says("<think>So.</think>Hello you", size=4)
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = stream(thinking.client, **options)
    message = events[-1]["response"]["output"][1]
    entries = message["content"][0]["logprobs"]
    streamed = [e for event in events if event["type"] == "response.output_text.delta" for e in event["logprobs"]]
    assert "".join(entry["token"] for entry in entries).startswith("Hello you")
    assert streamed == entries[: len(streamed)] and len(streamed) >= len(entries) - 1  # the end of text has no text
    assert all(len(entry["top_logprobs"]) == 2 and entry["bytes"] for entry in entries)
    assert steady(whole(thinking.client, **options)["output"][1]) == steady(message)


def test_an_error_in_the_stream(client: Any, engine: Any) -> None:
    engine.script = lambda request: [[50]]
    engine.fail_with = "out of luck"
    events = stream(client)
    assert outline(events)[-2:] == ["error", "failed"]
    assert "out of luck" in events[-2]["message"]
    response = events[-1]["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    assert client.get(f"/v1/responses/{response['id']}").status_code == 404


def test_an_error_before_it(client: Any, engine: Any) -> None:
    engine.script = lambda request: []
    engine.fail_with = "out of luck"
    answer = client.post("/v1/responses", {"input": "Hi", "stream": True})
    assert answer.status_code == 500 and "out of luck" in answer.json()["error"]["message"]
