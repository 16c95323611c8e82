"""Parameters beyond the plain ones: what the engine is asked, and what the client reads."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from vserve.server.errors import bad_request
from vserve.server.grammar.constraint import Constraint


class Grammars:
    """GrammarService's face."""

    def __init__(self) -> None:
        self.acquired: list[Constraint] = []
        self.open: list[str] = []

    async def acquire(self, constraint: Constraint, param: str, owner: str) -> str:
        if "bad" in constraint.text:
            raise bad_request("The regular expression is bad.", param)
        self.acquired.append(constraint)
        self.open.append(f"key-{len(self.acquired)}")
        return self.open[-1]

    def release(self, key: str) -> None:
        self.open.remove(key)


@pytest.fixture
def grammars(app: Any) -> Grammars:
    app.state.server.grammars = Grammars()
    return app.state.server.grammars


def sampling(engine: Any) -> Any:
    return engine.submitted[-1].sampling


# ---- the prompt ----


def test_truncated_prompts(client: Any, engine: Any) -> None:
    def kept(length: int, **body: Any) -> list[int]:
        response = client.complete(prompt=list(range(5, 5 + length)), **body)
        assert response.status_code == 200, response.text
        return engine.submitted[-1].token_ids

    assert kept(10, truncate_prompt_tokens=3) == [12, 13, 14]
    assert kept(2, truncate_prompt_tokens=3) == [5, 6]
    assert kept(200, truncate_prompt_tokens=-1, max_tokens=20) == list(range(205 - 108, 205))
    assert kept(200, truncate_prompt_tokens=-1) == list(range(205 - 112, 205))  # 16 by default
    assert kept(128, truncate_prompt_tokens=127, max_tokens=1) == list(range(6, 133))
    assert kept(10, truncate_prompt_tokens=3, truncation_side="left") == [12, 13, 14]
    assert kept(10, truncate_prompt_tokens=3, truncation_side="right") == [5, 6, 7]
    assert kept(200, truncate_prompt_tokens=-1, max_tokens=20, truncation_side="right") == list(range(5, 113))
    assert kept(10, truncation_side="right") == list(range(5, 15))  # nothing to cut off
    assert client.chat(truncate_prompt_tokens=4, max_tokens=1).json()["usage"]["prompt_tokens"] == 4


def test_echo(client: Any, engine: Any, text_model: Any) -> None:
    def text(**body: Any) -> tuple[str, int, str]:
        answer = client.complete(max_tokens=1, **body).json()
        choice = answer["choices"][0]
        return choice["text"], answer["usage"]["completion_tokens"], choice["finish_reason"]

    assert text(prompt="Say it", echo=True) == ("Say itHello", 1, "length")
    ids = text_model.tokenizer.encode("Say it", False)
    assert text(prompt=ids, echo=True)[0] == "Say itHello"
    assert text(prompt="Say it", echo=True, truncate_prompt_tokens=1)[0] == text_model.tokenizer.core.decode(
        ids[-1:]
    ) + "Hello"  # fmt: skip
    for prompt in ("<|im_start|>Say it", [1, *ids]):
        assert text(prompt=prompt, echo=True)[0] == "<|im_start|>Say itHello"
        assert text(prompt=prompt, echo=True, skip_special_tokens=False)[0] == "<|im_start|>Say itHello"
    answer = client.complete(prompt=["a", "b"], n=2, temperature=1, echo=True, max_tokens=0, seed=1).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "a", "b", "b"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 4
    assert answer["usage"]["completion_tokens"] == 0 and sampling(engine).max_tokens == 1


