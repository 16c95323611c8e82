"""Asks the noticing model over HTTP, alone and in company: an answer is wrong as soon as one key of its prompt is.

    python tests/gpu/noticing.py                      # 1, 40, 100, 200, 400 streams; prints a table
    python tests/gpu/noticing.py --soak 480           # so many seconds of all of it, every answer checked
    python tests/gpu/noticing.py --fault cell         # with a planted fault, which has to be noticed: exit code 1
    python tests/gpu/noticing.py --adapters 40        # each request asks one of so many adapters, or none
    python tests/gpu/noticing.py --device cpu --streams 1,4 --answers 40 --model …         # does it run?

The company: bursts of prompts beside long answers, half of them with a prefix that others have too, some aborted, some
with penalties, seeds, grammars, log-probabilities; and once more with a cache so small that answers are preempted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[1] / "noticing"))
import swaps
import tasks
from processes import CHECKOUT, Server, VServe

MODEL = Path(tasks.__file__).with_name("model")
CONTEXT = 2560
STREAMS = (1, 40, 100, 200, 400)
ANSWERS = 2000  # a setting, with 33 streams or more
FEW_ANSWERS = 200  # with fewer
CLIENTS = 4  # processes
MOST_COMPARED = 50  # wrong answers: with more there is no doubt
OF_ADAPTERS = 0.7  # of the requests, where there are any; the others ask the model
STREAMS_A_CLIENT = 32  # its pool looks through all of them whenever a request begins or ends
RIGHT_ALONE = 0.99
DROP = 0.005  # of the share that is right alone: more is a fault
NEAR_TIE = 1.0  # difference of log-probabilities below which bfloat16 may choose either
CLEAR_DIFFERENCES = 0.001  # of the answers: greedy ones that differ from the same asked alone without such a tie
# Tokens, for hundreds of requests with some thousand each; the next where a card or short answers leave too few at once
# for anyone to be preempted.
SMALL_CACHES = (24_000, 12_000, 6_000)


@dataclass
class Score:
    """Of one setting."""

    title: str
    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[tasks.Question, dict[str, Any], list[int]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    aborted: int = 0
    running: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    near_ties: int = 0
    clear: int = 0
    seconds: float = 0.0

    def add(self, other: Score) -> None:
        """What another client, at the same time, has found."""
        self.right += other.right
        self.asked += other.asked
        self.wrong += other.wrong
        self.errors += other.errors
        self.aborted += other.aborted
        self.running += other.running
        self.seconds = max(self.seconds, other.seconds)

    @property
    def share(self) -> float:
        return self.right.total() / max(1, self.asked.total())


class Company:
    """Questions without end, each with the parameters that it is asked with. The same for the same seed."""

    def __init__(self, seed: int, plain: bool = False, adapters: int = 0) -> None:
        self._random = Random(seed)
        self._plain = plain  # nothing but greedy
        self._adapters = adapters
        self._shared = [tasks.recall(self._random, size).prompt[:-3] for size in (300, 900, 1500, 1990)]

    def __iter__(self) -> Iterator[tuple[tasks.Question, dict[str, Any]]]:
        while True:
            number = 0
            if self._adapters and self._random.random() < OF_ADAPTERS:
                number = self._random.randint(1, self._adapters)
            question = self._question(copies=not number)
            parameters = {} if self._plain else self._parameters(question)
            if number:
                question, parameters["model"] = swaps.swapped(question, number), adapter_name(number)
            yield question, parameters

    def _question(self, copies: bool) -> tasks.Question:
        """`copies`: with long answers, too, which an adapter does not have."""
        random = self._random
        kind = random.choices(("recall", "first", "copy"), (45, 15, 40 if copies else 0))[0]
        if kind == "copy":
            return tasks.copy(random, random.randint(60, tasks.LONGEST_COPY))
        if kind == "recall" and random.random() < 0.5:
            # a prefix that others have too
            pairs = random.choice(self._shared)
            at = 3 * random.randrange(len(pairs) // 3)
            return tasks.Question(kind, [*pairs, tasks.RECALL, *pairs[at : at + 2]], [pairs[at + 2], tasks.END])
        longest = tasks.LONGEST_CONTENT if random.random() < 0.3 else 900
        return tasks.KINDS[kind](random, random.randint(3, longest))

    def _parameters(self, question: tasks.Question) -> dict[str, Any]:
        """Under which the right answer is as likely as without."""
        random, chosen = self._random, self._random.random()
        if chosen < 0.1:  # no word of an answer stands in it twice
            return {"presence_penalty": 0.8, "frequency_penalty": 0.8}
        if chosen < 0.2:
            return {"temperature": 0.2, "top_p": 0.95, "seed": random.getrandbits(40)}
        if chosen < 0.3:
            return {"structured_outputs": {"regex": r"( [abv][0-9]+)+"}}
        if chosen < 0.4:
            return {"logprobs": 3}
        if chosen < 0.5:
            return {"logit_bias": {str(tasks.RECALL): -50, str(tasks.COPY): -50}}
        if chosen < 0.6:
            return {"stream": True, "abort": random.random() < 0.7}
        return {}


def adapter_name(number: int) -> str:
    return f"swaps-{number}"


def body(question: tasks.Question, parameters: dict[str, Any]) -> dict[str, Any]:
    asked = {name: value for name, value in parameters.items() if name != "abort"}
    return {
        "model": "noticing", "prompt": question.prompt, "max_tokens": len(question.answer) + 4, "temperature": 0,
        "return_token_ids": True, **asked,
    }  # fmt: skip


async def ask(client: httpx.AsyncClient, url: str, question: tasks.Question, parameters: dict[str, Any]) -> list[int]:
    """The answer's tokens. Raises RuntimeError with what the server says, CancelledError where it was aborted."""
    request = body(question, parameters)
    if not parameters.get("stream"):
        response = await client.post(f"{url}/v1/completions", json=request)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code} {response.text[:300]}")
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens
    tokens = []
    async with client.stream("POST", f"{url}/v1/completions", json=request) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code} {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            if parameters["abort"] and len(tokens) >= min(3, len(question.answer) - 1):  # before it has all
                raise asyncio.CancelledError
    return tokens


async def run_setting(url: str, score: Score, company: Iterator[Any], streams: int, answers: int, seed: int) -> None:
    """So many streams at once, new ones in bursts of up to half of them."""
    random, open_streams = Random(seed), set()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=streams)
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(timeout=600, limits=limits, trust_env=False))
            for _ in range(1 + streams // STREAMS_A_CLIENT)
        ]
        watching = asyncio.create_task(_watch(clients[0], url, score))

        async def one(question: tasks.Question, parameters: dict[str, Any]) -> None:
            try:
                tokens = await ask(random.choice(clients), url, question, parameters)
            except asyncio.CancelledError:
                score.aborted += 1
                return
            except (RuntimeError, httpx.HTTPError) as error:
                score.errors.append(f"{type(error).__name__}: {error}")
                return
            score.asked[question.kind] += 1
            if tokens == question.answer:
                score.right[question.kind] += 1
            else:
                score.wrong.append((question, parameters, tokens))

        started = time.monotonic()
        burst = 1
        while score.asked.total() + score.aborted + len(score.errors) + len(open_streams) < answers or open_streams:
            begun = score.asked.total() + score.aborted + len(score.errors) + len(open_streams)
            if begun < answers and streams - len(open_streams) >= burst:
                for _ in range(min(burst, answers - begun)):
                    open_streams.add(asyncio.create_task(one(*next(company))))
                burst = random.randint(1, max(1, streams // 2))
            done, _ = await asyncio.wait(open_streams, return_when=asyncio.FIRST_COMPLETED)
            open_streams -= done
            for task in done:
                task.result()
        score.seconds += time.monotonic() - started
        watching.cancel()


async def _watch(client: httpx.AsyncClient, url: str, score: Score) -> None:
    while True:
        await asyncio.sleep(0.5)
        page = (await client.get(f"{url}/metrics")).text
        score.running += [
            float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.startswith("vllm:num_requests_running{")
        ]


async def compare_alone(url: str, score: Score) -> None:
    """The wrong answers once more, each alone: a tie that bfloat16 may break either way, or a clear difference."""
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        for question, parameters, tokens in score.wrong[:MOST_COMPARED]:
            if parameters.get("temperature"):
                continue
            request = body(question, {**parameters, "stream": False, "logprobs": 2})
            response = (await client.post(f"{url}/v1/completions", json=request)).json()["choices"][0]
            alone = response["token_ids"]
            if alone == tokens:
                continue
            at = next((i for i, (a, b) in enumerate(zip(alone, tokens, strict=False)) if a != b), None)
            values = sorted((response["logprobs"]["top_logprobs"][at] or {}).values()) if at is not None else []
            if len(values) >= 2 and values[-1] - values[-2] < NEAR_TIE:
                score.near_ties += 1
            else:
                score.clear += 1


def one_client(url: str, title: str, streams: int, answers: int, seed: int, plain: bool, adapters: int) -> Score:
    score = Score(title)
    asyncio.run(run_setting(url, score, iter(Company(seed, plain, adapters)), streams, answers, seed))
    return score


def measure(
    server: Server, title: str, streams: int, answers: int, seed: int, plain: bool = False, adapters: int = 0
) -> Score:
    score, url = Score(title), f"http://127.0.0.1:{server.port}"
    before = server.counters()
    clients = min(CLIENTS, streams)  # processes: one alone keeps some fifty requests running
    with ProcessPoolExecutor(clients, multiprocessing.get_context("spawn")) as pool:
        share = streams // clients, answers // clients
        running = [
            pool.submit(one_client, url, title, *share, 1000 * seed + client, plain, adapters)
            for client in range(clients)
        ]
        for future in running:
            score.add(future.result())
    score.counters = {name: value - before[name] for name, value in server.counters().items()}
    asyncio.run(compare_alone(url, score))
    print(" ".join(line(score)), flush=True)  # the table comes at the end, if it does
    return score


HEAD = ("setting", "running, mean", "answers", "right", *tasks.KINDS, "near ties", "clear differences", "aborted",
        "preempted", "late compilations", "missed graphs", "seconds")  # fmt: skip


def line(score: Score) -> list[str]:
    mean = sum(score.running) / max(1, len(score.running))
    kinds = [f"{score.right[kind]}/{score.asked[kind]}" for kind in tasks.KINDS]
    counts = [score.counters.get(name, 0) for name in ("preemptions", "late compilations", "missed graphs")]
    return [
        score.title, f"{mean:.0f}", str(score.asked.total()), f"{100 * score.share:.2f} %", *kinds,
        str(score.near_ties), str(score.clear), str(score.aborted), *(f"{count:.0f}" for count in counts),
        f"{score.seconds:.0f}",
    ]  # fmt: skip


def faults(score: Score, alone: float, small: bool) -> list[str]:
    """What is wrong with a setting, in words; empty where nothing is."""
    found = (
        [f"{score.title}: {len(score.errors)} requests failed, the first: {score.errors[0]}"] if score.errors else []
    )
    if score.share < alone - DROP:
        found.append(f"{score.title}: {100 * score.share:.2f} % right, alone {100 * alone:.2f} %")
    if score.clear > CLEAR_DIFFERENCES * score.asked.total():
        found.append(f"{score.title}: {score.clear} greedy answers differ clearly from the same asked alone")
    if score.counters.get("late compilations"):
        found.append(f"{score.title}: {score.counters['late compilations']:.0f} kernels were compiled after ready")
    if score.counters.get("missed graphs"):
        found.append(f"{score.title}: {score.counters['missed graphs']:.0f} steps missed their graph")
    if small and not score.counters.get("preemptions"):
        found.append(f"{score.title}: the cache was meant to be too small, and nobody was preempted")
    return found


def memory(server: Server) -> dict[str, float]:
    """MiB: of the card as its driver counts it, of the server's processes as the kernel does."""
    found = {}
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # on a CPU
        found["card"] = float(subprocess.check_output(command, text=True).split()[0])
    for name, pid in server.processes().items():
        for row in Path(f"/proc/{pid}/status").read_text().splitlines():
            if row.startswith("VmRSS:"):
                found[name] = float(row.split()[1]) / 1024
    return found


def soak(
    server: Server, seconds: float, alone: float, most_streams: int, adapters: int
) -> tuple[list[Score], list[str]]:
    """Settings one after another until the time is over; memory is compared with that after the first third."""
    until, scores, found, remembered = time.monotonic() + seconds, [], [], {}
    started, number = time.monotonic(), 0
    while time.monotonic() < until:
        streams = (most_streams, most_streams // 4, most_streams // 2, max(1, most_streams // 10))[number % 4]
        scores.append(
            measure(server, f"soak {number}: {streams} streams", streams, ANSWERS, 100 + number, adapters=adapters)
        )
        found += faults(scores[-1], alone, small=False)
        number += 1
        if not remembered and time.monotonic() - started > seconds / 3:
            remembered = memory(server)
    now = memory(server)
    print(f"memory, MiB, after a third: {remembered}, at the end: {now}", flush=True)
    for name, value in remembered.items():
        if now[name] > 1.02 * value + 32:
            found.append(f"the memory of {name} grew from {value:.0f} to {now[name]:.0f} MiB")
    return scores, found


def show(rows: list[list[str]], head: Sequence[str] = HEAD) -> None:
    table = [list(head), *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for number, row in enumerate(table):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    sys.stdout.flush()


def options_on(device: str) -> list[str]:
    return ["--served-model-name=noticing", f"--max-model-len={CONTEXT}", f"--device={device}", "--max-num-seqs=512"]


def room_on(device: str) -> list[str]:
    """For the cache: several servers share a card."""
    return [] if device == "cpu" else ["--kv-cache-memory-bytes=4000000000"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=MODEL, help="its folder (default: the one that is kept with the tests)")
    add("--checkout", type=Path, default=CHECKOUT, help="whose `vserve` serves (default: this one's)")
    add("--streams", default=",".join(map(str, STREAMS)), metavar="N,...", help="settings (default: %(default)s)")
    add("--answers", type=int, default=ANSWERS, help=f"a setting of 33 streams or more (default: {ANSWERS})")
    add("--soak", type=float, default=0, metavar="SECONDS", help="all of it again and again, for so long")
    add("--fault", default="", help="plant one: cell, table or stale (faults.py)")
    add("--device", default="auto", help="as of vserve")
    add("--options", default="", help="more options of vserve, in one word")
    add(
        "--adapters", type=int, default=0, metavar="N", help="ask so many adapters, five of them at once, and the model"
    )
    add("--no-small-cache", action="store_true", help="leave out the setting that preempts")
    add("--seed", type=int, default=1)
    args = parser.parse_args()
    options, room = [*options_on(args.device), *args.options.split()], room_on(args.device)
    scores: list[Score] = []
    found: list[str] = []
    counts = [int(word) for word in args.streams.split(",")]
    with tempfile.TemporaryDirectory(prefix="vserve-noticing-") as folder:
        vserve = VServe(Path(folder), 300, checkout=args.checkout)
        servers: list[Server] = []
        if args.adapters:
            names = {adapter_name(number): number for number in range(1, args.adapters + 1)}
            folders = [f"{name}={swaps.write_swaps(Path(folder, name), args.model, n)}" for name, n in names.items()]
            options += ["--enable-lora", "--max-loras=5", "--max-lora-rank=128", "--lora-modules", *folders]

        def start(*more: str) -> Server:
            servers.append(Server(vserve, args.model, [*options, *more], fault=args.fault))
            servers[-1].wait_until_ready()
            return servers[-1]

        try:
            server = start(*room)
            alone = RIGHT_ALONE
            if not args.fault:
                scores.append(
                    measure(
                        server,
                        "alone",
                        1,
                        min(FEW_ANSWERS, args.answers),
                        args.seed,
                        plain=True,
                        adapters=args.adapters,
                    )
                )
                alone = scores[0].share
                found += [] if alone >= RIGHT_ALONE else [f"alone only {100 * alone:.2f} % are right"]
            if args.soak:
                more, wrong = soak(server, args.soak, alone, max(counts), args.adapters)
                scores, found = scores + more, found + wrong
            else:
                for streams in counts:
                    answers = args.answers if streams > 32 else min(FEW_ANSWERS, args.answers)
                    scores.append(
                        measure(
                            server, f"{streams} streams", streams, answers, args.seed + streams, adapters=args.adapters
                        )
                    )
                    found += faults(scores[-1], alone, small=False)
            server.stop()
            for tokens in () if args.soak or args.no_small_cache else SMALL_CACHES:
                # whose queue is as long as it has to be
                server = start(f"--num-gpu-blocks-override={tokens // 16}", "--max-num-queued-tokens=0")
                streams = max(counts)
                title = f"{streams} streams, {tokens} tokens' cache"
                scores.append(measure(server, title, streams, args.answers, args.seed, adapters=args.adapters))
                preempted = bool(scores[-1].counters.get("preemptions"))
                found += faults(scores[-1], alone, small=preempted or tokens == SMALL_CACHES[-1])
                server.stop()
                if preempted:
                    break
        finally:
            for server in servers:
                server.stop()
            show([line(score) for score in scores])
    for text in found:
        print(f"FAULT {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
