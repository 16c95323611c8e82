"""Mixed load: clients that ask for everything the server has, compare each answer with what the unloaded server said,
and count; some ask for nonsense, some leave. At the end their counts are held against the server's."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

Choices = list[tuple[str, str]]  # (text, finish reason) in the order of their indices
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What an accepted request may end with when its engine dies, and what a new one is told meanwhile.
DOCUMENTED = {"engine_dead", "queue_full", "model_loading"}


@dataclass
class Case:
    path: str
    body: dict[str, Any]
    expected: Choices = field(default_factory=list)

    @property
    def num_choices(self) -> int:
        return len(self.expected)


def chat(text: str, **fields: Any) -> Case:
    messages = [{"role": "user", "content": text}]
    return Case(CHAT, {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 40, **fields})


def completion(prompt: Any, **fields: Any) -> Case:
    return Case(COMPLETIONS, {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 48, **fields})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
OBJECT = {"name": "o", "schema": SCHEMA}


def cases() -> list[Case]:
    """Every answer is the same in any company: greedy, or with a seed."""
    return [
        chat("Hello!"), chat("What is 12 + 30?"), chat("What is the capital of France?", max_tokens=3),
        chat("Count from 1 to 9.", stop=["5"]), chat("Who are you?", logprobs=True, top_logprobs=3),
        chat("Hello!", n=3, temperature=0.8, seed=11), chat("What is 9 - 4?", temperature=1.0, top_p=0.9, seed=5),
        chat("Rome or Paris?", structured_outputs={"choice": ["Rome", "Paris"]}),
        chat("An object, please.", response_format={"type": "json_schema", "json_schema": OBJECT}),
        completion("Tell me about", ignore_eos=True), completion("1, 2, 3,", logprobs=2, echo=True),
        completion(["Hello", "What is 2 + 2?"], ignore_eos=True, max_tokens=24),
        completion("Once more", n=2, temperature=0.7, seed=3, ignore_eos=True, presence_penalty=0.5),
        completion([5 + i * 7 % 500 for i in range(700)], ignore_eos=True, max_tokens=16),
        completion("go on", ignore_eos=True, max_tokens=120, min_tokens=8, repetition_penalty=1.1),
    ]  # fmt: skip


BAD: list[tuple[str, bytes, int]] = [
    (COMPLETIONS, b'{"model": "demo", "prompt": ', 400), (COMPLETIONS, b'{"model": "demo", "prompt": [-1]}', 400),
    (COMPLETIONS, b'{"model": "nobody", "prompt": "Hi"}', 404),
    (COMPLETIONS, b'{"model": "demo", "prompt": "Hi", "temperature": NaN}', 400),
    (COMPLETIONS, b'{"model": "demo", "prompt": "Hi", "max_tokens": 999999}', 400),
    (CHAT, b'{"model": "demo", "messages": []}', 400), (CHAT, b"[" * 5000, 400),
    (CHAT, b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "response_format": {"type": '
     b'"json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}}', 400),
    (CHAT, b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "n": 1000000}', 400),
]  # fmt: skip


@dataclass
class Totals:
    """What the clients saw."""

    sent: int = 0
    statuses: Counter[str] = field(default_factory=Counter)  # of who stayed, by class
    finished: Counter[str] = field(default_factory=Counter)  # choices by finish reason
    refused: int = 0  # nonsense, answered as it should be
    left: int = 0
    left_choices: int = 0  # of those who left: whether they were finished, only the server knows
    failed: Counter[str] = field(default_factory=Counter)  # requests, by the documented error they ended with
    failed_choices: int = 0
    broken: int = 0  # requests whose connection ended with the process that had it
    generated: int = 0  # tokens, by the usage of whole answers
    wrong: list[str] = field(default_factory=list)  # what must not happen

    def __str__(self) -> str:
        answered = f"{self.statuses['2xx']} answered 200, {self.refused} bad ones refused, {self.left} left"
        failed = f"{self.broken} broken, failed {dict(self.failed) or 0}"
        return f"{self.sent} requests: {answered}, {failed}; choices {dict(self.finished)}; wrong {len(self.wrong)}"


class Load:
    """Clients of one server. `learn` while it is unloaded, then `run`."""

    def __init__(self, url: str, seed: int = 0, bad: float = 0.05, leave: float = 0.05) -> None:
        self.totals = Totals()
        self.may_break: Callable[[], bool] = lambda: False  # whether connections may end without an answer
        self.on_gap: Callable[[float], None] = lambda seconds: None  # between two events of one stream
        self._url = url
        self._random = random.Random(seed)
        self._shares = [bad, leave, 1 - bad - leave]
        self._cases = cases()

    def learn(self) -> None:
        with httpx.Client(base_url=self._url, timeout=240) as http:
            for case in self._cases:
                self._note_sent()
                answer = http.post(case.path, json=case.body)
                assert answer.status_code == 200, answer.text
                self.totals.statuses["2xx"] += 1
                found = whole(answer.json())
                assert found == (case.expected or found), f"{case.body}: {found} instead of {case.expected}"
                case.expected = found
                self._note_finished(case)

    async def run(self, seconds: float, *, clients: int = 1, rate: float = 0.0) -> None:
        """`clients` that ask one request after another or, with a `rate`, one every 1/rate seconds on average."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=180, limits=limits) as http:

            async def one_after_another() -> None:
                while loop.time() < end:
                    failed = self.totals.failed.total()
                    await self.ask(http)
                    # Nobody asks a server that is down as often as it can say so.
                    await asyncio.sleep(0.3 if self.totals.failed.total() > failed else self._random.uniform(0, 0.1))

            if not rate:
                await asyncio.gather(*(one_after_another() for _ in range(clients)))
                return
            asking: set[asyncio.Task[None]] = set()
            while loop.time() < end:
                asking.add(task := asyncio.create_task(self.ask(http)))
                task.add_done_callback(asking.discard)
                await asyncio.sleep(self._random.expovariate(rate))
            await asyncio.gather(*asking)

    async def ask(self, http: httpx.AsyncClient) -> None:
        ask_one = self._random.choices([self._ask_nonsense, self._leave, self._ask], self._shares)[0]
        try:
            await ask_one(http)
        except (httpx.HTTPError, OSError) as error:
            if self.may_break() and isinstance(error, httpx.TransportError | ConnectionError):
                self.totals.broken += 1
                return
            self.totals.wrong.append(f"{ask_one.__name__}: {type(error).__name__}: {error}")

    async def _ask_nonsense(self, http: httpx.AsyncClient) -> None:
        path, body, status = self._random.choice(BAD)
        self._note_sent()
        answer = await http.post(path, content=body, headers={"content-type": "application/json"})
        self.totals.statuses[f"{answer.status_code // 100}xx"] += 1
        if answer.status_code == status:
            self.totals.refused += 1
        else:
            self._failed(answer.status_code, answer.json().get("error", {}), body[:60], 0)

    async def _ask(self, http: httpx.AsyncClient) -> None:
        case = self._random.choice(self._cases)
        self._note_sent()
        if self._random.random() < 0.5:
            answer = await http.post(case.path, json=case.body)
            self.totals.statuses[f"{answer.status_code // 100}xx"] += 1
            if answer.status_code == 200:
                self.totals.generated += answer.json()["usage"]["completion_tokens"]
                self._compare(case, whole(answer.json()))
            else:
                self._failed(answer.status_code, answer.json().get("error", {}), case.body, case.num_choices)
        else:
            await self._stream(http, case)

    async def _stream(self, http: httpx.AsyncClient, case: Case) -> None:
        texts: dict[int, str] = dict.fromkeys(range(case.num_choices), "")
        reasons: dict[int, str] = {}
        data, last = "", 0.0
        async with http.stream("POST", case.path, json={**case.body, "stream": True}) as answer:
            self.totals.statuses[f"{answer.status_code // 100}xx"] += 1
            if answer.status_code != 200:
                error = json.loads(await answer.aread()).get("error", {})
                self._failed(answer.status_code, error, case.body, case.num_choices)
                return
            error = None
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = asyncio.get_running_loop().time()
                if last:
                    self.on_gap(now - last)
                last, data = now, line[6:]
                event = {} if data == "[DONE]" else json.loads(data)
                error = event.get("error", error)
                for choice in event.get("choices", ()):
                    texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                    if choice["finish_reason"]:
                        reasons[choice["index"]] = choice["finish_reason"]
        if data != "[DONE]":
            self.totals.wrong.append(f"a stream without an end: {case.body}")
        elif error:
            self._failed(200, error, case.body, case.num_choices)
        else:
            self._compare(case, [(texts[i], reasons.get(i, "none")) for i in sorted(texts)])

    async def _leave(self, http: httpx.AsyncClient) -> None:
        """Sends a whole request and goes away: at once, after a while, or in the middle of the stream."""
        case = self._random.choice(self._cases)
        stream = self._random.random() < 0.5
        address = urlsplit(self._url)
        assert address.hostname is not None
        body = json.dumps({**case.body, "stream": stream}).encode()
        head = f"POST {case.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        self._note_sent()
        self.totals.left += 1
        self.totals.left_choices += case.num_choices
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()
        if stream and self._random.random() < 0.7:
            await reader.read(self._random.choice((1, 400, 4000)))
            writer.transport.abort()
            return
        await asyncio.sleep(self._random.choice((0.0, 0.02, 0.2)))
        writer.close()

    def _note_sent(self) -> None:
        self.totals.sent += 1

    def _note_finished(self, case: Case) -> None:
        for _, reason in case.expected:
            self.totals.finished[reason] += 1

    def _compare(self, case: Case, found: Choices) -> None:
        if found == case.expected:
            self._note_finished(case)
        else:
            self.totals.wrong.append(f"{case.body}: {found} instead of {case.expected}")

    def _failed(self, status: int, error: dict[str, Any], body: object, num_choices: int) -> None:
        code = error.get("code")
        if code in DOCUMENTED:
            self.totals.failed[f"{code} in a stream" if status == 200 else f"{code}, {status}"] += 1
            self.totals.failed_choices += num_choices
        else:
            self.totals.wrong.append(f"{status} {error} to {body!r}")


