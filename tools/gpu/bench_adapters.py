"""Adapters of the 8B shape on an NVIDIA GPU: python tools/gpu/bench_adapters.py [--rank R] [--streams N] [--adapters M]

`start`: how long one takes with --enable-lora and without, first with no kernel compiled before. `engine`: as it serves
the same load (128 tokens in and 256 out, or as many as asked, all streams at once) without --enable-lora, with it and
no adapter, and over all adapters; and how long one takes from the disk and from the host until its first token.
`steps`: single ones, replayed from their graphs, of the base and with adapters. Made-up weights, all seven matrices of
every layer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench_steps import GREEDY, MAX_DECODES, MAX_TOKENS, MIXED_TOKENS, NUM_BLOCKS, PAGE, milliseconds
from model_folder import LLAMA_8B, write_model
from safetensors.torch import save_file

from vserve import LLM, LoRARequest, SamplingParams
from vserve.engine.adapters.layout import AdapterStore, SlotLayout
from vserve.engine.adapters.tables import AdapterTables
from vserve.engine.cache.batch import Shape
from vserve.engine.describe.reading import read_folder
from vserve.engine.link.messages import pack_tokens
from vserve.engine.link.plan import BlockWrite, NewRow, StepPlan
from vserve.engine.start.warm_steps import adapter_steps, warm_up_steps
from vserve.engine.step.graphs import StepGraphs
from vserve.engine.step.runner import ModelRunner
from vserve.engine.weights.loader import load_model

OPTIONS: dict[str, Any] = {"load_format": "dummy", "max_model_len": MAX_TOKENS}
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, rank: int, seed: int) -> Path:
    """Of all seven matrices of the 8B shape, in bfloat16."""
    config, generator = LLAMA_8B, torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    sizes = dict(zip(SEVEN, ((hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden), (hidden, inner),
                             (hidden, inner), (inner, hidden)), strict=True))  # fmt: skip
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (columns, rows) in sizes.items():
            path = f"base_model.model.model.layers.{layer}.{'mlp' if name in SEVEN[4:] else 'self_attn'}.{name}"
            for kind, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                numbers = torch.randn(shape, generator=generator) * 0.01
                tensors[f"{path}.lora_{kind}.weight"] = numbers.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(SEVEN)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


# ---- steps ----
def make_runner(folder: Path, rank: int, slots: int, shapes: list[Shape]) -> ModelRunner:
    """With random caches and slots, and both kinds of graphs of these shapes."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = load_model(
        folder, read_folder(folder), dtype=torch.bfloat16, device=device, load_format="dummy",
        max_model_len=MAX_TOKENS,
    )  # fmt: skip
    runner = ModelRunner(model, max_num_seqs=1024, max_model_len=MAX_TOKENS, block_size=PAGE, device=device)
    store = AdapterStore(SlotLayout(model, rank, SEVEN), torch.bfloat16, pin=True)
    runner.adapters = AdapterTables(store, slots, device, MAX_TOKENS + 1024, 1024)
    runner.adapters.fill_with_noise()
    print(f"a slot takes {runner.adapters.num_bytes / slots / 2**20:.0f} MiB")
    runner.bind_cache(NUM_BLOCKS, torch.bfloat16)
    for step in warm_up_steps(runner.max_num_seqs, MAX_TOKENS):
        runner.dummy_step(*step)
    for num_seqs, num_tokens in adapter_steps(runner.max_num_seqs, MAX_TOKENS):
        runner.dummy_step(num_seqs, num_tokens, GREEDY, adapted=True)
    graphs = runner.plan_graphs(MAX_DECODES, MIXED_TOKENS, ())
    for one in (graphs, runner.adapter_graphs):
        assert isinstance(one, StepGraphs)
        setattr(one, "shapes", lambda: sorted(shapes, key=lambda shape: -shape.tokens))  # noqa: B010
    runner.capture_graphs(graphs)
    return runner