def test_echo_with_logprobs(client: Any, engine: Any, text_model: Any) -> None:
    body = {"prompt": [1, *text_model.tokenizer.encode("Hello world", False)], "echo": True, "logprobs": 1}
    choice = client.complete(max_tokens=1, **body).json()["choices"][0]
    assert choice["text"] == "<|im_start|>Hello worldHello"
    assert choice["logprobs"] == {
        "text_offset": [0, 12, 17, 23],
        "token_logprobs": [None, -1.0, -2.0, -0.5],
        "tokens": ["<|im_start|>", "Hello", " world", "Hello"],
        "top_logprobs": [None, {"#": -0.25, "Hello": -1.0}, {"#": -0.25, " world": -2.0}, {"Hello": -0.5}],
    }
    assert (sampling(engine).logprobs, sampling(engine).prompt_logprobs) == (1, 1)
    only = client.complete(max_tokens=0, **body).json()["choices"][0]["logprobs"]
    assert only == {name: values[:-1] for name, values in choice["logprobs"].items()}
    assert (sampling(engine).logprobs, sampling(engine).prompt_logprobs) == (None, 1)
    for prompt in (body["prompt"], "<|im_start|>Hello world"):
        for skip in (True, False):
            more = {"prompt": prompt, "skip_special_tokens": skip, "max_tokens": 0}
            shown = client.complete(**body | more).json()["choices"][0]
            assert shown["text"] == "<|im_start|>Hello world" and shown["logprobs"]["text_offset"] == [0, 12, 17]
    named = client.complete(max_tokens=0, return_tokens_as_token_ids=True, **body).json()["choices"][0]["logprobs"]
    assert named["tokens"][0] == "token_id:1" and "token_id:5" in named["top_logprobs"][1]


def test_prompt_logprobs(client: Any, engine: Any, text_model: Any) -> None:
    ids = text_model.tokenizer.encode("Hello world", False)
    table = [
        None,
        {
            str(ids[1]): {"logprob": -1.0, "rank": 2, "decoded_token": " world"},
            "5": {"logprob": -0.25, "rank": 1, "decoded_token": "#"},
        },
    ]
    answer = client.complete(prompt=[ids, [7]], prompt_logprobs=1, n=2, temperature=1, max_tokens=1).json()
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [table, table, [None], [None]]
    assert [request.sampling.prompt_logprobs for request in engine.submitted] == [1, None] * 2  # once a prompt
    bare = client.complete(prompt=ids, prompt_logprobs=0, max_tokens=1).json()["choices"][0]["prompt_logprobs"]
    assert list(bare[1]) == [str(ids[1])]
    answer = client.chat(prompt_logprobs=1, max_tokens=1).json()
    assert len(answer["prompt_logprobs"]) == len(engine.submitted[-1].token_ids)
    # an echo shows as many as `logprobs` asks for, prompt_logprobs as many as it does
    answer = client.complete(prompt=ids, prompt_logprobs=2, echo=True, logprobs=0, max_tokens=1).json()["choices"][0]
    assert sampling(engine).prompt_logprobs == 2 and len(answer["prompt_logprobs"][1]) == 3
    assert answer["logprobs"]["top_logprobs"] == [None, {" world": -1.0}, {"Hello": -0.5}]


def test_prompt_logprobs_of_the_whole_vocabulary(client: Any, engine: Any) -> None:
    """-1, where --max-logprobs allows it."""
    refused = client.complete(prompt_logprobs=-1)
    assert refused.status_code == 400 and "this server allows at most 20" in refused.json()["error"]["message"]
    assert not engine.submitted
    engine.info = msgspec.structs.replace(engine.info, max_logprobs=-1)
    for extra in ({}, {"echo": True, "logprobs": 1}):
        choice = client.complete(prompt=[6, 7, 8], prompt_logprobs=-1, max_tokens=1, **extra).json()["choices"][0]
        assert sampling(engine).prompt_logprobs == engine.info.vocab_size
        # the scripted engine knows two likeliest tokens; the token itself stands before them
        assert [None if row is None else list(row) for row in choice["prompt_logprobs"]] == [
            None, ["7", "5", "6"], ["8", "5", "6"],
        ]  # fmt: skip
    engine.info = msgspec.structs.replace(engine.info, vocab_size=1 << 19)
    error = client.complete(prompt=[6, 7, 8], prompt_logprobs=-1, max_tokens=1).json()["error"]
    assert error["param"] == "prompt_logprobs" and "at most 1048576 are allowed" in error["message"]
    assert client.complete(prompt=[6, 7], prompt_logprobs=-1, max_tokens=1).status_code == 200


