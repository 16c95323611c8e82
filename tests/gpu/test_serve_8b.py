"""The 8B shape with dummy weights behind a real server process: 64 requests at once, and the blocks come back."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time

import httpx
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(scope="module")
def server(tmp_path_factory, model_folder):
    folder = model_folder.write_model(tmp_path_factory.mktemp("llama-8b"))
    command = [sys.executable, "-m", "vserve.server.cli.main", str(folder), "--load-format", "dummy", "--port", "0"]
    process = subprocess.Popen([*command, "--max-model-len", "8192"], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        print(line, end="")
        if found := re.match(r"(http://\S+)", line):
            break
    else:
        pytest.fail(f"the server ended with code {process.wait()}")
    yield found[1].replace("localhost", "127.0.0.1")
    process.terminate()
    assert process.wait(60) == 0


def metric(url, name):
    text = httpx.get(f"{url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


def test_64_concurrent_requests_complete_and_the_blocks_come_back(server):
    model = httpx.get(f"{server}/v1/models").json()["data"][0]["id"]

    async def one(client, i):
        body = dict(model=model, prompt=[(7 * i + j) % 128000 + 3 for j in range(200 + 13 * i)], max_tokens=128,
                    temperature=0, ignore_eos=True, stream=True, stream_options={"include_usage": True})  # fmt: skip
        events, usage = 0, None
        async with client.stream("POST", f"{server}/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    events += bool(chunk["choices"])
                    usage = chunk.get("usage") or usage
        return events, usage["completion_tokens"]

    async def run():
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    free = metric(server, "vllm:kv_cache_usage_perc")
    started = time.perf_counter()
    results = asyncio.run(run())
    seconds = time.perf_counter() - started
    print(f"64 requests, 128 tokens each: {64 * 128 / seconds:.0f} tok/s, {seconds:.2f} s")
    assert all(tokens == 128 for _, tokens in results)
    time.sleep(0.5)
    assert metric(server, "vllm:kv_cache_usage_perc") == free == 0
    assert metric(server, "vllm:num_requests_running") == 0
