"""A long conversation made short: what the model is asked, what comes back, and a response that goes on from it."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.responses import CompactedResponse

from vserve.server.dialects.responses.compaction import PROMPT, VERSION, compaction_item, compaction_message
from vserve.server.dialects.responses.items import item_messages
from vserve.server.errors import ApiError

TALK: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "Weather in  Paris?\n"},
    {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": '{"city": "Paris"}'},
    {"type": "function_call_output", "call_id": "a", "output": "sun"},
    {"role": "assistant", "content": "Sun."},
    {"role": "user", "content": [{"type": "input_text", "text": "And Rome?"}]},
    {"role": "assistant", "content": "Rain."},
]
SUMMARY = "Paris has sun, Rome has rain: ☂."


def compact(client: Any, input: Any = TALK, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/responses/compact", {"input": input, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(output: list[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] for item in output if item["type"] == "message"]


def test_what_the_model_is_asked_and_what_comes_back(thinking: Any) -> None:
    num_tokens = thinking.says(SUMMARY)
    answer = compact(thinking.client, instructions="Be brief.", seed=7)
    assert thinking.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>developer\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nWeather in  Paris?\n<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
        "<|im_end|>\n<|im_start|>tool\nsun<|im_end|>\n"
        "<|im_start|>assistant\nSun.<|im_end|>\n<|im_start|>user\nAnd Rome?<|im_end|>\n"
        f"<|im_start|>assistant\nRain.<|im_end|>\n<|im_start|>user\n{PROMPT}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    submitted = thinking.engine.submitted[-1]
    assert submitted.sampling.seed == 7
    *users, item = answer.pop("output")
    id, usage = answer.pop("id"), answer.pop("usage")
    assert id.startswith("resp_") and answer.pop("created_at") > 0 and answer == {"object": "response.compaction"}
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(submitted.token_ids), num_tokens)
    assert texts(users) == ["Weather in  Paris?\n", "And Rome?"] and {user["role"] for user in users} == {"user"}
    assert all(user["content"][0]["type"] == "input_text" for user in users)
    assert item["type"] == "compaction" and item["id"] == id.replace("resp_", "cmp_")
    assert compaction_message(item, "input[2]")["content"].endswith(f"\n\n{SUMMARY}")
    assert thinking.client.get(f"/v1/responses/{id}").status_code == 404, "it is not stored"


def test_a_question_that_waits_is_one_message_with_the_request(thinking: Any) -> None:
    compact(thinking.client, "Hi")
    assert thinking.prompt.startswith(f"<|im_start|>user\nHi\n\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("max_model_len, limit", [(2000, None), (60_000, 4096)])
def test_a_summary_is_bounded(thinking: Any, max_model_len: int, limit: int | None) -> None:
    thinking.engine.info = msgspec.structs.replace(thinking.engine.info, max_model_len=max_model_len)
    compact(thinking.client)
    submitted = thinking.engine.submitted[-1]
    assert submitted.sampling.max_tokens == (limit or max_model_len - len(submitted.token_ids))


def test_a_summary_has_room_or_is_not_begun(thinking: Any) -> None:
    compact(thinking.client, "")
    rest = len(thinking.engine.submitted[-1].token_ids)
    compact(thinking.client, "é" * ((2000 - 2000 // 16 - rest) // 2))
    answer = thinking.client.post("/v1/responses/compact", {"input": "é" * ((2000 - 2000 // 16 - rest) // 2 + 1)})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "input", "context_length_exceeded")
    assert "you requested 125 output tokens" in error["message"] and len(thinking.engine.submitted) == 2


def test_a_response_goes_on_from_it(thinking: Any) -> None:
    client = thinking.client
    thinking.says(SUMMARY)
    output = compact(client)["output"]
    thinking.says("Yes.")
    asked = client.post("/v1/responses", {"input": [*output, {"role": "user", "content": "Umbrella?"}]}).json()
    begin = (
        "<|im_start|>user\nWeather in  Paris?\n\n\nAnd Rome?<|im_end|>\n"
        f"<|im_start|>assistant\nThe conversation until here, in short:\n\n{SUMMARY}<|im_end|>\n"
        "<|im_start|>user\nUmbrella?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert thinking.prompt == begin
    listed = client.get(f"/v1/responses/{asked['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["type"] for item in listed] == ["message", "message", "compaction", "message"]
    assert listed[2]["id"].startswith("cmp_") and listed[2]["encrypted_content"] == output[2]["encrypted_content"]
    # A second time, from what was stored: the model sees the first summary, and the second stands in for both.
    thinking.says("Take one to Rome.")
    again = compact(client, None, previous_response_id=asked["id"])
    assert thinking.prompt.startswith(f"{begin}Yes.<|im_end|>\n<|im_start|>user\n{PROMPT}")
    *users, item = again["output"]
    assert texts(users) == ["Weather in  Paris?\n", "And Rome?", "Umbrella?"]
    assert compaction_message(item, "")["content"].endswith("Take one to Rome.")


def test_only_what_is_said_is_the_summary(thinking: Any) -> None:
    thinking.says("<think>Long thoughts</think>Short.")
    item = compact(thinking.client, chat_template_kwargs={"enable_thinking": True})["output"][-1]
    said = compaction_message(item, "")["content"]
    assert said.endswith("\n\nShort.") and "thoughts" not in said
    thinking.says("\n ")
    failed = thinking.client.post("/v1/responses/compact", {"input": TALK})
    assert failed.status_code == 422 and "wrote no summary" in failed.json()["error"]["message"]


def test_a_summary_that_was_cancelled_is_none(new_thinking: Any, serve: Any) -> None:
    thinking = new_thinking()
    thinking.says("and so on " * 500)
    thinking.engine.delay = 0.005

    async def test(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1") as http:
            asking = asyncio.create_task(
                http.post("/responses/compact", json={"input": TALK}, headers={"x-request-id": "mine"})
            )
            while thinking.engine.num_outputs < 8:
                await asyncio.sleep(0.005)
            assert (await http.post("/requests/mine/cancel")).status_code == 200
            error = (await asking).json()["error"]
            assert (asking.result().status_code, error["code"]) == (422, "no_summary") and "cancelled" in error[
                "message"
            ]
        assert thinking.engine.num_open == 0

    serve(test, thinking.app)


@pytest.mark.parametrize(
    "body, param, code, says",
    [
        ({}, "input", "missing_required_parameter", "previous_response_id"),
        ({"input": []}, "input", "missing_required_parameter", "nothing to compact"),
        ({"input": 7}, "input", "invalid_type", "string or a list"),
        ({"input": "Hi", "previous_response_id": "resp_other"}, "previous_response_id", "previous_response_not_found",
         "resp_other"),
        ({"input": "Hi", "stream": True}, "stream", "unsupported_parameter", "stream"),
        ({"input": "Hi", "model": "other"}, "model", "model_not_found", "other"),
    ],
)  # fmt: skip
def test_refusals(thinking: Any, body: dict[str, Any], param: str, code: str, says: str) -> None:
    answer = thinking.client.post("/v1/responses/compact", body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code) and says in error["message"]
    assert not thinking.engine.submitted


def test_a_model_that_does_not_generate(new_client: Any, engine: Any) -> None:
    engine.info = msgspec.structs.replace(engine.info, tasks=("embed",))
    answer = new_client().post("/v1/responses/compact", {"input": "Hi"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_task"


def carried(**changes: Any) -> str:
    content = json.loads(base64.urlsafe_b64decode(compaction_item("cmp_1", SUMMARY)["encrypted_content"]))
    return base64.urlsafe_b64encode(json.dumps(content | changes).encode()).decode()


@pytest.mark.parametrize(
    "content",
    [
        "", "gAAAAABpM0Yj-AAA", "%%%", "é", carried()[:-8], carried(summary="Another"), carried(summary=7),
        carried(sha256=""), base64.urlsafe_b64encode(b"[1]").decode(),
        base64.urlsafe_b64encode(b"\xff").decode(),
        base64.urlsafe_b64encode(b"[" * 5000).decode(), carried(summary="\ud800"),
    ],
)  # fmt: skip
def test_damaged_items_are_named(thinking: Any, content: str) -> None:
    item = {"type": "compaction", "id": "cmp_1", "encrypted_content": content}
    answer = thinking.client.post("/v1/responses", {"input": [{"role": "user", "content": "Hi"}, item]})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "input[1].encrypted_content" and "damaged" in error["message"]


def test_other_versions_and_missing_text_are_named() -> None:
    assert compaction_message({"encrypted_content": carried()}, "input[0]")["role"] == "assistant"
    with pytest.raises(ApiError, match=f"another version than {VERSION}"):
        compaction_message({"encrypted_content": carried(version=VERSION + 1, sha256=None)}, "input[0]")
    with pytest.raises(ApiError, match=r"Missing required parameter: 'input\[0\].encrypted_content'"):
        item_messages([{"type": "compaction"}], "input", [].append)


def test_the_openai_client(new_thinking: Any, serve: Any) -> None:
    thinking = new_thinking()

    async def test(port: int) -> None:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            thinking.says("Sun.")
            first = await client.responses.create(model="test", input="Weather?")
            thinking.says(SUMMARY)
            short = await client.responses.compact(model="test", input="And Rome?", previous_response_id=first.id)
            assert type(short) is CompactedResponse and short.object == "response.compaction"
            assert [item.type for item in short.output] == ["message", "message", "compaction"]
            assert short.usage.total_tokens == short.usage.input_tokens + short.usage.output_tokens
            thinking.says("Take an umbrella.")
            again = await client.responses.create(
                model="test", input=[*short.output, {"role": "user", "content": "What to take?"}]
            )
            assert again.output_text == "Take an umbrella."
            assert "user\nWeather?\n\nAnd Rome?<|im_end|>" in thinking.prompt and SUMMARY in thinking.prompt
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.compact(model="test")
            assert refused.value.param == "input"

    serve(test, thinking.app)