def whole(answer: dict[str, Any]) -> Choices:
    found = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [(choice.get("text", choice.get("message", {}).get("content")), choice["finish_reason"]) for choice in found]


def reconcile(totals: Totals, page: str, sum_of: Callable[..., float], canaries: int = 0) -> list[str]:
    """What does not add up between the clients' counts and /metrics. Exact but for what only the server knows: how far
    those had come who left, and the choices of answers of which one choice failed.

    `canaries`: requests of somebody else, among `sent`, that ended with "stop" or "length".
    """
    problems = []

    def check(what: str, found: float, least: int, most: int) -> None:
        if not least <= found <= most:
            problems.append(f"{what}: {found:g} on /metrics, the clients counted {least} to {most}")

    def http(label: str = "") -> float:
        return sum(
            sum_of(page, "http_requests_total", f'handler="{path}",method="POST",status="{label}')
            for path in (CHAT, COMPLETIONS)
        )

    check("requests", http(), totals.sent, totals.sent)
    for status in ("2xx", "4xx", "5xx"):
        check(status, http(status), totals.statuses[status], totals.statuses[status] + totals.left)
    unknown = totals.left_choices + totals.failed_choices + canaries
    for reason in ("stop", "length"):
        found = sum_of(page, "vllm:request_success_total", f'finished_reason="{reason}"')
        check(f"finished by {reason}", found, totals.finished[reason], totals.finished[reason] + unknown)
    aborted = sum_of(page, "vllm:request_success_total", 'finished_reason="abort"')
    check("aborted", aborted, 0, totals.left_choices + totals.failed_choices)
    check("disconnects", sum_of(page, "vllm:requests_aborted_total", 'reason="disconnect"'), 0, totals.left_choices)
    failed = sum_of(page, "vllm:request_success_total", 'finished_reason="error"')
    check("failed", failed, 0, totals.failed_choices + totals.left_choices)
    ended = sum_of(page, "vllm:request_success_total")
    check("ended", ended, sum(totals.finished.values()), sum(totals.finished.values()) + unknown)
    check("running", sum_of(page, "vllm:num_requests_running"), 0, 0)
    check("waiting", sum_of(page, "vllm:num_requests_waiting"), 0, 0)
    used = sum_of(page, "vllm:kv_blocks") - sum_of(page, "vllm:kv_blocks_free")
    check("blocks in use", used, 0, 0)
    return problems
