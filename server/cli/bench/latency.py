"""measure one batch without HTTP, from its submission to its last token"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ....engine.errors import ConfigError
from .datasets import Vocabulary
from .load import BenchError, write_json

if TYPE_CHECKING:
    from ...offline.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


EXAMPLES = (
    "vserve bench latency ./my-model --batch-size 8",
    "vserve bench latency ./my-model --input-len 1024 --output-len 128 --output-json found.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from .engine_options import add_engine_arguments

    add_engine_arguments(parser)
    group = parser.add_argument_group("measurement")
    for name, default, help in (
        ("--input-len", 32, "tokens of a prompt"),
        ("--output-len", 128, "tokens to generate"),
        ("--batch-size", 8, "prompts at once"),
        ("--n", 1, "answers to each prompt"),
        ("--num-iters-warmup", 10, "runs that are not counted"),
        ("--num-iters", 30, "runs that are"),
    ):
        group.add_argument(name, type=int, default=default, metavar="N", help=f"{help} (default: {default})")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0, greedy)")
    group.add_argument("--disable-detokenize", action="store_true", help="make token ids only, no text")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the results there")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    from .engine_options import run_with_llm

    return run_with_llm(arguments, measure)


def measure(arguments: argparse.Namespace, llm: LLM) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]

    from ...offline.sampling_params import SamplingParams
    from .engine_options import random_numbers

    for name in ("input_len", "output_len", "batch_size", "num_iters_warmup", "num_iters"):
        least = 0 if name == "num_iters_warmup" else 1
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: it must be at least {least}")
    rng = random_numbers(arguments)
    vocabulary = Vocabulary.load(arguments.opt_tokenizer or llm.model.root)
    params = SamplingParams(
        n=arguments.n, temperature=arguments.temperature, ignore_eos=True, max_tokens=arguments.output_len,
        detokenize=not arguments.disable_detokenize,
    )  # fmt: skip

    def once() -> float:
        # New prompts each time: the prefix cache would answer for the old ones.
        prompts = [vocabulary.token_ids(rng, arguments.input_len) for _ in range(arguments.batch_size)]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        if failed := [c.stop_reason for output in outputs for c in output.outputs if c.finish_reason == "error"]:
            raise BenchError(f"{len(failed)} requests failed: {failed[0]}")
        return seconds

    for _ in tqdm(range(arguments.num_iters_warmup), desc="Warmup iterations", disable=arguments.disable_tqdm):
        once()
    latencies = [once() for _ in tqdm(range(arguments.num_iters), desc="Iterations", disable=arguments.disable_tqdm)]
    average = statistics.fmean(latencies)
    percentiles = {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES}
    print(f"Avg latency: {average:.6f} seconds")
    for percentile, seconds in percentiles.items():
        print(f"{percentile}% percentile latency: {seconds:.6f} seconds")
    if arguments.output_json:
        write_json(arguments.output_json, {"avg_latency": average, "latencies": latencies, "percentiles": percentiles})
