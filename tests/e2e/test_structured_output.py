"""Structured output over HTTP: the demo model and random weights, streamed or not, alone and in company."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

CAPITAL = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
    "required": ["capital", "sure"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]


@pytest.fixture(scope="module")
def random_server(serve: Callable[..., Any], tiny_model: Callable[..., Any]) -> Iterator[str]:
    """Random weights say anything: only the grammar makes sense of it. Few blocks, small steps: requests are cut into
    chunks and preempted."""
    options = ["--max-num-batched-tokens", "32", "--max-num-seqs", "8", "--num-gpu-blocks-override", "40"]
    with serve(str(tiny_model("qwen3", vocab_size=330)), "--served-model-name", "tiny", *options) as server:
        # While it loads is when the engine may hold its interpreter's lock for libraries: not once streams are there.
        (engine,) = server.engine_pids()
        mapped = Path(f"/proc/{engine}/maps").read_text()
        assert "libxgrammar" in mapped and "/llguidance/" in mapped
        yield server.url


@pytest.fixture(scope="module")
def demo(demo_server: Any) -> str:
    return demo_server.url


def chat(url: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION, **body}, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(url: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION, **body}, timeout=240)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def stream(url: str, **body: Any) -> tuple[list[str], list[str | None]]:
    """Texts and finish reasons, by choice."""
    num = body.get("n", 1)
    texts, reasons = [""] * num, [None] * num
    body = {"messages": QUESTION, "stream": True, **body}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=240) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
                    reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    return texts, reasons


def test_the_demo_model_answers_in_the_shape_asked_for(demo: str) -> None:
    for temperature in (0, 1):
        answer = chat(demo, response_format=json_schema(CAPITAL), temperature=temperature, seed=5, max_tokens=100)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), CAPITAL)


@pytest.mark.slow
def test_the_first_structured_output_does_not_wait_for_the_compiler(
    serve: Callable[..., Any], until: Callable[..., None], is_gone: Callable[[int], bool], slowness: float,
    settles_within: Callable[[float, Callable[[], float]], bool],
) -> None:  # fmt: skip
    with serve("--served-model-name", "demo", env={"VSERVE_WARM_GRAMMARS": "true"}) as server:
        task = Path(f"/proc/{server.process.pid}/task/{server.process.pid}")

        def seconds(**body: Any) -> float:
            started = time.monotonic()
            chat(server.url, max_tokens=4, temperature=0, **body)
            return time.monotonic() - started

        until(lambda: "structured outputs no longer wait" in "".join(server.stderr))
        children = (task / "children").read_text()
        assert len(children.split()) == 2, "the engine and the compiler"
        seconds()
        plain = min(seconds() for _ in range(3))
        # Somebody else may have the cores, and the compiler leaves them to others: another schema is as new to it.
        titles = iter(range(10))
        assert settles_within(
            plain + 0.5 * slowness,
            lambda: seconds(response_format=json_schema(CAPITAL | {"title": f"{next(titles)}"})),
        )
        assert (task / "children").read_text() == children, "nobody was started for it"
    assert all(map(is_gone, map(int, children.split())))


def test_streamed_and_whole_are_the_same(demo: str) -> None:
    body = {"response_format": json_schema(CAPITAL), "temperature": 0, "max_tokens": 100}
    texts, reasons = stream(demo, **body)
    assert texts == [chat(demo, **body)["choices"][0]["message"]["content"]] and reasons == ["stop"]


def test_each_way_to_ask(demo: str) -> None:
    def text(**body: Any) -> str:
        choice = chat(demo, max_tokens=60, temperature=1, seed=5, **body)["choices"][0]
        assert choice["finish_reason"] == "stop", choice
        return choice["message"]["content"]

    assert text(structured_outputs={"choice": ["Lyon", "Rome"]}) in ("Lyon", "Rome")
    assert text(guided_choice=["Lyon", "Rome"]) in ("Lyon", "Rome")
    assert re.fullmatch(r"[A-Z]{2}-\d{3}", text(structured_outputs={"regex": r"[A-Z]{2}-\d{3}"}))
    assert re.fullmatch(r"[A-Z]{2}-\d{3}", text(guided_regex=r"[A-Z]{2}-\d{3}"))
    assert text(structured_outputs={"grammar": 'root ::= "x" [0-9] "y"'}) in {f"x{digit}y" for digit in range(10)}
    assert text(structured_outputs={"grammar": 'start: "x" /[0-9]/ "y"'}) in {f"x{digit}y" for digit in range(10)}
    choice = chat(demo, guided_json=CAPITAL, temperature=0, max_tokens=100)["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), CAPITAL)
    compact = text(structured_outputs={"json": {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2},
                                       "disable_any_whitespace": True})  # fmt: skip
    assert compact == "[1, 1]"
    answer = chat(demo, response_format={"type": "json_object"}, temperature=0, max_tokens=60)["choices"][0]
    assert answer["finish_reason"] == "stop" and isinstance(json.loads(answer["message"]["content"]), dict)
    completion = httpx.post(
        f"{demo}/v1/completions", json={"prompt": "x", "max_tokens": 30, "structured_outputs": {"choice": ["a b", "c"]}}
    ).json()
    assert completion["choices"][0]["text"] in ("a b", "c")


@pytest.mark.slow
def test_several_answers_differ_and_each_is_valid(random_server: str) -> None:
    schema = {"type": "array", "items": {"enum": [1, "a", None]}, "minItems": 1, "maxItems": 6}
    body = {"n": 4, "temperature": 2, "seed": 3, "max_tokens": 200, "response_format": json_schema(schema)}
    texts, reasons = stream(random_server, **body)
    assert reasons == ["stop"] * 4
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert len(set(texts)) > 1


def test_ignore_eos_and_min_tokens_end_where_the_grammar_does(demo: str) -> None:
    for more in ({"ignore_eos": True}, {"stop": ["never"]}):
        choice = chat(demo, structured_outputs={"choice": ["yes"]}, max_tokens=30, **more)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("yes", "stop")


def test_bad_ones_are_refused_and_nobody_else_notices(demo: str) -> None:
    before = chat(demo, temperature=0)["choices"][0]["message"]["content"]
    deep: Any = {}
    for _ in range(200):
        deep = {"items": deep}
    hostile = [
        {"response_format": json_schema({"type": "array", "uniqueItems": True})},
        {"response_format": json_schema({"$ref": "http://127.0.0.1:1/x"})},
        {"response_format": json_schema(deep)},
        {"response_format": json_schema({"type": "string", "pattern": "("})},
        {"structured_outputs": {"regex": "(?<=a)b"}},
        {"structured_outputs": {"regex": "(a{1,1000}){1,1000}{2}"}},
        {"structured_outputs": {"grammar": "root ::= root"}},
        {"structured_outputs": {"grammar": "x" * 1_000_000}},
        {"structured_outputs": {"choice": []}},
        {"guided_json": "{"},
    ]
    for body in hostile:
        error = refusal(demo, **body)
        assert error["type"] == "invalid_request_error" and error["param"].split(".")[0] in body, error
        assert len(error["message"]) < 400 and "/project/" not in error["message"], error
    bottomless = '{"items":' * 10_000 + "{}" + "}" * 10_000
    body = '{"messages": [{"role": "user", "content": "x"}], "guided_json": ' + bottomless + "}"
    answer = httpx.post(f"{demo}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    # hard, but not wrong
    hard = [{"structured_outputs": {"regex": f"(a{{1,{most}}}){{1,1000}}"}} for most in (1000, 999, 998)]
    url = f"{demo}/v1/chat/completions"
    # On a busy machine the compiler, which leaves the cores to others, may not get as far in its time; not each time.
    assert any(httpx.post(url, json={"messages": QUESTION, "max_tokens": 20, **body}).is_success for body in hard)
    backtracking = json_schema({"type": "string", "pattern": "^(a+)+$"})
    assert chat(demo, max_tokens=20, response_format=backtracking)["choices"]
    assert chat(demo, temperature=0)["choices"][0]["message"]["content"] == before
    assert httpx.get(f"{demo}/health").status_code == 200


@pytest.mark.slow
def test_many_at_once_with_and_without_grammars(random_server: str) -> None:
    """Chunked, preempted and in mixed company: what stops is valid, and greedy answers are those of a lone request."""
    schemas = [
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 12},
        {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": -9}}, "required": ["a"]},
        {"enum": ["one", "two two", None, 4]},
        {"type": "string", "maxLength": 12},
    ]

    async def main() -> None:
        client = AsyncOpenAI(base_url=f"{random_server}/v1", api_key="none", timeout=240, max_retries=0)

        async def ask(index: int) -> tuple[int, str, str]:
            form = json_schema(schemas[index % 5]) if index % 5 < 4 else {"type": "text"}
            answer = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": f"{index} " * 20}], response_format=form,  # type: ignore[arg-type]
                max_tokens=64, temperature=0 if index % 2 else 1.5, seed=index,
            )  # fmt: skip
            return index, answer.choices[0].message.content or "", answer.choices[0].finish_reason

        alone = {index: (await ask(index))[1] for index in range(1, 10, 2)}
        answers = await asyncio.gather(*(ask(index) for index in range(40)))
        stopped = 0
        for index, text, reason in answers:
            if index % 5 < 4 and reason == "stop":
                jsonschema.validate(json.loads(text), schemas[index % 5])
                stopped += 1
            if index in alone:
                assert text == alone[index]
        assert stopped > 16
        metrics = httpx.get(f"{random_server}/metrics").text
        assert re.search(r"num_preemptions_total\{.*\} [1-9]", metrics), "nobody was preempted: the test is too kind"

    asyncio.run(main())


@pytest.mark.slow
def test_leaving_early_leaves_nothing_behind(random_server: str) -> None:
    body = {"messages": QUESTION, "stream": True, "max_tokens": 300, "structured_outputs": {"regex": "[a-f]{250}"}}
    for _ in range(5):
        with httpx.stream("POST", f"{random_server}/v1/chat/completions", json=body, timeout=240) as answer:
            next(answer.iter_lines())
    choice = chat(random_server, structured_outputs={"regex": "[a-f]{25}"}, max_tokens=60)["choices"][0]
    assert re.fullmatch("[a-f]{25}", choice["message"]["content"])


def test_who_has_left_the_compiler_keeps_nobody_waiting(demo: str, attacks: Any) -> None:
    """24 grammars that take as long as one may, whose clients have gone: none is begun but the two that run already."""

    def compiled() -> float:
        return attacks.sum_of(httpx.get(f"{demo}/metrics").text, "vllm:grammar_compile_seconds_count")

    def bomb(number: int) -> bytes:
        grammar = "root ::= " + " ".join(f'("{number}x{i}")?' for i in range(8000))
        body = {"messages": QUESTION, "max_tokens": 4, "structured_outputs": {"grammar": grammar}}
        return attacks.post(json.dumps(body).encode(), path="/v1/chat/completions")

    chat(demo, response_format=json_schema(CAPITAL))
    before, begun = compiled(), time.monotonic()
    clients = [attacks.connect(demo) for _ in range(24)]
    for number, client in enumerate(clients):
        client.sendall(bomb(number))
    time.sleep(1)  # all wait, or two are compiled
    for client in clients:
        client.close()
    rounds = 1 + (time.monotonic() - begun) // 5  # of two each: 5 s is what a compilation may take
    renamed = {**CAPITAL, "properties": {**CAPITAL["properties"], "town": {"type": "string", "maxLength": 5}}}
    answer = chat(demo, response_format=json_schema(renamed))["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(answer), renamed)
    assert 1 <= compiled() - before <= 1 + 2 * rounds


_LEAVES = st.sampled_from(
    [
        {"type": "boolean"}, {"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 50}, {"enum": ["a", 7]},
        {"type": "string", "maxLength": 4}, {"type": "string", "pattern": "^[xyz]{1,4}$"}, {"const": [1, {"k": None}]},
    ]
)  # fmt: skip
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(
            lambda properties: {"type": "object", "properties": properties, "required": sorted(properties)[:1]},
            st.dictionaries(st.sampled_from(["a", "b", "long name"]), inner, min_size=1, max_size=3),
        ),
    ),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=_SCHEMAS, seed=st.integers(0, 99))
def test_whatever_stops_is_valid(schema: Any, seed: int, demo: str, random_server: str) -> None:
    for url in (demo, random_server):
        texts, reasons = stream(
            url, n=2, seed=seed, temperature=1, max_tokens=150, response_format=json_schema(schema),
            messages=[{"role": "user", "content": "Hello!"}],
        )  # fmt: skip
        for text, reason in zip(texts, reasons, strict=True):
            assert reason in ("stop", "length")
            if reason == "stop":
                jsonschema.validate(json.loads(text), schema)


class Capital(BaseModel):
    capital: str


def test_openai_parse(demo: str) -> None:
    client = OpenAI(base_url=f"{demo}/v1", api_key="none", timeout=240)
    answer = client.chat.completions.parse(
        model="demo", messages=QUESTION, response_format=Capital, max_tokens=200, temperature=0  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, Capital)