def test_minus_infinity_in_a_prompt(client: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vserve.engine.link.plan import TokenLogprobs

    never = TokenLogprobs(float("-inf"), 300, [5], [float("-inf")])
    monkeypatch.setattr(type(engine), "_prompt_logprobs", staticmethod(lambda request: [never]))
    choice = client.complete(prompt=[6, 7], prompt_logprobs=1, echo=True, logprobs=1).json()["choices"][0]
    assert {entry["logprob"] for entry in choice["prompt_logprobs"][1].values()} == {-9999.0}
    assert choice["logprobs"]["token_logprobs"][:2] == [None, -9999.0]


def test_streamed_equals_not_streamed(client: Any, engine: Any, text_model: Any) -> None:
    prompt = [[1, *text_model.tokenizer.encode("Say it again", False)], [7]]
    for extra in (
        {"echo": True},
        {"echo": True, "logprobs": 2},
        {"prompt_logprobs": 2, "logprobs": 0},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"echo": True, "stop": "world", "logprobs": 1},
    ):
        body = {"prompt": prompt, "n": 2, "temperature": 1, "seed": 3, **extra}
        whole = client.complete(**body).json()["choices"]
        raw = client.complete(stream=True, **body).text
        chunks = [json.loads(line[6:])["choices"][0] for line in raw.split("\n\n")[:-2]]
        for choice in whole:
            own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
            assert "".join(chunk["text"] for chunk in own) == choice["text"]
            assert own[-1]["finish_reason"] == choice["finish_reason"]
            assert own[0].get("prompt_logprobs") == choice["prompt_logprobs"]
            for name, values in (choice["logprobs"] or {}).items():
                assert [value for chunk in own if chunk["logprobs"] for value in chunk["logprobs"][name]] == values


# ---- what may be sampled ----


def test_allowed_tokens_and_bad_words(client: Any, engine: Any, text_model: Any) -> None:
    client.complete(allowed_token_ids=[7, 5, 7, 2], min_tokens=1)
    assert sampling(engine).allowed_token_ids == (7, 5, 2)
    client.complete(bad_words=["world", " world", "\n", "Hello world"])
    words = ["world", " world", "\n", "Hello world"]
    world, spaced, newline, hello = (tuple(text_model.tokenizer.encode(word, False)) for word in words)
    # A space before "Hello" is a token of its own: forbidding what follows it is enough.
    assert text_model.tokenizer.encode(" Hello world", False)[1:] == list(hello)
    assert sampling(engine).bad_words == (world, spaced, newline, hello)
    client.complete()
    assert sampling(engine).allowed_token_ids is None and sampling(engine).bad_words == ()


@pytest.mark.parametrize("delay", [0.0, -1.0])  # a token an output, and all of them in one
def test_repetition_ends_an_answer(client: Any, engine: Any, delay: float) -> None:
    engine.script, engine.delay = lambda request: [[50], *[[60], [61]] * 20], delay
    watch = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
    answer = client.complete(max_tokens=41, repetition_detection=watch, return_token_ids=True, logprobs=0).json()
    choice = answer["choices"][0]
    assert choice["token_ids"] == [50, 60, 61, 60, 61, 60, 61] and len(choice["logprobs"]["tokens"]) == 7
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
    assert choice["text"] == "PZ[Z[Z[" and answer["usage"]["completion_tokens"] == 7
    assert engine.num_open == 0
    for other in ({"max_pattern_size": 1, "min_count": 2}, {"max_pattern_size": 4, "min_count": 30}, None):
        choice = client.complete(max_tokens=41, repetition_detection=other).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    late = client.complete(max_tokens=41, min_tokens=11, repetition_detection=watch).json()
    assert late["usage"]["completion_tokens"] == 12
    stopped = client.complete(max_tokens=41, repetition_detection=watch, stop="[Z").json()["choices"][0]
    assert stopped["stop_reason"] == "[Z"


