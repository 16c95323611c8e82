"""No client may stop the others: while the worst of each kind is sent, a canary asks whether the server lives, and for
something short."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

LIVEZ = 0.1  # seconds for an answer, beyond the slowest without an attack: here the machine is shared with the model
SHORT = 0.5  # seconds that a short request may take longer
MEMORY = 250 << 20  # bytes that both processes together may grow by in the meantime
KEPT = 400 << 20  # bytes that they keep for the next of such bodies, however many come
SECONDS = 1.2  # of each attack
PAUSE = 0.05  # between two questions of the canary
MAX_NUM_SEQS = 64  # and four times as many wait


@dataclass
class Attack:
    """A request that is sent again and again by some clients at once, and the statuses that are right for it."""

    body: dict[str, Any] | bytes
    statuses: tuple[int, ...] = (200,)
    path: str = "/v1/completions"
    clients: int = 1
    leaves: bool = False  # the client goes away as soon as it has sent all

    def data(self, attacks: Any) -> bytes:
        body = self.body if isinstance(self.body, bytes) else json.dumps({"model": "demo", **self.body}).encode()
        return attacks.post(body, "connection: close", path=self.path)


LONG = [5 + i % 300 for i in range(1900)]
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
MANY = {"n": 160, "temperature": 1, "max_tokens": 1}  # half of what may run and wait: the canary has room beside them
SOME = {**MANY, "n": 16}  # of a long prompt: what the model computes is no attack, and takes the CPU its time
TOOLS = [
    {"type": "function", "function": {"name": f"tool_{i}", "parameters": {
        "type": "object", "properties": {f"p{j}": {"type": "string"} for j in range(10)}}}}
    for i in range(200)
]  # fmt: skip
HI = [{"role": "user", "content": "Hi"}]
SPELLED = "<|im_end|><|im_" * 400_000
CHAT = "/v1/chat/completions"
AMBIGUOUS = "start: a+\na: b | b b | b b b\nb: /[a-z ]{1,40}/ | /[a-y ]{1,40}/ | /[a-x ]{1,40}/ | /.{1,40}/"
# Whatever a client sends belongs here, as the worst that its limits allow.
ATTACKS: dict[str, Attack] = {
    "more choices than ever fit": Attack({"prompt": "Hi", "n": 16_384, "temperature": 1}, (400,), clients=4),
    "choices, streamed with usage": Attack({"prompt": "Hi", **MANY, **STREAM}),
    "choices of a long prompt": Attack({"prompt": LONG, **SOME}),
    "choices that repeat a long prompt": Attack({"prompt": LONG, **SOME, **STREAM, "return_token_ids": True}),
    "choices that nobody waits for": Attack({"prompt": LONG, **SOME, "max_tokens": 100}, leaves=True),
    "more prompts than ever fit": Attack({"prompt": ["Hi"] * 1024, "max_tokens": 1}, (400,), clients=4),
    "prompts": Attack({"prompt": [[i, *LONG[:20]] for i in range(64)], "max_tokens": 1}),
    "stop strings": Attack({"prompt": "Hi", **MANY, "stop": [f"{i:03d}" * 340 for i in range(128)], **STREAM}),
    "biases": Attack({"prompt": "Hi", **MANY, "logit_bias": {str(i): 1 for i in range(300)}}),
    "log-probabilities": Attack({"prompt": "Hi", **MANY, "logprobs": 20, **STREAM}),
    "tools": Attack({"messages": HI, "tools": TOOLS[:8], "tool_choice": "required", "max_tokens": 2}, path=CHAT),
    "tools that never fit": Attack(
        {"messages": HI, "tools": TOOLS, "tool_choice": "required"}, (400,), path=CHAT, clients=2
    ),
    "messages": Attack({"messages": HI * 25_000}, (400,), CHAT),
    "spelled special tokens": Attack({"messages": [{"role": "user", "content": SPELLED}]}, (400,), CHAT, clients=2),
    "small objects": Attack(b'{"model":"demo","prompt":[' + b"{}," * 2_500_000 + b"{}]}", (400,)),
    "ids to detokenise": Attack({"tokens": LONG * 500}, path="/detokenize"),
    "a text that never fits": Attack({"prompt": "many words " * 700_000}, (400,), clients=2),
    "texts that nobody waits for": Attack({"prompt": "many words " * 350_000}, clients=4, leaves=True),
    "an ambiguous grammar": Attack(
        {"prompt": "Hi", "n": 16, "temperature": 1, "max_tokens": 20, "structured_outputs": {"grammar": AMBIGUOUS}},
        (200, 400, 500),
    ),
}


@dataclass
class Felt:
    """What the canary felt. Seconds, and bytes of both processes together at the most."""

    livez: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    memory: int = 0


class Canary:
    """Asks on threads of its own, over sockets: whatever the attackers of this process do holds nothing up."""

    def __init__(self, attacks: Any, server: Any) -> None:
        self._attacks = attacks
        self._url = server.url
        self._pids = (server.process.pid, *server.engine_pids())
        body = {**attacks.CANARY, "max_tokens": 2}
        self._short = attacks.post(json.dumps(body).encode())
        self._livez = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"

    def feel(self, work: Callable[[], None]) -> Felt:
        """What it feels while `work` is done."""
        felt, done = Felt(), threading.Event()
        threads = [
            threading.Thread(target=self._ask, args=(self._livez, felt.livez, felt, done)),
            threading.Thread(target=self._ask, args=(self._short, felt.short, felt, done)),
        ]
        for thread in threads:
            thread.start()
        try:
            work()
        finally:
            done.set()
            for thread in threads:
                thread.join()
        return felt

    def memory(self) -> int:
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in self._pids)

    def _ask(self, request: bytes, seconds: list[float], felt: Felt, done: threading.Event) -> None:
        with self._attacks.connect(self._url) as sock:
            while not done.is_set():
                started = time.monotonic()
                sock.sendall(request)
                status, _, body = self._attacks.read_answer(sock)
                seconds.append(time.monotonic() - started)
                if status != 200:
                    felt.wrong.append(f"{status} {body[:200]!r}")
                felt.memory = max(felt.memory, self.memory())
                done.wait(PAUSE)


@pytest.fixture(scope="module")
def server(serve: Any) -> Iterator[Any]:
    with serve("--max-num-seqs", str(MAX_NUM_SEQS), "--served-model-name", "demo") as server:
        yield server


@pytest.fixture(scope="module")
def before(server: Any, attacks: Any) -> Any:
    """With the processes that compile grammars, which begin with the first."""
    with attacks.connect(server.url) as sock:
        sock.sendall(Attack({"prompt": "Hi", "structured_outputs": {"grammar": AMBIGUOUS}, "n": 2}).data(attacks))
        attacks.read_all(sock)
    return attacks.Invariants(server)


def send(attacks: Any, url: str, attack: Attack) -> list[str]:
    """Sends it until the time is over. → what was wrong with the answers."""
    data, end, wrong = attack.data(attacks), time.monotonic() + SECONDS, []

    def client(_: int) -> None:
        while time.monotonic() < end:
            with attacks.connect(url) as sock:
                sock.sendall(data)
                if attack.leaves:
                    time.sleep(0.05)
                    continue
                answer = attacks.read_all(sock)
            if problem := judge(answer, attack):
                wrong.append(problem)

    with ThreadPoolExecutor(attack.clients) as threads:
        list(threads.map(client, range(attack.clients)))
    return wrong


def judge(answer: bytes, attack: Attack) -> str:
    """What is wrong with an answer: its status, or that not each of its choices has ended once."""
    if not (status := re.match(rb"HTTP/1.1 (\d+) ", answer)) or int(status[1]) not in attack.statuses:
        return f"{answer[:300]!r}"
    if int(status[1]) == 200 and isinstance(attack.body, dict) and "prompt" in attack.body:
        prompt = attack.body["prompt"]
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        expected = (len(prompt) if several else 1) * attack.body.get("n", 1)
        ended = len(re.findall(rb'"finish_reason":"(?:stop|length)"', answer))
        if ended != expected:
            return f"{ended} choices have ended, not {expected}"
    return ""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", ATTACKS)
def test_the_others_are_served_as_ever(
    server: Any, before: Any, attacks: Any, name: str, slowness: float, settles_within: Any
) -> None:
    """More often than not: whoever is stopped is so each time, whoever was disturbed by the machine is not."""
    canary, attack, tries = Canary(attacks, server), ATTACKS[name], []

    def is_unharmed() -> bool:
        quiet = canary.feel(lambda: time.sleep(SECONDS / 3))
        memory, wrong = canary.memory(), []
        felt = canary.feel(lambda: wrong.extend(send(attacks, server.url, attack)))
        assert not wrong and not felt.wrong, (wrong[:3], felt.wrong[:3])
        assert felt.memory - memory < MEMORY, f"{(felt.memory - memory) >> 20} MiB more"
        tries.append(
            f"/livez {1e3 * max(quiet.livez):.0f} → {1e3 * max(felt.livez):.0f} ms, short "
            f"{1e3 * max(quiet.short):.0f} → {1e3 * max(felt.short):.0f} ms, +{(felt.memory - memory) >> 20} MiB"
        )
        livez, short = slowness * LIVEZ, slowness * SHORT
        return max(felt.livez) < max(quiet.livez) + livez and max(felt.short) < max(quiet.short) + short

    assert settles_within(1, lambda: not is_unharmed()), tries
    before.check(max_growth=KEPT)
