"""The OpenAI SDK and curl against a real `vserve` process with the demo model."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time

import httpx
import openai
import pytest

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def sdk(demo_server):
    return openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0)


def metrics(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    totals: dict[str, float] = {}
    for name, value in re.findall(r"^([a-z_:]+)(?:\{.*\})? ([0-9.e+-]+)$", text, re.M):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def settled(url: str, name: str, value: float) -> dict[str, float]:
    """The metrics, once `name` has reached `value`: a client may see its answer a moment before it is counted."""
    end = time.monotonic() + 60
    while (now := metrics(url))[name] != value:
        assert time.monotonic() < end, f"{name} is {now[name]}, expected {value}"
        time.sleep(0.05)
    return now


def test_sync_answer_and_stream_agree(sdk):
    options = dict(model="demo", messages=QUESTION, temperature=0, max_tokens=24)
    whole = sdk.chat.completions.create(**options)
    message = whole.choices[0].message
    assert message.role == "assistant" and message.content
    chunks = list(sdk.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == message.content
    assert [c.choices[0].delta.role for c in chunks if c.choices and c.choices[0].delta.role] == ["assistant"]
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_async_streams_run_side_by_side(demo_server):
    async def one(client, i):
        stream = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": f"Count from {i} to {i + 5}"}], temperature=0,
            max_tokens=32, stream=True,
        )  # fmt: skip
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key="x", max_retries=0) as client:
            alone = [await one(client, i) for i in range(4)]
            return alone, await asyncio.gather(*(one(client, i % 4) for i in range(12)))

    alone, together = asyncio.run(run())
    assert together == alone * 3


def test_completions_n_stop_and_logprobs(sdk):
    answer = sdk.completions.create(
        model="demo", prompt=["one two", "three"], n=2, max_tokens=8, temperature=1.0, seed=5, logprobs=2
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
        assert "".join(choice.logprobs.tokens).startswith(choice.text[:1])
    again = sdk.completions.create(
        model="demo", prompt=["one two", "three"], n=2, max_tokens=8, temperature=1.0, seed=5
    )
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    chat = sdk.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    for entry in chat.choices[0].logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_errors_reach_the_sdk_as_its_exceptions(sdk):
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(model="nobody", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        sdk.completions.create(model="demo", prompt=[5] * 100_000)
    assert long.value.code == "context_length_exceeded"
    assert "maximum context length is" in long.value.message
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.chat.completions.create(model="demo", messages=QUESTION, temperature=-1)
    assert wrong.value.param == "temperature"


def test_models_and_version(sdk, demo_server):
    models = sdk.models.list().data
    assert models[0].id == "demo" and sdk.models.retrieve("demo").id == "demo"
    assert httpx.get(f"{demo_server.url}/health").status_code == 200
    assert httpx.get(f"{demo_server.url}/version").json()["version"]


def test_curl_transcript_byte_by_byte(demo_server):
    body = json.dumps(dict(model="demo", messages=QUESTION, temperature=0, max_tokens=16, stream=True,
                           stream_options={"include_usage": True}))  # fmt: skip
    out = subprocess.run(
        ["curl", "-sN", "-D", "-", f"{demo_server.url}/v1/chat/completions", "-H", "content-type: application/json",
         "-d", body], capture_output=True, check=True, timeout=240,
    ).stdout  # fmt: skip
    head, _, stream = out.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"content-type: text/event-stream; charset=utf-8" in head.lower()
    events = stream.split(b"\n\n")
    assert events[-1] == b"" and events[-2] == b"data: [DONE]"
    assert b"\r" not in stream
    chunks = []
    for event in events[:-2]:
        assert event.startswith(b"data: {") and b"\n" not in event
        chunks.append(json.loads(event[6:]))
    first, *middle, last, usage = chunks
    base = {"id": first["id"], "object": "chat.completion.chunk", "created": first["created"], "model": "demo"}

    def expected(delta, finish_reason):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return base | {"choices": [choice], "usage": None}

    assert first == expected({"role": "assistant", "content": ""}, None)
    for chunk in middle:
        assert chunk == expected({"content": chunk["choices"][0]["delta"]["content"]}, None)
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    assert last["choices"][0]["delta"] == {}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] >= len(middle)


def test_metrics_reconcile_with_what_clients_counted(sdk, demo_server):
    before = metrics(demo_server.url)
    prompts = completions = 0
    for i in range(5):
        answer = sdk.completions.create(
            model="demo",
            prompt=f"again and again {i}",
            max_tokens=10 + i,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        prompts += answer.usage.prompt_tokens
        completions += answer.usage.completion_tokens
    assert completions == sum(range(10, 15))
    after = settled(
        demo_server.url, "vllm:generation_tokens_total", before["vllm:generation_tokens_total"] + completions
    )
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == prompts
    assert after["vllm:request_success_total"] - before["vllm:request_success_total"] == 5
    assert "vllm:num_preemptions_total" in after
    assert after["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_closing_the_connection_ends_the_request(demo_server, attacks, stream):
    """The running count falls to zero long before the request would have ended by itself."""
    settled(demo_server.url, "vllm:num_requests_running", 0)
    before = metrics(demo_server.url)
    body = dict(model="demo", prompt="go on", max_tokens=1900, temperature=0, ignore_eos=True, stream=stream, n=1)
    with attacks.connect(demo_server.url) as sock:
        sock.sendall(attacks.post(json.dumps(body | {"logprobs": 20}).encode()))  # which takes its time
        if stream:
            assert sock.recv(1 << 10)
        settled(demo_server.url, "vllm:num_requests_running", 1)
    now = settled(demo_server.url, "vllm:num_requests_running", 0)
    assert now["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 1900
    assert now["vllm:request_success_total"] == before["vllm:request_success_total"] + 1  # as an abort
    assert now["vllm:kv_cache_usage_perc"] == 0
    generated = now["vllm:generation_tokens_total"]
    time.sleep(0.3)
    assert metrics(demo_server.url)["vllm:generation_tokens_total"] == generated