def test_repetition_against_the_plain_way() -> None:
    import random

    from vserve.engine.link.messages import RequestOutput
    from vserve.engine.link.sampling_params import SamplingParams
    from vserve.server.generation.choice import Prompt, Repetition, TextOptions

    def repeats(tokens: list[int], watch: Repetition) -> bool:
        return any(
            len(tokens) >= size * watch.count and tokens[-size:] * watch.count == tokens[-size * watch.count :]
            for size in range(watch.shortest, watch.longest + 1)
        )

    rng = random.Random(5)
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(40)]
        watch = Repetition(rng.randint(1, 3), rng.randint(3, 6), rng.randint(2, 5))
        expected = next((end for end in range(1, 41) if repeats(tokens[:end], watch)), 40)
        options = TextOptions(detokenize=False, repetition=watch)
        choice = options.choice(0, Prompt([1], SamplingParams(max_tokens=99)), None, None)  # type: ignore[arg-type]
        for token in tokens:
            if choice.finish_reason is None:
                choice.feed(RequestOutput(0, [token]))
        assert choice.num_tokens == expected
        assert (choice.stop_reason == "repetition") == (expected < 40 or repeats(tokens, watch))


# ---- the form of the output ----

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
CANONICAL = '{"type":"object","properties":{"b":{},"a":{}}}'


@pytest.mark.parametrize(
    "body, expected",
    [
        ({"response_format": {"type": "json_object"}}, Constraint("json_object", "")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
         Constraint("json", CANONICAL)),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
         Constraint("structural_tag", '{"type":"structural_tag","format":{"type":"any_text"}}')),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint("json", CANONICAL)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA, indent=1), "disable_any_whitespace": True}},
         Constraint("json", CANONICAL, any_whitespace=False)),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?", "disable_additional_properties": True}},
         Constraint("json", CANONICAL, whitespace_pattern=" ?", additional_properties=False)),
        ({"structured_outputs": {"regex": "a+", "json_object": False, "choice": None}}, Constraint("regex", "a+")),
        ({"structured_outputs": {"choice": ["yes", "né"]}}, Constraint("choice", '["yes","né"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Constraint("grammar", 'root ::= "a"')),
        ({"structured_outputs": {"json_object": True}}, Constraint("json_object", "")),
        ({"structured_outputs": {"structural_tag": '{"type": "structural_tag"}'}},
         Constraint("structural_tag", '{"type":"structural_tag"}')),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"}, Constraint("json", CANONICAL)),
        ({"guided_regex": "a+"}, Constraint("regex", "a+")),
        ({"guided_choice": ["a"], "guided_whitespace_pattern": None}, Constraint("choice", '["a"]')),
        ({"guided_grammar": "start: A"}, Constraint("grammar", "start: A")),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " *"}, Constraint("json", CANONICAL,
                                                                                 whitespace_pattern=" *")),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_constraints(client: Any, engine: Any, grammars: Grammars, body: Any, expected: Constraint) -> None:
    assert client.chat(**body).status_code == 200
    assert grammars.acquired == [expected] and not grammars.open
    assert sampling(engine).grammar == "key-1"


def test_grammars_are_released_however_an_answer_ends(client: Any, engine: Any, grammars: Grammars, say: Any) -> None:
    body = {"response_format": {"type": "json_object"}}
    assert client.chat(stream=True, n=2, temperature=1, **body).text.endswith("[DONE]\n\n")
    assert {request.sampling.grammar for request in engine.submitted} == {"key-1"} and not grammars.open
    engine.script, engine.fail_with = (lambda request: [[50]]), "NaN"
    assert client.chat(**body).status_code == 500 and not grammars.open
    engine.dead, engine.ready = "gone", True  # dies between the check and the request
    assert client.chat(**body).status_code >= 500 and not grammars.open
    assert len(grammars.acquired) == 3


def test_what_does_not_compile_is_refused(client: Any, engine: Any, grammars: Grammars) -> None:
    response = client.chat(guided_regex="bad")
    assert response.status_code == 400 and response.json()["error"]["param"] == "guided_regex"
    assert client.chat(max_tokens=10**6, guided_regex="a").status_code == 400  # before anything is compiled
    assert not engine.submitted and not grammars.acquired


