"""vserve over HTTP against transformers.generate on the CPU: one stream, and 16 streams at once against 16 in turn.

Usage: python tools/benchmarks/cpu_http.py [--model DIR] [--threads N] [--tokens N] [--runs N] [--check]
Both sides use the same number of threads, run in turns, and the medians are printed. --check exits 1 below the bars.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

DEMO = Path(__file__).parents[2] / "configs" / "demo"
STREAMS = 16
SINGLE_BAR, CONCURRENT_BAR = 1.0, 4.0


def start_server(model: str, threads: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "vserve.server.cli.main", model, "--port", "0", "--device", "cpu"]
    command += ["--cpu-threads", str(threads)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stderr is not None
    tail: list[str] = []
    threading.Thread(target=lambda: tail.extend(server.stderr or ()), daemon=True).start()
    for line in server.stdout:
        if found := re.match(r"(http://\S+)", line):
            return server, found[1].replace("localhost", "127.0.0.1")
    raise SystemExit("the server did not start:\n" + "".join(tail))


async def stream(client, url: str, model: str, prompt: list[int], tokens: int) -> int:  # type: ignore[no-untyped-def]
    """Streams one completion; returns the tokens that the server counted."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    counted = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and '"usage":{' in line:
                counted = json.loads(line[6:])["usage"]["completion_tokens"]
    assert counted == tokens, f"asked for {tokens} tokens, got {counted}"
    return counted


async def over_http(url: str, model: str, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second of all prompts at once."""
    import httpx

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        started = time.perf_counter()
        counts = await asyncio.gather(*(stream(client, url, model, prompt, tokens) for prompt in prompts))
        return sum(counts) / (time.perf_counter() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    oracle = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    text = "Tell me what {} and {} make, then say something long about it."
    prompts = [tokenizer(text.format(i, 3 * i))["input_ids"] for i in range(STREAMS)]

    def generate(prompt: list[int]) -> int:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True, pad_token_id=0,
                min_new_tokens=arguments.tokens, max_new_tokens=arguments.tokens,
            )  # fmt: skip
        return out.shape[1] - len(prompt)

    def in_turn(batch: list[list[int]]) -> float:
        started = time.perf_counter()
        return sum(generate(prompt) for prompt in batch) / (time.perf_counter() - started)

    server, url = start_server(arguments.model, arguments.threads)
    try:
        import httpx

        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]

        def ours(batch: list[list[int]]) -> float:
            return asyncio.run(over_http(url, name, batch, arguments.tokens))

        ours(prompts)
        in_turn(prompts[:1])
        rows: dict[str, list[float]] = {"single": [], "single oracle": [], "16": [], "16 oracle": []}
        for run in range(arguments.runs):
            rows["single"].append(ours(prompts[run : run + 1]))
            rows["single oracle"].append(in_turn(prompts[run : run + 1]))
            rows["16"].append(ours(prompts))
            rows["16 oracle"].append(in_turn(prompts))
    finally:
        server.terminate()
        server.wait(30)
    medians = {key: statistics.median(values) for key, values in rows.items()}
    single, many = medians["single"] / medians["single oracle"], medians["16"] / medians["16 oracle"]
    print(f"{arguments.threads} thread(s), {arguments.tokens} tokens, medians of {arguments.runs} alternating runs")
    print(f"{'':<14}{'vserve over HTTP':>18}{'transformers':>16}{'ratio':>8}{'bar':>6}")
    for label, key, ratio, bar in (
        ("one stream", "single", single, SINGLE_BAR),
        ("16 streams", "16", many, CONCURRENT_BAR),
    ):
        print(f"{label:<14}{medians[key]:>12.0f} tok/s{medians[key + ' oracle']:>10.0f} tok/s{ratio:>8.2f}{bar:>6.1f}")
    return int(arguments.check and (single < SINGLE_BAR or many < CONCURRENT_BAR))


if __name__ == "__main__":
    sys.exit(main())
