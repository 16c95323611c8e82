"""No request holds the event loop: the worst that each limit allows, while somebody watches the loop."""

from __future__ import annotations

import asyncio
import gc
import json
import struct
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from vserve.engine.link.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    RequestOutput,
    StepOutputs,
    unpack_tokens,
)
from vserve.engine.link.plan import TokenLogprobs
from vserve.engine.link.sampling_params import ALL
from vserve.engine.options.config import EngineConfig
from vserve.server.app import create_app
from vserve.server.client.engine_client import EngineClient
from vserve.server.options.config import ServerConfig

HOLD = 0.050  # seconds of the event loop's own time, without a look at its sockets
CONTEXT = 32_768
MAX_NUM_SEQS = 1024
MOST = 5 * MAX_NUM_SEQS  # choices that may run and wait at once
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HIDDEN_SIZE = 512
VECTOR = struct.pack(f"<{HIDDEN_SIZE}f", *(1 / (i + 3) for i in range(HIDDEN_SIZE)))
INPUTS = 2048  # that one request may have


class Engine:
    """The other end of a real EngineClient: so many requests run, each gets one token a step; the rest wait."""

    def __init__(self, info: Any) -> None:
        self.client = EngineClient(EngineConfig("test"))
        self.client.info, self.client.ready, self.client._send = info, True, self.take
        self.open: dict[int, list[Any]] = {}  # id → [tokens left, sampling, prompt]

    def take(self, message: Any) -> None:
        # What a socket would do, too: encoding is the API process's work.
        msgspec.msgpack.encode(message)
        if isinstance(message, AddRequest):
            for i in range(message.n):
                sampling = message.sampling.of_choice(i)
                self.open[message.id + i] = [sampling.max_tokens, sampling, message.prompt]
        elif isinstance(message, AbortRequests):
            for id in message.ids:
                self.open.pop(id, None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            outputs = []
            for id in list(self.open)[: self.client.info.max_num_seqs]:
                entry = self.open[id]
                left, sampling, prompt = entry
                first = prompt is not None
                if sampling.pooling is not None:
                    num_rows = len(unpack_tokens(prompt)) if sampling.pooling.kind == ALL else 1
                    outputs.append(RequestOutput(id, [], "stop", embedding=VECTOR * num_rows))
                    del self.open[id]
                    continue
                entry[0], entry[2] = left - 1, None
                scores = None
                if first and sampling.prompt_logprobs is not None:
                    scores = [row(sampling.prompt_logprobs)] * (len(unpack_tokens(prompt)) - 1)
                outputs.append(
                    RequestOutput(
                        id, [50], "length" if left == 1 else None, None,
                        None if sampling.logprobs is None else [row(sampling.logprobs)],
                        0 if first else None, time.monotonic() if first else None, prompt_logprobs=scores,
                    )
                )  # fmt: skip
                if left == 1:
                    del self.open[id]
            await asyncio.sleep(0)
            if outputs:
                self.client._receive(StepOutputs(outputs, EngineStats(num_blocks=10)))


def row(k: int) -> TokenLogprobs:
    return TokenLogprobs(-1.0, 3, list(range(100, 100 + k)), [-0.5] * k)


class Watch:
    """The longest that the event loop was held, in CPU seconds of its thread, whatever else the machine does."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        while True:
            started = time.thread_time()
            await asyncio.sleep(0)
            self.longest = max(self.longest, time.thread_time() - started)


def long_prompt(length: int = CONTEXT - 100) -> list[int]:
    return [5 + i % 300 for i in range(length)]


STOPS = [f"{i:03d}" * 340 for i in range(128)]
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
# name → (path, the request, how many choices it has)
WORST: dict[str, tuple[str, Callable[[], dict[str, Any]], int]] = {
    "choices": (COMPLETIONS, lambda: {"prompt": "Hi", "n": MOST, "max_tokens": 2}, MOST),
    "choices streamed with usage": (COMPLETIONS, lambda: {"prompt": "Hi", "n": MOST, "max_tokens": 2, **USAGE}, MOST),
    "choices of a long prompt": (COMPLETIONS, lambda: {"prompt": long_prompt(), "n": MOST, "max_tokens": 1}, MOST),
    "choices that repeat a long prompt": (
        COMPLETIONS,
        lambda: {"prompt": long_prompt(), "n": 80, "max_tokens": 3, "return_token_ids": True, **USAGE},
        80,
    ),
    "choices with stop strings": (
        COMPLETIONS, lambda: {"prompt": "Hi", "n": 1024, "max_tokens": 2, "stop": STOPS, **USAGE}, 1024,
    ),
    "choices with log-probabilities": (
        CHAT,
        lambda: {
            "messages": [{"role": "user", "content": "Hi"}], "n": 1024, "max_tokens": 2, "logprobs": True,
            "top_logprobs": 20, "stream": True,
        },
        1024,
    ),
    "prompts": (
        COMPLETIONS, lambda: {"prompt": [long_prompt(1000) for _ in range(1024)], "max_tokens": 1, **USAGE}, 1024,
    ),
    "log-probabilities of prompts": (
        COMPLETIONS,
        lambda: {
            "prompt": [long_prompt(2000)] * 2, "max_tokens": 2, "prompt_logprobs": 20, "echo": True, "logprobs": 5,
        },
        2,
    ),
    "biases": (
        COMPLETIONS,
        lambda: {
            "prompt": "Hi", "n": MOST, "max_tokens": 1, "logit_bias": {str(i): 1 for i in range(4096)},
            "stop_token_ids": list(range(4096)), "allowed_token_ids": list(range(32_000)), "seed": 1,
        },
        MOST,
    ),
    "vectors": ("/v1/embeddings", lambda: {"input": [[5, 6, 7]] * INPUTS}, INPUTS),
    "vectors of texts, packed": (
        "/v1/embeddings",
        lambda: {"input": ["many words"] * INPUTS, "encoding_format": "base64", "embed_dtype": "bfloat16",
                 "endianness": "big"},
        INPUTS,
    ),
    "vectors in every form": (
        "/v2/embed", lambda: {"texts": ["Hi"] * 512, "embedding_types": ["float", "base64", "binary", "ubinary"]}, 512,
    ),
    "states of tokens": (
        "/pooling", lambda: {"input": [long_prompt(500)] * 8, "task": "token_embed", "normalize": True}, 8,
    ),
    "scores": ("/score", lambda: {"text_1": "Hi", "text_2": ["many words"] * (INPUTS - 1)}, INPUTS - 1),
    "a ranking": ("/rerank", lambda: {"query": "Hi", "documents": ["many words"] * (INPUTS - 1)}, INPUTS - 1),
}  # fmt: skip


def ends(answer: bytes) -> list[int]:
    """The choices that have ended: each should, once."""
    if answer.startswith(b"data: "):
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
        choices = [choice for event in events for choice in event["choices"]]
    else:
        content = json.loads(answer)
        if isinstance(vectors := content.get("embeddings"), dict):
            return list(range(*{len(form) for form in vectors.values()}))
        if (pooled := content.get("data", content.get("results"))) is not None:
            return sorted(one["index"] for one in pooled)
        choices = content["choices"]
    return sorted(choice["index"] for choice in choices if choice["finish_reason"])


@pytest.mark.parametrize("name", WORST)
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.slow
def test_the_loop_is_never_held(
    engine: Any, text_model: Any, name: str, leaves: bool, slowness: float, settles_within: Any
) -> None:
    """Read to its end, or left in the middle."""
    path, fields, num_choices = WORST[name]
    info = msgspec.structs.replace(
        engine.info,
        max_model_len=CONTEXT,
        vocab_size=32_000,
        num_blocks=100_000,
        num_kv_tokens=1_600_000,
        max_logprobs=20,
        max_num_seqs=MAX_NUM_SEQS,
        hidden_size=HIDDEN_SIZE,
    )
    body = msgspec.json.encode(
        ({"temperature": 1, "ignore_eos": True} if path in (COMPLETIONS, CHAT) else {}) | fields()
    )

    async def main() -> tuple[float, bytes]:
        other = Engine(info)
        app = create_app(other.client, ServerConfig(), text_model)  # type: ignore[arg-type]
        running = asyncio.create_task(other.run())
        watch = Watch()
        watching = asyncio.create_task(watch.run())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=100) as http:
            headers = {"content-type": "application/json"}
            asking = asyncio.create_task(http.post(path, content=body, headers=headers))
            if leaves:
                while not other.open:
                    assert not asking.done(), asking.result().text
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                while app.state.server.admission.num_requests:
                    await asyncio.sleep(0.001)
                answer = b""
            else:
                answer = (await asking).content
        watching.cancel()
        running.cancel()
        assert not other.open and app.state.server.admission.num_requests == 0
        return watch.longest, answer

    def measure() -> float:
        gc.collect()
        gc.freeze()  # as a server does when it is ready
        try:
            longest, answer = asyncio.run(main())
        finally:
            gc.unfreeze()
        assert leaves or ends(answer) == list(range(num_choices)), answer[:300]
        return longest

    assert settles_within(HOLD * slowness, measure)
