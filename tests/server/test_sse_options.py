"""Streams with everything that requests may ask for beside text, byte by byte."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from vserve.engine.link.sampling_params import SamplingParams
from vserve.server.generation.choice import Prompt
from vserve.server.generation.generation import Generation

MESSAGES = [{"role": "user", "content": "Hi"}]
OPEN = 'data: {"id":"%s-abc","object":"%s","created":0,"model":"test","choices":['
CHAT = OPEN % ("chatcmpl", "chat.completion.chunk")
TEXT = OPEN % ("cmpl", "text_completion")
DONE = "data: [DONE]\n\n"


def stream(client: Any, path: str, body: dict[str, Any]) -> str:
    """The transcript, with the time of day taken out."""
    response = client.post(path, {"stream": True, **body}, headers={"x-request-id": "abc"})
    assert response.status_code == 200, response.text
    times = set(re.findall(r'"created":(\d+),"model"', response.text))
    assert len(times) == 1
    return response.text.replace(f'"created":{times.pop()},"model"', '"created":0,"model"')


def chat(client: Any, **body: Any) -> str:
    return stream(client, "/v1/chat/completions", {"messages": MESSAGES, **body})


def complete(client: Any, **body: Any) -> str:
    return stream(client, "/v1/completions", {"prompt": "Hello", **body})


def events(head: str, *choices: str, tail: str = "") -> str:
    return "".join(f"{head}{choice}]{tail}}}\n\n" for choice in choices)


def usage(num_prompt: int, num_output: int, cached: int = 4) -> str:
    return (
        f'{{"prompt_tokens":{num_prompt},"total_tokens":{num_prompt + num_output},"completion_tokens":{num_output},'
        f'"prompt_tokens_details":{{"cached_tokens":{cached}}},"completion_tokens_details":{{"reasoning_tokens":0}}}}'
    )


def chat_entry(token: str, top: str) -> str:
    raw = ",".join(str(byte) for byte in token.encode())
    return f'{{"token":"{token}","logprob":-0.5,"bytes":[{raw}],"top_logprobs":[{top}]}}'


def chat_top(token: str, value: float = -0.5) -> str:
    return chat_entry(token, "").replace(',"top_logprobs":[]', "").replace("-0.5", str(value))


def test_chat_logprobs(client: Any) -> None:
    content = '{"index":0,"delta":{"content":"%s"},"logprobs":{"content":[%s],"refusal":null},"finish_reason":null}'
    assert chat(client, logprobs=True, top_logprobs=1) == (
        events(
            CHAT,
            '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
            content % ("Hello", chat_entry("Hello", chat_top("Hello"))),
            content % (" world", chat_entry(" world", chat_top(" world"))),
            content % ("!", chat_entry("!", chat_top("!"))),
            content % ("", chat_entry("<|im_end|>", chat_top("<|im_end|>"))),
            '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}',
        )
        + DONE
    )


def test_completion_logprobs(client: Any) -> None:
    content = (
        '{"index":0,"text":"%s","logprobs":{"text_offset":[%d],"token_logprobs":[-0.5],"tokens":["%s"],'
        '"top_logprobs":[{"%s":-0.5}]},"finish_reason":null,"stop_reason":null}'
    )
    last = '{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}'
    assert complete(client, logprobs=1, max_tokens=2) == (
        events(TEXT, content % ("Hello", 0, "Hello", "Hello"), content % (" world", 5, " world", " world"), last) + DONE
    )


def test_tokens_as_token_ids(client: Any, text_model: Any) -> None:
    hello = text_model.tokenizer.encode("Hello", False)[0]
    raw = complete(client, logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)
    assert f'"tokens":["token_id:{hello}"],"top_logprobs":[{{"token_id:{hello}":-0.5}}]' in raw
    raw = chat(client, logprobs=True, top_logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)
    # the bytes are still those of the text
    assert f'{{"token":"token_id:{hello}","logprob":-0.5,"bytes":[72,101,108,108,111],' in raw


def test_echo(client: Any) -> None:
    text = '{"index":0,"text":"%s","logprobs":null,"finish_reason":null,"stop_reason":null}'
    last = '{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}'
    assert complete(client, prompt="Hello world", echo=True, max_tokens=1) == (
        events(TEXT, text % "Hello world", text % "Hello", last) + DONE
    )
    assert complete(client, prompt="Hello world", echo=True, max_tokens=0) == (
        events(TEXT, text % "Hello world", last) + DONE
    )


def test_echo_with_logprobs(client: Any, text_model: Any) -> None:
    """Each choice begins with its prompt, and its offsets go on where the prompt's end."""
    prompt = text_model.tokenizer.encode("Hello world!", False)
    echoed = (
        '{"index":%d,"text":"Hello world!","logprobs":{"text_offset":[0,5,11],"token_logprobs":[null,-1.0,-2.0],'
        '"tokens":["Hello"," world","!"],"top_logprobs":[null,{"#":-0.25," world":-1.0},{"#":-0.25,"!":-2.0}]},'
        '"finish_reason":null,"stop_reason":null}'
    )
    assert len(prompt) == 3
    output = (
        '{"index":%d,"text":"Hello","logprobs":{"text_offset":[12],"token_logprobs":[-0.5],"tokens":["Hello"],'
        '"top_logprobs":[{"Hello":-0.5}]},"finish_reason":null,"stop_reason":null}'
    )
    last = '{"index":%d,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}'
    raw = complete(client, prompt=[prompt, prompt], echo=True, logprobs=1, max_tokens=1)
    for index in range(2):
        own = [event + "\n\n" for event in raw.split("\n\n") if f'"choices":[{{"index":{index},' in event]
        assert "".join(own) == events(TEXT, echoed % index, output % index, last % index)
    assert raw.count("\n\n") == 7
    assert complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=0) == (
        events(TEXT, echoed % 0, last % 0) + DONE
    )


