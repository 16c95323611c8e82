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

SHAPE = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, hidden_size=4096, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, max_position_embeddings=131072,
    rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False, hidden_act="silu", dtype="bfloat16",
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("llama-8b")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    vocab |= {f"Ġword{i}": i for i in range(len(vocab), SHAPE["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
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