def test_plain_requests_load_no_grammar(client: Any, app: Any) -> None:
    assert client.chat(response_format={"type": "text"}).status_code == 200
    assert "grammars" not in vars(app.state.server)


# ---- ids ----


def test_request_id_of_the_body(client: Any) -> None:
    def ids(headers: dict[str, str] | None = None, **body: Any) -> tuple[str, str]:
        response = client.post("/v1/completions", {"prompt": "x", **body}, headers=headers)
        return response.headers["x-request-id"], response.json()["id"]

    assert ids(request_id="mine") == ("mine", "cmpl-mine")
    assert ids({"x-request-id": "theirs"}, request_id="mine") == ("theirs", "cmpl-theirs")
    assert ids(request_id="a\r\nset-cookie: x=1") == ("aset-cookie:x1", "cmpl-aset-cookie:x1")
    assert len(ids(request_id="\r\n")[0]) == 32
    streamed = client.post("/v1/completions", {"prompt": "x", "request_id": "mine", "stream": True})
    assert streamed.headers["x-request-id"] == "mine" and '"id":"cmpl-mine"' in streamed.text


def test_equal_ids_at_once(serve: Any, engine: Any) -> None:
    """Each client gets its own answer."""
    import asyncio

    import httpx

    engine.script = lambda request: [[token] for token in [*request.token_ids, 2]]
    engine.delay = 0.01

    async def test(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            bodies = [{"prompt": [token] * 3, "request_id": "same"} for token in range(50, 60)]
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [chr(30 + i) * 3 for i in range(50, 60)]
        assert {answer.json()["id"] for answer in answers} == {"cmpl-same"}

    serve(test)


def test_a_cancelled_generation_ends_in_order(app: Any, client: Any, engine: Any, say: Any) -> None:
    engine.script = say("one two three four five six")
    text: list[str] = []

    async def work() -> list[tuple[str | None, Any]]:
        from vserve.server.generation.generation import Generation
        from vserve.server.generation.sampling import resolve
        from vserve.server.wire.requests import CompletionRequest

        state = app.state.server
        request = CompletionRequest.model_validate({"prompt": "x", "n": 2, "temperature": 1})
        prompts = resolve(request, [[5]], state.model, engine.info, None)
        generation = Generation(engine, state.metrics, state.model.tokenizer, prompts, arrival=0.0, n=2)
        await generation.submit()
        async for _, delta in generation.deltas():
            text.append(delta.text)
            generation.cancel()
        generation.close()
        return [(choice.finish_reason, choice.stop_reason) for choice in generation.choices]

    assert client.run(work()) == [("stop", "abort")] * 2
    assert engine.num_open == 0 and len(engine.aborted) == 2 and "six" not in "".join(text)


def test_what_has_ended_before_the_cancel_keeps_its_end(app: Any, client: Any, engine: Any) -> None:
    """A slow reader has not read it yet. The token that ended it is no text, now as before."""
    engine.delay, engine.script = -1, lambda request: [[50], [51], [2]]

    import asyncio

    async def work() -> tuple[str, list[tuple[str | None, Any]]]:
        from vserve.server.generation.choice import TextOptions
        from vserve.server.generation.generation import Generation
        from vserve.server.generation.sampling import resolve
        from vserve.server.wire.requests import CompletionRequest

        state = app.state.server
        request = CompletionRequest.model_validate({"prompt": "x"})
        prompts = resolve(request, [[5]], state.model, engine.info, None)
        text = TextOptions(skip_special_tokens=False)
        generation = Generation(engine, state.metrics, state.model.tokenizer, prompts, arrival=0.0, text=text)
        await generation.submit()
        while engine.num_open:
            await asyncio.sleep(0)
        generation.cancel()
        said = [delta.text async for _, delta in generation.deltas()]
        generation.close()
        return "".join(said), [(choice.finish_reason, choice.stop_reason) for choice in generation.choices]

    assert client.run(work()) == ("PQ", [("stop", None)])
