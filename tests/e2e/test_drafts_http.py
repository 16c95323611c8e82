"""Answers over HTTP with drafts are those without, whatever requests ask for, streamed and whole (fp32, CPU)."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow
THINK = ("<think>", "</think>")  # 300 and 301
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n"
    "{% if think %}<think>\n{% endif %}{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["left", "right"]}, "degrees": {"type": "integer"}},
    "required": ["to", "degrees"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "turn", "parameters": SCHEMA}}]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "sleeps", "in", "sun", "one", "token"]
FORMS: list[dict[str, Any]] = [
    {"guided_choice": ["left", "right", "one token"]}, {"guided_regex": "(ab|c[0-9]{2}){2,6}!?"},
    {"structured_outputs": {"json": SCHEMA}},
]  # fmt: skip
# Of each field, what some of the requests have.
FIELDS: dict[str, list[Any]] = {
    "temperature": [0, 0, 0.6, 1.5], "max_tokens": [1, 2, 9, 30, 60], "top_p": [0.3, 0.9], "top_k": [1, 5, 50],
    "min_p": [0.02, 0.3], "presence_penalty": [-1.5, 1.2], "frequency_penalty": [-1.0, 1.5],
    "repetition_penalty": [0.8, 1.4], "logit_bias": [{"40": 4, "77": -100}, {"75": 100}], "stop": [["e", "th"], ["o"]],
    "include_stop_str_in_output": [True], "stop_token_ids": [[72], list(range(30, 290, 9))], "ignore_eos": [True],
    "bad_words": [["e", " a"], ["the"]], "allowed_token_ids": [[70, 75], [70, 71, 72, 301]], "n": [2, 3],
    "repetition_detection": [{"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 2}],
    "prompt_logprobs": [0, 3], "return_token_ids": [True], "cache_salt": ["a", "b"],
}  # fmt: skip


def request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"temperature": 1, "seed": rng.randrange(1000), "max_tokens": 20}
    body |= {name: rng.choice(values) for name, values in FIELDS.items() if rng.random() < 0.25}
    text = (" ".join(rng.choices(WORDS, k=rng.randrange(1, 9))) + " ") * rng.choice([1, 1, 3, 9])
    if rng.random() < 0.3:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    formed, limits = rng.random() < 0.3, ("min_tokens", "allowed_token_ids", "bad_words", "logit_bias")
    if rng.random() < 0.5:
        body |= {
            "prompt": [text, "fox"] if rng.random() < 0.3 else text,
            "min_tokens": min(body["max_tokens"], rng.choice([0, 3])),
        }
        body |= {"logprobs": rng.choice([0, 4])} | ({"echo": True} if rng.random() < 0.3 else {})
        if formed:
            body = {name: value for name, value in body.items() if name not in limits} | rng.choice(FORMS)
        return "/v1/completions", body
    body |= {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": rng.choice([0, 3])}
    if rng.random() < 0.5:
        body |= {"chat_template_kwargs": {"think": True}, "thinking_token_budget": rng.choice([0, 1, 7])}
        body.pop("allowed_token_ids", None)  # without the end of the thinking nothing would be left
    else:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    if formed:
        body = {name: value for name, value in body.items() if name not in limits}
        tools = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
        body |= rng.choice([tools, form])
    return "/v1/chat/completions", body


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [answer.status_code, answer.json()]
    joined: dict[str, Any] = {}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            join(joined, json.loads(line[6:]))
    return joined


def join(joined: dict[str, Any], chunk: dict[str, Any]) -> None:
    """However many tokens come at once, together they are the same."""
    joined |= {name: chunk[name] for name in ("usage", "error") if chunk.get(name)}
    for choice in chunk.get("choices", ()):
        place = joined.setdefault(f"choice {choice['index']}", {"": []})
        for name, value in {**choice, **choice.get("delta", {})}.items():
            if isinstance(value, str):
                place[name] = place.get(name, "") + value
            elif name == "tool_calls":
                place[name] = place.get(name, "") + "".join(call["function"].get("arguments", "") for call in value)
            elif name == "logprobs" and value:
                place[""] += value.get("content") or value.get("token_logprobs")
            elif name == "stop_reason" and value is not None:
                place[name] = value


def differs(ours: Any, theirs: Any, where: str = "") -> str:
    """Where; "" where they are the same, but for what log-probabilities are rounded to."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = (ours.keys() | theirs.keys()) - {"id", "created", "prompt_tokens_details"}
        return next(filter(None, (differs(ours.get(n), theirs.get(n), f"{where}.{n}") for n in sorted(names))), "")
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next(filter(None, (differs(*pair, f"{where}[{i}]") for i, pair in pairs)), "")
    if isinstance(ours, float) and isinstance(theirs, float) and ours == pytest.approx(theirs, abs=1e-3):
        return ""
    return "" if ours == theirs else f"{where}: {ours!r:.200} and {theirs!r:.200}"


def answers(url: str, requests: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    with httpx.Client(base_url=url, timeout=240) as client, ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda one: ask(client, *one), requests))


@pytest.fixture(scope="module")
def thinker(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("thinker")
    for file in tiny_model("qwen3", vocab_size=310, max_position_embeddings=1024).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("special", "normalized", "single_word", "lstrip", "rstrip"), False)
    tokenizer["added_tokens"] += [{"id": 300 + i, "content": token, **flags} for i, token in enumerate(THINK)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def plain(thinker: Path, live_server: Callable[..., Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    rng = random.Random(f"{os.environ['TEST_SEED']} drafts")  # whichever test comes first
    requests = [request(rng) for _ in range(40)]
    with live_server(thinker, max_num_seqs=16) as url:
        found = answers(url, requests)
    refused = [one for one in found if isinstance(one, list) and one[0] != 200]
    assert not refused
    yield requests, found


NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 7}


@pytest.mark.parametrize("drafts", [NGRAM, {"num_speculative_tokens": 4}])
def test_drafts_change_no_answer(thinker: Path, live_server: Any, plain: Any, drafts: dict[str, Any]) -> None:
    requests, expected = plain
    count = drafts["num_speculative_tokens"]
    who = {} if "method" in drafts else {"model": str(thinker)}
    asked = drafts | who | {"num_speculative_tokens_per_batch_size": [[1, 64, count]]}
    tight = {"num_gpu_blocks_override": 72, "max_num_batched_tokens": 256}
    with live_server(thinker, max_num_seqs=16, speculative_config=json.dumps(asked), **tight) as url:
        for _ in range(2):  # the second time, prompts are in the cache
            for one, ours, theirs in zip(requests, answers(url, requests), expected, strict=True):
                assert not (found := differs(ours, theirs)), f"{found}\n{one}"
        page = httpx.get(f"{url}/metrics").text
    counts = {name: sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"vllm:{name}_total"))
              for name in ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens")}  # fmt: skip
    assert counts["spec_decode_num_drafts"] > 100 and counts["spec_decode_num_accepted_tokens"] > 30
