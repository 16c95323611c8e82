"""Tool calls and reasoning over HTTP: a scripted model writes them, the wire has them as clients expect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import OpenAI

from vserve.engine.errors import ConfigError
from vserve.engine.grammar.grammar import unpack
from vserve.engine.link.sampling_params import Thinking
from vserve.server.app import create_app
from vserve.server.errors import bad_request
from vserve.server.grammar.service import vocabulary
from vserve.server.options.config import ServerConfig
from vserve.server.text.model import TextModel, load_text_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SEARCH = {"type": "function", "function": {"name": "search", "description": "Looks things up."}}
TOOLS = [WEATHER, SEARCH]
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LOOK = '<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }};{% endfor %}as <tool_call> json </tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif open %}<think>\n{% endif %}{% endif %}"
)
REQUEST_ID = {"x-request-id": "abc"}


class Grammars:
    """Stands for the compiler of grammars: remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.refuses: Callable[[Any], bool] = lambda constraint: False
        self.held = 0

    async def acquire(self, constraint: Any, param: str, owner: str) -> str:
        self.asked.append((param, constraint))
        if self.refuses(constraint):
            raise bad_request("too hard", param)
        self.held += 1
        return "key"

    def release(self, key: str) -> None:
        self.held -= 1

    async def close(self) -> None: ...