def time_step(runner: ModelRunner, shape: Shape, prompt: int, slots: list[int], seconds: float) -> float:
    """Milliseconds of a step with the shape's decodes, of 256 tokens each, and a prompt of so many; slots: in turns."""
    rng = random.Random(1)
    free = rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    work = [(256, 1)] * shape.decode_rows + ([(0, prompt)] if prompt else [])
    new, blocks = [], []
    for row, (computed, count) in enumerate(work):
        ids = pack_tokens([rng.randrange(3, 128_000) for _ in range(computed + count)])
        new.append(NewRow(row, row, ids, computed + count, computed, GREEDY, slots[row % len(slots)]))
        blocks.append(BlockWrite(row, 0, [free.pop() for _ in range(-(-(computed + count) // PAGE))]))
    rows = list(range(len(work)))
    plan = StepPlan(1, rows, [n for _, n in work], [n for n, _ in work], rows, shape.decode_rows, new, [blocks])
    graphs = runner.graphs if slots == [-1] else runner.adapter_graphs
    graph = graphs.find(plan) if graphs is not None else None
    assert graph is not None and graph.shape == shape, f"the step found {graph and graph.shape}"
    runner.execute(plan)
    runner.sample().wait()
    return milliseconds(graph.graph.replay, seconds)


def steps(folder: Path, rank: int, seconds: float) -> None:
    cases = {  # decodes, tokens of a prompt beside them, adapters
        "1 stream": (Shape(1, 0, 1, 0), 0, 1), "64 streams, 8 adapters": (Shape(64, 0, 64, 0), 0, 8),
        "256 streams, 32 adapters": (Shape(256, 0, 256, 0), 0, 32),
        "64 streams and a prompt": (Shape(64, 16, 1024, 1024), 960, 8),
    }  # fmt: skip
    runner = make_runner(folder, rank, 32, [shape for shape, _, _ in cases.values()])
    for name, (shape, prompt, count) in cases.items():
        pairs = [
            [time_step(runner, shape, prompt, slots, seconds) for slots in ([-1], list(range(count)))] for _ in range(3)
        ]
        base, adapted = (sorted(each)[1] for each in zip(*pairs, strict=True))
        print(
            f"{name:26s} base {base:7.3f} ms   adapted {adapted:7.3f} ms   {base / adapted:.3f} of its speed",
            flush=True,
        )


# ---- the engine ----
def tokens_a_second(llm: LLM, prompts: list[list[int]], answer: int, adapters: list[LoRARequest | None]) -> float:
    """Of answers."""
    sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    given: Any = adapters if any(adapters) else None
    best = 0.0
    for _ in range(3):
        for prompt in prompts:
            prompt[0] = (prompt[0] + 1) % 100_000  # nothing is cached
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False, lora_request=given)
        best = max(best, answer * len(prompts) / (time.perf_counter() - started))
    return best


def engine(folder: Path, scratch: Path, rank: int, streams: int, count: int, prompt: int, answer: int) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 128_000) for _ in range(prompt)] for _ in range(streams)]
    adapters = [LoRARequest(f"a{i}", i + 1, str(write_adapter(scratch / f"a{i}", rank, i))) for i in range(count)]
    started = time.perf_counter()
    with LLM(str(folder), **OPTIONS) as llm:
        print(f"without --enable-lora: start {time.perf_counter() - started:5.1f} s")
        plain = tokens_a_second(llm, prompts, answer, [None] * streams)
        print(f"without --enable-lora: {plain:9.0f} tokens a second, out", flush=True)
    started = time.perf_counter()
    with LLM(str(folder), **OPTIONS, enable_lora=True, max_loras=count, max_cpu_loras=2 * count) as llm:
        print(f"with it: start {time.perf_counter() - started:5.1f} s")
        found = tokens_a_second(llm, prompts, answer, [None] * streams)
        print(f"with it, no adapter: {found:9.0f}, {found / plain:.3f}", flush=True)
        one = SamplingParams(temperature=0.0, max_tokens=1)
        times = []
        for turn in (adapters, adapters):
            started = time.perf_counter()
            for adapter in turn:
                llm.generate([[5] * 8], one, use_tqdm=False, lora_request=adapter)
            times.append((time.perf_counter() - started) / count)
        print(
            f"first token of an adapter: from the disk {1e3 * times[0]:.0f} ms, from its slot {1e3 * times[1]:.0f} ms"
        )
        found = tokens_a_second(llm, prompts, answer, [adapters[i % count] for i in range(streams)])
        print(f"over {count} adapters: {found:9.0f}, {found / plain:.3f}", flush=True)


# ---- the start ----
def starts(folder: Path, scratch: Path, count: int) -> None:
    with_adapters = {"enable_lora": True, "max_loras": count}
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):  # cold, then warm twice; in turns, for the host may get faster as its files are read
        for adapters, found in times.items():
            started = time.perf_counter()
            with (
                patch.dict(os.environ, TRITON_CACHE_DIR=str(scratch / f"kernels-{adapters}")),
                LLM(str(folder), **OPTIONS, **(with_adapters if adapters else {})),
            ):
                found.append(time.perf_counter() - started)
    for adapters, found in times.items():
        print(f"{'with' if adapters else 'without'} --enable-lora: start {', '.join(f'{one:.1f}' for one in found)} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each, for the engine (default: 128)")
    parser.add_argument("--answer", type=int, default=256, help="tokens of each, for the engine (default: 256)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each step that is timed (default: 1)")
    parser.add_argument("--only", choices=("steps", "engine", "start"), help="one of the parts")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_adapters.py times a GPU: run it on a machine with one")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch) / "llama-8b")
        if arguments.only in (None, "start"):  # before: this process holds no memory of the card yet
            starts(folder, Path(scratch), arguments.adapters)
        if arguments.only in (None, "engine"):
            load = (arguments.streams, arguments.adapters, arguments.prompt, arguments.answer)
            engine(folder, Path(scratch), arguments.rank, *load)
        if arguments.only in (None, "steps"):
            steps(folder, arguments.rank, arguments.seconds)


if __name__ == "__main__":
    main()
