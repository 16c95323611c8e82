"""Adapters that come and go under load, every answer checked: python tools/benchmarks/adapter_churn.py URL FOLDER...

    [--seconds 120] [--workers 8]

The server runs with --enable-lora and --lora-dir; folders are named as below that one. First each adapter answers
alone, and so does the base. Then each worker loads one under a name of its own, asks, replaces it in place by another,
asks again and unloads it, while others ask the base: whoever gets anything but the answer from before ends it with
exit code 1. Answers are greedy, so run it in float32 (on the CPU), or where a batch changes no token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

NUM_TOKENS = 8


class WrongAnswer(Exception):
    """Which, and what it should have been."""


class Churn:
    def __init__(self, client: httpx.AsyncClient, prompts: Sequence[Any]) -> None:
        """prompts: texts, or lists of token ids."""
        self._client, self._prompts = client, prompts
        self.alone: dict[str, list[list[int]]] = {}  # by folder, "" for the base: tokens behind each prompt
        self.counts: Counter[str] = Counter()
        self.longest: Counter[str] = Counter()  # milliseconds
        self._base = ""

    async def learn(self, folders: Sequence[str]) -> None:
        """What each answers alone. Raises WrongAnswer where two answer alike: then nothing would be shown."""
        cards = (await self._client.get("/v1/models")).raise_for_status().json()["data"]
        self._base = next(card["id"] for card in cards if card["parent"] is None)
        places = range(len(self._prompts))
        self.alone[""] = [await self._ask(self._base, place) for place in places]
        for folder in folders:
            await self._change("load", lora_name="alone", lora_path=folder)
            self.alone[folder] = [await self._ask("alone", place) for place in places]
            await self._change("unload", lora_name="alone")
        if len({str(tokens) for tokens in self.alone.values()}) < len(self.alone):
            raise WrongAnswer("two adapters, or one and the base, give the same answers")

    async def run(self, seconds: float, workers: int, seed: int = 0) -> None:
        """Raises WrongAnswer, httpx.HTTPError."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for index in range(workers):
                group.create_task(self._work(f"churn-{index}", random.Random(seed + index), until))
            group.create_task(self._ask_base(random.Random(seed - 1), until))

    async def _work(self, name: str, rng: random.Random, until: float) -> None:
        folders = [folder for folder in self.alone if folder]
        while time.monotonic() < until:
            first, second = rng.choice(folders), rng.choice(folders)
            await self._change("load", lora_name=name, lora_path=first)
            await self._check(name, rng, first)
            running = asyncio.create_task(self._check(name, rng, first, second))  # with which it begins, it ends
            await asyncio.sleep(0.01)
            if rng.random() < 0.5:
                await running
            await self._change("load", lora_name=name, lora_path=second, load_inplace=True)
            await self._check(name, rng, second)
            await running
            await self._change("unload", lora_name=name)
            answer = await self._post("/v1/completions", model=name, prompt=self._prompts[0], max_tokens=1)
            if answer.status_code != 404:
                raise WrongAnswer(f"{name} is unloaded, and answers with {answer.status_code}")

    async def _ask_base(self, rng: random.Random, until: float) -> None:
        while time.monotonic() < until:
            await self._check(self._base, rng, "")

    async def _check(self, name: str, rng: random.Random, *folders: str) -> None:
        """Of three prompts: the answers of one of these."""
        places = [rng.randrange(len(self._prompts)) for _ in range(3)]
        for place, tokens in zip(places, await asyncio.gather(*(self._ask(name, p) for p in places)), strict=True):
            right = [self.alone[folder][place] for folder in folders]
            if tokens not in right:
                raise WrongAnswer(f"{name} ({' or '.join(folders) or 'the base'}): {tokens}, alone {right}")

    async def _ask(self, name: str, place: int) -> list[int]:
        answer = await self._post(
            "/v1/completions", model=name, prompt=self._prompts[place], temperature=0, max_tokens=NUM_TOKENS,
            ignore_eos=True, return_token_ids=True,
        )  # fmt: skip
        if answer.status_code != 200:
            raise WrongAnswer(f"{name}: {answer.status_code} {answer.text}")
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    async def _change(self, verb: str, **body: Any) -> None:
        answer = await self._post(f"/v1/{verb}_lora_adapter", **body)
        if answer.status_code != 200:
            raise WrongAnswer(f"{verb} {body}: {answer.status_code} {answer.text}")

    async def _post(self, path: str, **body: Any) -> httpx.Response:
        started = time.monotonic()
        answer = await self._client.post(path, json=body)
        self.counts[path] += 1
        self.longest[path] = max(self.longest[path], round(1e3 * (time.monotonic() - started)))
        return answer


async def main(arguments: argparse.Namespace) -> None:
    headers = {} if arguments.api_key is None else {"authorization": f"Bearer {arguments.api_key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=arguments.url, headers=headers, timeout=300, limits=limits) as client:
        prompts = ["The capital of France is", "def add(a, b):", "Once upon a time", "One, two, three,"]
        churn = Churn(client, prompts)
        try:
            await churn.learn(arguments.folders)
            await churn.run(arguments.seconds, arguments.workers)
        except* (WrongAnswer, httpx.HTTPError) as errors:
            sys.exit(f"wrong: {errors.exceptions[0]}")
        print(json.dumps({"requests": churn.counts, "longest_ms": churn.longest}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--api-key", help="an administrator's, where there is one")
    asyncio.run(main(parser.parse_args()))