def model_with(
    folder: Path, into: Path, template: str, tokens: tuple[str, ...], special: bool, **options: Any
) -> TextModel:
    """The tests' tokenizer with another template and further tokens."""
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    config = json.loads((into / "tokenizer_config.json").read_text())
    (into / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    tokenizer = json.loads((into / "tokenizer.json").read_text())
    for token in tokens:
        flags = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
        tokenizer["added_tokens"].append({"id": 320, "content": token, "special": special, **flags})
    (into / "tokenizer.json").write_text(json.dumps(tokenizer))
    return load_text_model(str(into), ServerConfig(served_model_name=("test",), **options))


@pytest.fixture(scope="module")
def speaking_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("speaking")
    return model_with(model_folder, folder, TEMPLATE, ("<think>", "</think>"), False)


@pytest.fixture
def grammars() -> Grammars:
    return Grammars()


@pytest.fixture
def app(engine: Any, speaking_model: TextModel, grammars: Grammars) -> Any:
    app = create_app(engine, ServerConfig(), speaking_model)
    app.state.server.grammars = grammars
    return app


@pytest.fixture(autouse=True)
def roomy(engine: Any) -> None:
    """Tools take more of the context than the other tests have."""
    engine.info = msgspec.structs.replace(engine.info, vocab_size=330, max_model_len=2000)


@pytest.fixture
def says(engine: Any, speaking_model: TextModel) -> Callable[..., int]:
    """says(text, size=1): the engine writes this, so many tokens an output, and ends. Returns how many it has."""

    def script(text: str, size: int = 1) -> int:
        ids = [*speaking_model.tokenizer.encode(text, False), 2]
        engine.script = lambda request: [ids[at : at + size] for at in range(0, len(ids), size)]
        return len(ids) - 1

    return script


def whole(client: Any, **body: Any) -> dict[str, Any]:
    answer = client.chat(**body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def events(client: Any, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **body},
        headers=REQUEST_ID,
    )
    assert answer.status_code == 200, answer.text
    assert answer.content.endswith(b"data: [DONE]\n\n")
    return [json.loads(event[6:]) for event in answer.text.split("\n\n")[:-2]]


def put_together(events: list[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """The message as an SDK accumulates it; checks what must come once."""
    message: dict[str, Any] = {"content": None, "reasoning": None, "tool_calls": []}
    reason = None
    for event in events:
        for choice in event["choices"]:
            reason = choice["finish_reason"] or reason
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for name in ("content", "reasoning"):
                if delta.get(name):
                    message[name] = (message[name] or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function" and call["function"]["arguments"] == ""
                    message["tool_calls"].append(
                        {"id": call["id"], "type": "function", "function": dict(call["function"])}
                    )
                else:
                    assert call["index"] == len(message["tool_calls"]) - 1 and call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                    message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call["function"] for call in calls]


# ---- the wire ----


def test_the_stream_of_a_call_is_exact(client: Any, says: Any) -> None:
    says(f"Well. {PARIS}", size=6)
    answer = client.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "tools": TOOLS}, headers=REQUEST_ID,
    )  # fmt: skip
    created = json.loads(answer.text.split("\n\n")[0][6:])["created"]
    head = (
        f'data: {{"id":"chatcmpl-abc","object":"chat.completion.chunk","created":{created},"model":"test","choices":['
    )
    text = re.sub(r"chatcmpl-tool-[0-9a-f]{32}", "ID", answer.text)
    deltas = [event.removeprefix(head) for event in text.split("\n\n")[:-2]]
    assert all(event.startswith(head) for event in text.split("\n\n")[:-2])

    def delta(fields: str) -> str:
        return f'{{"index":0,"delta":{fields},"logprobs":null,"finish_reason":null}}]}}'

    assert deltas[0] == delta('{"role":"assistant","content":""}')
    begin = deltas.index(
        delta(
            '{"tool_calls":[{"index":0,"id":"ID","type":"function","function":{"name":"get_weather","arguments":""}}]}'
        )
    )
    assert "".join(json.loads(d[: d.rindex("]}")])["delta"]["content"] for d in deltas[1:begin]) == "Well."
    pieces = deltas[begin + 1 : -1]
    assert len(pieces) > 1, "the arguments did not stream"
    arguments = ""
    for piece in pieces:
        found = json.loads(piece[: piece.rindex("]}")])["delta"]["tool_calls"][0]["function"]["arguments"]
        assert piece == delta(f'{{"tool_calls":[{{"index":0,"function":{{"arguments":{json.dumps(found)}}}}}]}}')
        arguments += found
    assert arguments == '{"city": "Paris"}'
    assert deltas[-1] == '{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls","stop_reason":null}]}'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_streamed_and_whole_are_the_same(client: Any, says: Any, size: int) -> None:
    says(f"<think>\nHm. \n</think>\n\nI look.\n{PARIS}\n{LOOK}", size)
    choice = whole(client, tools=TOOLS)
    message, reason = put_together(events(client, tools=TOOLS))
    assert (reason, choice["finish_reason"]) == ("tool_calls", "tool_calls")
    said = choice["message"]
    assert said["reasoning"] == said["reasoning_content"] == message["reasoning"] == "Hm."
    assert said["content"] == message["content"] == "I look."
    assert without_ids(said["tool_calls"]) == without_ids(message["tool_calls"]) == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'}, {"name": "search", "arguments": '{"q": "x"}'},
    ]  # fmt: skip
    ids = [call["id"] for call in [*said["tool_calls"], *message["tool_calls"]]]
    assert len(set(ids)) == 4 and all(re.fullmatch("chatcmpl-tool-[0-9a-f]{32}", id) for id in ids)


def test_content_is_null_beside_calls_and_calls_are_absent_beside_text(client: Any, says: Any) -> None:
    says(PARIS)
    assert whole(client, tools=TOOLS)["message"]["content"] is None
    says("Nothing to call.")
    choice = whole(client, tools=TOOLS)
    assert choice["message"]["content"] == "Nothing to call." and choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"] and "reasoning_content" not in choice["message"]


def test_usage_counts_the_tokens_of_reasoning(client: Any, says: Any, speaking_model: TextModel) -> None:
    says("<think>\nHm, hm.\n</think>\n\nYes.")
    usage = client.chat().json()["usage"]
    thought = speaking_model.tokenizer.encode("<think>\nHm, hm.\n</think>", False)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(thought)}
    last = events(client, stream_options={"include_usage": True})[-1]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(thought)}