def test_a_server_that_names_tokens_by_id(new_client: Any) -> None:
    client = new_client(return_tokens_as_token_ids=True)
    tokens = lambda **body: client.complete(logprobs=0, max_tokens=1, **body).json()["choices"][0]["logprobs"]["tokens"]  # noqa: E731
    (named,) = tokens()
    assert re.fullmatch(r"token_id:\d+", named)
    assert tokens(return_tokens_as_token_ids=False) == ["Hello"]


def test_a_server_that_always_tells_the_usage(new_client: Any, client: Any) -> None:
    forced = new_client(enable_force_include_usage=True)
    for ask in (chat, complete):
        wanted = ask(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert ask(forced) == ask(forced, stream_options={"include_usage": False}) == wanted
        assert '"usage":{' in wanted and '"usage":{' not in ask(client)
    assert "usage" in forced.chat().json()  # not streamed, as always


def test_prompt_logprobs(client: Any, text_model: Any) -> None:
    prompt = text_model.tokenizer.encode("Hello world", False)
    table = (
        f'[null,{{"{prompt[1]}":{{"logprob":-1.0,"rank":2,"decoded_token":" world"}},'
        '"5":{"logprob":-0.25,"rank":1,"decoded_token":"#"}}]'
    )
    first = '{"index":0,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_logprobs":%s}'
    text = '{"index":0,"text":"Hello","logprobs":null,"finish_reason":null,"stop_reason":null}'
    last = '{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}'
    assert complete(client, prompt=prompt, prompt_logprobs=1, max_tokens=1) == (
        events(TEXT, first % table, text, last) + DONE
    )
    raw = chat(client, prompt_logprobs=0, max_tokens=1, n=2, temperature=1).split("\n\n")
    role = '{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
    assert raw[0].startswith(CHAT + role % 0 + '],"prompt_logprobs":[null,{"')
    assert raw[1] == CHAT + role % 1 + "]}"  # once is enough


def test_choices(client: Any, engine: Any) -> None:
    engine.script = lambda request: [[50], [51], [2]]
    raw = chat(client, n=2, temperature=1, stream_options={"include_usage": True})
    lines = raw.split("\n\n")
    role = '{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
    assert lines[:2] == [CHAT + role % index + '],"usage":null}' for index in range(2)]
    for index in range(2):
        own = [line for line in lines[2:] if f'"choices":[{{"index":{index},' in line]
        text = '{"index":%d,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null}'
        last = '{"index":%d,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}'
        choices = [text % (index, "P"), text % (index, "Q"), last % index]
        assert own == [CHAT + choice + '],"usage":null}' for choice in choices]
    num_prompt = len(engine.submitted[0].token_ids)
    assert "\n\n".join(lines[-3:]) == CHAT + '],"usage":' + usage(num_prompt, 6) + "}\n\n" + DONE


@pytest.mark.parametrize("include", [True, False, None])
def test_usage_in_every_chunk(client: Any, engine: Any, include: bool | None) -> None:
    options = {"include_usage": include, "continuous_usage_stats": True}
    raw = complete(client, prompt=[5, 6, 7], max_tokens=2, stream_options=options)
    text = '{"index":0,"text":"%s","logprobs":null,"finish_reason":null,"stop_reason":null}'
    last = '{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}'
    first, second = ("",) * 2 if include is False else (',"usage":' + usage(3, n) for n in (1, 2))
    assert raw == (
        events(TEXT, text % "Hello", tail=first)
        + events(TEXT, text % " world", last, tail=second)
        + (events(TEXT, "", tail=second) if include else "")
        + DONE
    )


def test_nothing_is_counted_before_it_is_said(client: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for raw in (
        chat(client, max_tokens=2, stream_options=options, n=2),
        complete(client, max_tokens=2, stream_options=options, echo=True),
    ):
        counts = [int(count) for count in re.findall(r'"completion_tokens":(\d+)', raw)]
        totals = [int(total) for total in re.findall(r'"total_tokens":(\d+)', raw)]
        prompts = [int(prompt) for prompt in re.findall(r'"prompt_tokens":(\d+)', raw)]
        num_choices = 2 if "chat" in raw else 1
        assert counts[:num_choices] == [0] * num_choices and counts[num_choices] == 1
        assert counts == sorted(counts) and counts[-1] == 2 * num_choices
        assert totals == [prompt + count for prompt, count in zip(prompts, counts, strict=True)]


def test_token_ids(client: Any, engine: Any, text_model: Any) -> None:
    hello = text_model.tokenizer.encode("Hello", False)[0]
    raw = complete(client, prompt=[5, 6], max_tokens=1, return_token_ids=True, echo=True)
    text = '{"index":0,"text":"%s","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":%s}'
    prompt = text_model.tokenizer.core.decode([5, 6])
    assert raw == (
        events(
            TEXT,
            text % (prompt, '[],"prompt_token_ids":[5,6]'),
            text % ("Hello", f"[{hello}]"),
            '{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}',
        )
        + DONE
    )


def test_chat_that_goes_on_from_its_last_message(client: Any) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    delta = '{"index":0,"delta":{%s},"logprobs":null,"finish_reason":null}'
    assert chat(client, messages=messages, echo=True, continue_final_message=True, max_tokens=1) == (
        events(
            CHAT,
            delta % '"role":"assistant","content":""',
            delta % '"content":"Well, "',
            delta % '"content":"Hello"',
            '{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","stop_reason":null}',
        )
        + DONE
    )


def test_the_usage_so_far_does_not_look_at_the_choices(app: Any, engine: Any) -> None:
    """Told with every event, of up to thousands of choices, it was the square of their number."""

    async def main() -> None:
        state = app.state.server
        prompts = [Prompt([5, 6, 7], SamplingParams(max_tokens=8)), Prompt([5], SamplingParams(max_tokens=2))]
        generation = Generation(engine, state.metrics, state.model.tokenizer, prompts, arrival=0.0, n=3)
        await generation.submit()
        num_events = 0
        async for _ in generation.deltas():
            num_events += 1
            choices, generation.choices = generation.choices, []
            told = generation.usage()
            generation.choices = choices
            num_output = sum(choice.num_tokens for choice in choices)
            assert (told["completion_tokens"], told["total_tokens"]) == (num_output, 4 + num_output)
            cached = sum(choice.num_cached_tokens for choice in choices[::3])
            assert told["prompt_tokens_details"] == {"cached_tokens": cached}
        assert num_events == 3 * 4 + 3 * 2 and told["completion_tokens"] == 18 and cached == 8
        generation.close()

    asyncio.run(main())
