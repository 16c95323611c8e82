"""Texts a second: vserve's /v1/embeddings against sentence-transformers, in turns, on one machine.

Usage: python tools/benchmarks/embeddings.py [--shape small|large] [--device cpu|cuda] [--lengths marco|mixed]
Both get the same requests of 32 texts. vserve gets them over HTTP, --concurrency of them at once; sentence-transformers
encodes one after the other in its own process, as a server around it would. --check exits 1 below --bar.
The model has the shape of bge-small or bge-large and random weights. Needs sentence-transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SHAPES = {
    "small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
VOCAB_SIZE = 30522
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST = 512
# Passages of MS MARCO: about 75 word pieces, few beyond 200. A fit of that, not the data.
MEDIAN, SPREAD = 70, 0.4


def words() -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    found = [a + b + c + d for a in letters for b in letters for c in letters for d in "aeio"]
    return found[: VOCAB_SIZE - len(SPECIAL)]


def write_model(folder: Path, shape: str) -> Path:
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=LONGEST, **SHAPES[shape])
    BertModel(config).save_pretrained(folder)
    vocab = {word: i for i, word in enumerate((*SPECIAL, *words()))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    BertTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(modules)
    ]
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_cls_token": True,
               "pooling_mode_mean_tokens": False}  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))
    return folder


def requests_of(lengths: str, count: int, texts: int) -> list[list[str]]:
    """Requests of texts whose tokens are counted: each word is one."""
    source, known = random.Random(0), words()

    def text() -> str:
        if lengths == "marco":
            size = round(MEDIAN * math.exp(source.gauss(0.0, SPREAD)))
        else:
            size = round(math.exp(source.uniform(math.log(8), math.log(LONGEST))))
        return " ".join(source.choices(known, k=max(1, min(size, LONGEST) - 2)))

    return [[text() for _ in range(texts)] for _ in range(count)]


def start_server(folder: Path, device: str, threads: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "vserve.server.cli.main", str(folder), "--port", "0", "--device", device]
    command += ["--cpu-threads", str(threads)] if device == "cpu" else ["--dtype", "bfloat16"]
    command += ["--max-num-queued-reqs", "0", "--max-num-queued-tokens", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    tail: list[str] = []
    threading.Thread(target=lambda: tail.extend(server.stderr or ()), daemon=True).start()
    for line in server.stdout:
        if found := re.match(r"(http://\S+)", line):
            return server, found[1].replace("localhost", "127.0.0.1")
    raise SystemExit("the server did not start:\n" + "".join(tail[-20:]))


async def over_http(url: str, requests: list[list[str]], concurrency: int) -> tuple[float, list[bytes]]:
    """(seconds, the vectors of the first request)"""
    import httpx

    left, first = iter(enumerate(requests)), [b""] * len(requests[0])

    async def worker(client: httpx.AsyncClient) -> None:
        for index, texts in left:
            answer = await client.post(f"{url}/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
            assert answer.status_code == 200, answer.text[:500]
            if index == 0:
                first[:] = [base64.b64decode(one["embedding"]) for one in answer.json()["data"]]

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        started = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(concurrency)))
        return time.perf_counter() - started, first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lengths", choices=("marco", "mixed"), default="marco")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--texts", type=int, default=32, help="of a request")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of either, on the CPU")
    parser.add_argument("--runs", type=int, default=3, help="in turns; the medians count")
    parser.add_argument("--bar", type=float, default=1.0)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()

    import numpy as np
    import torch
    from sentence_transformers import SentenceTransformer, __version__

    torch.set_num_threads(arguments.threads)
    requests = requests_of(arguments.lengths, arguments.requests, arguments.texts)
    count, tokens = sum(map(len, requests)), sum(len(text.split()) + 2 for texts in requests for text in texts)
    rows: dict[str, list[float]] = {"vserve": [], "sentence-transformers": []}
    with tempfile.TemporaryDirectory(prefix="vserve-embeddings-") as scratch:
        folder = write_model(Path(scratch) / "model", arguments.shape)
        dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
        oracle = SentenceTransformer(str(folder), device=arguments.device, model_kwargs={"dtype": dtype})
        server, url = start_server(folder, arguments.device, arguments.threads)
        try:

            def ours(some: list[list[str]]) -> tuple[float, list[bytes]]:
                return asyncio.run(over_http(url, some, arguments.concurrency))

            def theirs(some: list[list[str]]) -> float:
                started = time.perf_counter()
                for texts in some:
                    oracle.encode(texts, batch_size=arguments.texts, show_progress_bar=False)
                return time.perf_counter() - started

            warm = requests[: 1 if arguments.device == "cpu" else len(requests)]
            _, found = ours(warm)
            theirs(warm)
            wanted = oracle.encode(requests[0], show_progress_bar=False)
            vectors = np.stack([np.frombuffer(vector, "<f4") for vector in found])
            alike = float((vectors * wanted).sum(1).min())
            if alike < (0.9999 if arguments.device == "cpu" else 0.98):
                raise SystemExit(f"the vectors differ: the cosine of two is {alike:.4f}")
            for _ in range(arguments.runs):
                rows["vserve"].append(count / ours(requests)[0])
                rows["sentence-transformers"].append(count / theirs(requests))
        finally:
            server.terminate()
            server.wait(30)
    medians = {name: statistics.median(values) for name, values in rows.items()}
    ratio = medians["vserve"] / medians["sentence-transformers"]
    where = f"{arguments.threads} CPU threads" if arguments.device == "cpu" else torch.cuda.get_device_name()
    print(
        f"bge-{arguments.shape} shape, {where}, {arguments.requests} requests of {arguments.texts} texts "
        f"({arguments.lengths}, {tokens / count:.0f} tokens each), {arguments.concurrency} at once, medians of "
        f"{arguments.runs} runs in turns; sentence-transformers {__version__}; least cosine {alike:.5f}"
    )
    for name, rate in medians.items():
        low, high = min(rows[name]), max(rows[name])
        print(f"{name:<22}{rate:>9.1f} texts/s ({low:.1f} to {high:.1f}){rate * tokens / count:>12.0f} tok/s")
    print(f"{'ratio':<22}{ratio:>9.2f} (bar {arguments.bar:g})")
    return int(arguments.check and ratio < arguments.bar)


if __name__ == "__main__":
    sys.exit(main())