def test_reasoning_that_the_template_opened_or_closed(client: Any, says: Any) -> None:
    says("Hm.\n</think>\n\nYes.")
    said = whole(client, chat_template_kwargs={"open": True})["message"]
    assert (said["reasoning"], said["content"]) == ("Hm.", "Yes.")
    says("Hm.")
    choice = whole(client, chat_template_kwargs={"open": True}, max_tokens=2)
    assert choice["message"]["reasoning"] and choice["message"]["content"] is None
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        said = whole(client, **off)["message"]
        assert (said["reasoning"], said["content"]) == (None, "Hm.")


def test_reasoning_may_be_left_out(client: Any, says: Any) -> None:
    says("<think>Hm.</think>Yes.")
    said = whole(client, include_reasoning=False)["message"]
    assert said["reasoning"] is None and "reasoning_content" not in said and said["content"] == "Yes."
    message, _ = put_together(events(client, include_reasoning=False))
    assert message["reasoning"] is None and message["content"] == "Yes."


@pytest.mark.parametrize("size", [1, 3, 100])
def test_reasoning_that_is_left_out_is_in_no_list_of_tokens(
    client: Any, says: Any, speaking_model: TextModel, size: int
) -> None:
    num_tokens = says("<think>Hm, hm.</think>Yes. STOP it", size)
    body = {"include_reasoning": False, "logprobs": True, "top_logprobs": 1, "return_token_ids": True, "stop": ["STOP"]}
    answer = client.chat(**body).json()
    (choice,) = answer["choices"]
    usage = answer["usage"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "Yes. STOP"
    assert speaking_model.tokenizer.core.decode(choice["token_ids"]) == "Yes. STOP"
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"] <= num_tokens
    told = [event["choices"][0] for event in events(client, **body)]
    entries = [entry for one in told for entry in (one["logprobs"] or {"content": []})["content"]]
    assert entries == choice["logprobs"]["content"]
    assert [token for one in told for token in one.get("token_ids", ())] == choice["token_ids"]
    metrics = client.get("/metrics").text
    generated = next(line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total"))
    assert float(generated.split()[-1]) == 2 * usage["completion_tokens"]


def test_stop_strings_count_in_the_content_only(client: Any, engine: Any, says: Any) -> None:
    says(f"<think>STOP it</think>Yes. STOP it. {PARIS}")
    choice = whole(client, tools=TOOLS, stop=["STOP"])
    assert choice["message"]["reasoning"] == "STOP it" and choice["message"]["content"] == "Yes. "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")
    says(PARIS.replace("Paris", "STOP") + " after")
    choice = whole(client, tools=TOOLS, stop=["STOP", "Well, whatever"])
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "STOP"}'


@pytest.mark.parametrize("stop", ["\n", "\n\n", ".\n"])
def test_a_stop_string_of_white_space_ends_the_answer_at_its_own_token(client: Any, says: Any, stop: str) -> None:
    """White space waits for what follows it only where that may be a call, and where it ends the answer not then."""
    thought, space = "<think>Hm.\n\n</think>\n\n", stop.lstrip(".")
    num_tokens = says(f"{thought}Yes.{space}")
    says(f"{thought}Yes.{space}No. No.\n\n")
    for shown, tools in ((False, None), (True, None), (False, TOOLS), (True, TOOLS)):
        answer = client.chat(stop=[stop], include_stop_str_in_output=shown, tools=tools).json()
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["message"]["content"] == f"Yes.{space}".removesuffix("" if shown else stop)
        assert choice["message"]["reasoning"] == "Hm." and answer["usage"]["completion_tokens"] == num_tokens
    assert whole(client)["message"]["content"] == f"Yes.{space}No. No.\n\n"
    says(f"{thought}{space}{PARIS}{space}{PARIS}")  # around calls it is none of the content's
    assert len(whole(client, stop=[stop], tools=TOOLS)["message"]["tool_calls"]) == 2
    says(f"Yes. {space}{PARIS}")
    assert whole(client, stop=["x"], tools=TOOLS)["message"]["content"] == "Yes."


def test_logprobs_and_token_ids_ride_along(client: Any, says: Any, speaking_model: TextModel) -> None:
    text = f"<think>Hm.</think>Yes. {PARIS}"
    says(text)
    ids = [*speaking_model.tokenizer.encode(text, False), 2]
    choice = whole(client, tools=TOOLS, logprobs=True, return_token_ids=True)
    assert choice["token_ids"] == ids and len(choice["logprobs"]["content"]) == len(ids)
    streamed = [e["choices"][0] for e in events(client, tools=TOOLS, logprobs=True, return_token_ids=True)]
    assert [token for choice in streamed for token in choice.get("token_ids", ())] == ids
    assert sum(len(choice["logprobs"]["content"]) for choice in streamed if choice["logprobs"]) == len(ids)
    assert put_together([{"choices": [choice]} for choice in streamed])[0]["content"] == "Yes."


def test_several_answers_are_read_each_by_itself(client: Any, engine: Any, speaking_model: TextModel) -> None:
    texts = [PARIS, "Text.", f"<think>Hm.</think>{LOOK}"]
    scripts = [[*speaking_model.tokenizer.encode(text, False), 2] for text in texts]
    engine.script = lambda request: [[token] for token in scripts[request.id % 3]]
    got = events(client, tools=TOOLS, n=3, temperature=1.0)
    by_index = [
        put_together([{"choices": [c for c in e["choices"] if c["index"] == i]} for e in got]) for i in range(3)
    ]
    assert [reason for _, reason in by_index] == ["tool_calls", "stop", "tool_calls"]
    assert [len(message["tool_calls"]) for message, _ in by_index] == [1, 0, 1]


def test_one_call_at_most(client: Any, says: Any, grammars: Grammars) -> None:
    says(PARIS + LOOK)
    for answer in (whole(client, tools=TOOLS, parallel_tool_calls=False)["message"],
                   put_together(events(client, tools=TOOLS, parallel_tool_calls=False))[0]):  # fmt: skip
        assert [call["function"]["name"] for call in answer["tool_calls"]] == ["get_weather"]


def test_garbage_and_truncated_calls(client: Any, says: Any, grammars: Grammars) -> None:
    grammars.refuses = lambda constraint: True  # nothing guards the arguments
    for text in ('<tool_call>{"name": "search", "arguments": {"q', '<tool_call>{"name": 5}</tool_call>', "<tool_call>",
                 '<tool_call>{"name": "search", "arguments": {"q": tru}}</tool_call>'):  # fmt: skip
        num_tokens = says(text)
        for limit, reason in ((None, "stop"), (num_tokens, "length")):
            choice = whole(client, tools=TOOLS, max_tokens=limit)
            assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
            assert put_together(events(client, tools=TOOLS, max_tokens=limit)) == (
                {"content": text, "reasoning": None, "tool_calls": []}, reason,
            )  # fmt: skip
            assert choice["finish_reason"] == reason
    assert grammars.held == 0


def test_a_guarded_call_that_is_cut_off_says_so(client: Any, says: Any) -> None:
    limit = says('<tool_call>\n{"name": "search", "arguments": {"q": "one two')
    choice = whole(client, tools=TOOLS, max_tokens=limit)
    message, reason = put_together(events(client, tools=TOOLS, max_tokens=limit))
    assert without_ids(choice["message"]["tool_calls"]) == without_ids(message["tool_calls"])
    assert without_ids(message["tool_calls"]) == [{"name": "search", "arguments": '{"q": "one two'}]
    assert reason == choice["finish_reason"] == "length"


def test_what_the_model_is_told(client: Any, engine: Any, speaking_model: TextModel, says: Any) -> None:
    says("Done.")

    def prompt(**body: Any) -> str:
        whole(client, **body)
        return speaking_model.tokenizer.core.decode(engine.submitted[-1].token_ids, skip_special_tokens=False)

    assert prompt(tools=TOOLS).startswith("get_weather;search;as")
    assert "get_weather" not in prompt(tools=TOOLS, tool_choice="none")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    history = [
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    told = '<think>Hm.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert told in prompt(tools=TOOLS, messages=history)
    history[1]["reasoning_content"] = history[1].pop("reasoning")  # type: ignore[assignment]
    assert told in prompt(tools=TOOLS, messages=history)


def test_a_request_without_either_is_not_read(client: Any, says: Any, grammars: Grammars) -> None:
    says(f"{PARIS}!")
    choice = whole(client, chat_template_kwargs={"enable_thinking": False})
    assert choice["message"]["content"] == f"{PARIS}!" and not grammars.asked
    assert "reasoning_content" not in choice["message"]


# ---- constraints ----


def test_what_each_choice_is_constrained_by(client: Any, says: Any, grammars: Grammars, engine: Any) -> None:
    says(PARIS)
    named = {"type": "function", "function": {"name": "get_weather"}}
    reasons = [
        whole(client, tools=TOOLS, tool_choice=choice)["finish_reason"] for choice in ("auto", "required", named)
    ]
    assert reasons == ["tool_calls", "tool_calls", "stop"]
    tags = [json.loads(constraint.text)["format"] for param, constraint in grammars.asked if param == "tools"]
    assert [tag["type"] for tag in tags] == ["dispatch", "sequence", "sequence"]
    assert "search" in json.dumps(tags[1]) and "search" not in json.dumps(tags[2])
    assert all(request.sampling.grammar == "key" for request in engine.submitted) and grammars.held == 0


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_bind_the_calls_and_not_the_prompt(
    client: Any, says: Any, grammars: Grammars, engine: Any, mode: str
) -> None:
    """The prefix cache knows the prompt with all of them."""
    says(PARIS)
    whole(client, tools=TOOLS, tool_choice="auto" if mode == "auto" else "required")
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    whole(client, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    first, second = engine.submitted
    assert list(first.token_ids) == list(second.token_ids)
    (_, all_of_them), (_, some) = grammars.asked
    assert json.loads(all_of_them.text)["format"]["type"] == json.loads(some.text)["format"]["type"]
    assert "search" in all_of_them.text
    assert "search" not in some.text and "get_weather" in some.text


def test_the_grammar_waits_for_the_reasoning(client: Any, says: Any, engine: Any, speaking_model: TextModel) -> None:
    says("<think>Hm.</think>" + PARIS)
    begin, end = speaking_model.tokenizer.encode("<think></think>", False)
    whole(client, tools=TOOLS, tool_choice="required")
    assert engine.submitted[-1].sampling.thinking == Thinking(begin, (end,), False, None)
    whole(client, tools=TOOLS, tool_choice="required", chat_template_kwargs={"open": True}, thinking_token_budget=7)
    assert engine.submitted[-1].sampling.thinking == Thinking(begin, (end,), True, 7)
    whole(client, tools=TOOLS, tool_choice="required", chat_template_kwargs={"enable_thinking": False})
    assert engine.submitted[-1].sampling.thinking is None
    whole(client, response_format={"type": "json_object"})
    assert engine.submitted[-1].sampling.thinking is not None and engine.submitted[-1].sampling.grammar == "key"
    whole(client)
    assert engine.submitted[-1].sampling.thinking is None and engine.submitted[-1].sampling.grammar is None


def test_schemas_that_no_grammar_follows_are_loosened_unless_strict(client: Any, says: Any, grammars: Grammars) -> None:
    says(PARIS)
    hard = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}, "required": ["x"]}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "hard", "parameters": hard}}
    whole(client, tools=[tool], tool_choice="required")
    assert "uniqueItems" not in grammars.asked[-1][1].text
    tool["function"]["strict"] = True
    whole(client, tools=[tool], tool_choice="required")
    assert "uniqueItems" in grammars.asked[-1][1].text
    grammars.refuses = lambda constraint: "city" in constraint.text
    whole(client, tools=[WEATHER])  # the second attempt knows names only
    assert len(grammars.asked) == 4 and '"get_weather' in json.loads(
        f'"{json.dumps(grammars.asked[-1][1].text)[1:-1]}"'
    )
    grammars.refuses = lambda constraint: True
    assert whole(client, tools=[WEATHER])["finish_reason"] == "tool_calls"
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for body in ({"tools": [strict]}, {"tools": [WEATHER], "tool_choice": "required"}):
        answer = client.chat(**body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


def test_bad_tools_are_refused(client: Any, new_client: Any) -> None:
    def function(**fields: Any) -> dict[str, Any]:
        return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}

    def allowed(**fields: Any) -> dict[str, Any]:
        set_of = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}], **fields}
        return {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": set_of}}

    deep: Any = {"type": "object"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"x": deep}}
    for body, param in (
        ({"tools": []}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{"type": "hammer"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        (function(name=None), "tools[0].function.name"),
        (function(name="a b"), "tools[0].function.name"),
        (function(name="x" * 200), "tools[0].function.name"),
        (function(parameters=[]), "tools[0].function.parameters"),
        (function(parameters={"type": "string"}), "tools[0].function.parameters"),
        (function(parameters={"x": "y" * 300_000}), "tools[0].function.parameters"),
        (function(strict=1), "tools[0].function.strict"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [WEATHER] * 2000}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        (allowed(mode="some"), "tool_choice.allowed_tools.mode"),
        (allowed(tools=[]), "tool_choice.allowed_tools.tools"),
        (allowed(tools=["get_weather"]), "tool_choice.allowed_tools.tools[0].function.name"),
        (allowed(tools=[{"type": "function", "function": {"name": "x"}}]), "tool_choice.allowed_tools.tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.mode"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": TOOLS, "min_tokens": 3}, "min_tokens"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ):  # fmt: skip
        answer = client.chat(**body)
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["error"]["param"] == param, (body, answer.text)
    answer = client.chat(**function(parameters=deep))
    assert answer.status_code in (200, 400)
    # the plain model's template knows neither tools nor reasoning
    answer = new_client().chat(tools=TOOLS)
    assert answer.status_code == 400 and "--tool-call-parser" in answer.json()["error"]["message"]
    answer = new_client().chat(thinking_token_budget=3)
    assert answer.status_code == 400 and "--reasoning-parser" in answer.json()["error"]["message"]


def test_openai_helper_puts_calls_together(serve: Any, says: Any) -> None:
    says(f"<think>Hm.</think>I look. {PARIS}\n{LOOK}", size=3)

    async def ask(port: int) -> None:
        import asyncio

        def run() -> Any:
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            with client.chat.completions.stream(
                model="test",
                messages=[{"role": "user", "content": "Hi"}],
                tools=TOOLS,  # type: ignore[arg-type, list-item]
            ) as stream:
                done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
                return done, stream.get_final_completion().choices[0]

        done, choice = await asyncio.to_thread(run)
        assert [(event.name, event.arguments, event.index) for event in done] == [
            ("get_weather", '{"city": "Paris"}', 0), ("search", '{"q": "x"}', 1),
        ]  # fmt: skip
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        assert [call.function.name for call in choice.message.tool_calls] == ["get_weather", "search"]

    serve(ask)


def test_a_model_whose_markers_are_special_tokens(
    engine: Any, model_folder: Path, tmp_path: Path, new_client: Any, grammars: Grammars
) -> None:
    template = "{% for t in tools or [] %}[AVAILABLE_TOOLS]{% endfor %}{{ '[TOOL_CALLS]' }}{{ '[ARGS]' }}"
    model = model_with(model_folder, tmp_path, template, ("[TOOL_CALLS]", "[ARGS]", "[OTHER]"), True)
    assert model.formats.tools is not None and model.formats.tools.name == "mistral_args"
    words = vocabulary(model, 330)
    tokens = unpack(words)
    assert [tokens[id] for id in words.markers] == [b"[TOOL_CALLS]", b"[ARGS]"]
    assert tokens[model.tokenizer.core.token_to_id("[OTHER]")] == b""
    client = new_client(model=model)
    client.app.state.server.grammars = grammars
    text = '[OTHER]Well.[TOOL_CALLS]search[ARGS]{"q": "x"}[OTHER]'
    ids = [*model.tokenizer.encode(text, False), 2]
    engine.script = lambda request: [[token] for token in ids]
    for said in (whole(client, tools=TOOLS)["message"], put_together(events(client, tools=TOOLS))[0]):
        assert said["content"] == "Well."
        assert without_ids(said["tool_calls"]) == [{"name": "search", "arguments": '{"q": "x"}'}]
        assert len(said["tool_calls"][0]["id"]) == 9
    assert grammars.asked[0][1].markers
    shown = whole(client, tools=TOOLS, skip_special_tokens=False)["message"]["content"]
    assert shown == "[OTHER]Well.[OTHER]"
    assert whole(client)["message"]["content"] == 'Well.search{"q": "x"}'  # as ever, where no tool is offered


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_TEMPLATE = (
    "{{ tools | tojson if tools else '' }}"
    "{% for m in messages %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}"
    "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% if m.content %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_channels_of_gpt_oss(
    engine: Any, model_folder: Path, tmp_path: Path, new_client: Any, grammars: Grammars, size: int
) -> None:
    model = model_with(model_folder, tmp_path, HARMONY_TEMPLATE, HARMONY, True)
    assert model.formats.tools is not None and model.formats.reasoning is not None
    assert (model.formats.tools.name, model.formats.reasoning.name) == ("openai", "openai_gptoss")
    client = new_client(model=model)
    client.app.state.server.grammars = grammars

    def says(text: str) -> None:
        ids = [*model.tokenizer.encode(text, False), 2]
        engine.script = lambda request: [ids[at : at + size] for at in range(0, len(ids), size)]

    says("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 12.")
    for said in (whole(client)["message"], put_together(events(client))[0]):
        assert (said["reasoning"], said["content"]) == ("Hm.", "It is 12.")
    assert engine.submitted[-1].sampling.thinking is None
    usage = client.chat().json()["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]

    says(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.search "
        '<|constrain|>json<|message|>{"q": "x"}'
    )
    for choice in (whole(client, tools=TOOLS), None):
        said, reason = (
            (choice["message"], choice["finish_reason"]) if choice else put_together(events(client, tools=TOOLS))
        )
        assert said["reasoning"] == "Hm." and said["content"] is None and reason == "tool_calls"
        assert without_ids(said["tool_calls"]) == [{"name": "search", "arguments": '{"q": "x"}'}]
    # The grammar of calls has the thoughts in it; another one begins with the text.
    assert engine.submitted[-1].sampling.grammar == "key" and engine.submitted[-1].sampling.thinking is None
    whole(client, response_format={"type": "json_object"})
    final = tuple(model.tokenizer.encode("<|channel|>final<|message|>", False))
    assert engine.submitted[-1].sampling.thinking == Thinking(-1, final, True, None)
    answer = client.chat(tools=TOOLS, thinking_token_budget=5)
    assert answer.status_code == 400 and "'thinking_token_budget' with 'tools'" in answer.json()["error"]["message"]

    call = {"id": "a", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "12"},
    ]
    whole(client, messages=history, tools=TOOLS)
    prompt = model.tokenizer.core.decode(engine.submitted[-1].token_ids, skip_special_tokens=False)
    assert "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.search<|channel|>" in prompt


def test_what_stands_around_an_answer_is_left_out_where_thinking_is_off(
    engine: Any, model_folder: Path, tmp_path: Path, new_client: Any
) -> None:
    template = "{{ messages[0].content.split('<answer>')[0] }}<think>\n\n</think>\n"
    model = model_with(model_folder, tmp_path, template, (), True)
    assert model.formats.reasoning is not None and model.formats.reasoning.name == "hunyuan_a13b"
    ids = [*model.tokenizer.encode("<answer>\nYes.\n</answer>", False), 2]
    engine.script = lambda request: [[token] for token in ids]
    assert whole(new_client(model=model))["message"]["content"] == "Yes."


def test_calls_of_kimi_have_their_own_ids(
    engine: Any, model_folder: Path, tmp_path: Path, new_client: Any, grammars: Grammars
) -> None:
    template = "{% for t in tools or [] %}{{ t }}<|tool_calls_section_begin|>{% endfor %}{{ messages[0].content }}"
    model = model_with(model_folder, tmp_path, template, (), True)
    client = new_client(model=model)
    client.app.state.server.grammars = grammars
    text = '<|tool_calls_section_begin|><|tool_call_begin|>functions.search:4<|tool_call_argument_begin|>{"q": "x"}'
    ids = [*model.tokenizer.encode(text + "<|tool_call_end|><|tool_calls_section_end|>", False), 2]
    engine.script = lambda request: [[token] for token in ids]
    for said in (whole(client, tools=TOOLS)["message"], put_together(events(client, tools=TOOLS))[0]):
        assert said["tool_calls"] == [
            {"id": "functions.search:4", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
        ]


def test_ids_in_the_history_are_those_that_the_template_accepts(speaking_model: TextModel) -> None:
    tokenizer = speaking_model.tokenizer.with_template(
        "{{ messages[0].tool_calls[0].id }}/{{ messages[1].tool_call_id }}"
    )
    tokenizer.history_id = lambda id: id.upper()
    call = {"id": "abc", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "abc"}]
    assert tokenizer.render(messages, {}) == "ABC/ABC" and call["id"] == "abc"


def test_without_a_known_format_calls_are_json(
    new_client: Any, engine: Any, say: Any, grammars: Grammars, text_model: TextModel
) -> None:
    client = new_client(
        model=replace(text_model, tokenizer=text_model.tokenizer.with_template("{{ tools }}{{ messages }}"))
    )
    client.app.state.server.grammars = grammars
    engine.script = say('[{"name": "search", "parameters": {"q": 1}}]')
    choice = whole(client, tools=TOOLS, tool_choice="required", max_tokens=60)
    assert without_ids(choice["message"]["tool_calls"]) == [{"name": "search", "arguments": '{"q": 1}'}]


def test_options_name_the_formats(model_folder: Path, tmp_path: Path) -> None:
    def formats(**options: Any) -> tuple[str | None, str | None]:
        formats = model_with(model_folder, tmp_path, TEMPLATE, (), False, **options).formats
        return formats.tools and formats.tools.name, formats.reasoning and formats.reasoning.name

    assert formats() == ("hermes", "think")
    assert formats(tool_call_parser="mistral", reasoning_parser="deepseek_r1") == ("mistral", "think")
    assert formats(tool_call_parser="none", reasoning_parser="none") == (None, None)
    assert formats(enable_auto_tool_choice=False, enable_reasoning=False) == (None, None)
    with pytest.raises(
        ConfigError, match="--tool-call-parser is 'x': choose one of auto, none, apertus, cohere, deepseek_v3"
    ):
        formats(tool_call_parser="x")


def test_an_answer_that_goes_in_circles_is_read_too(client: Any, says: Any) -> None:
    says("<think>Hm.</think>" + "Yes. " * 40)
    choice = whole(client, tools=TOOLS, repetition_detection={"max_pattern_size": 20, "min_count": 4})
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
    assert choice["message"]["reasoning"] == "Hm." and 4 <= choice["message"]["content"].count("Yes.") <= 6


def test_logs_have_the_calls(
    says: Any, new_client: Any, speaking_model: TextModel, grammars: Grammars, caplog: Any
) -> None:
    client = new_client(model=speaking_model, enable_log_outputs=True)
    client.app.state.server.grammars = grammars
    says(f"Well. {PARIS}")
    with caplog.at_level("INFO", logger="vserve.request"):
        whole(client, tools=TOOLS)
    assert 'Well. get_weather{"city": "Paris"}' in caplog.text
