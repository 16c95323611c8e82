"""measure the engine without HTTP: all prompts at once"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ....engine.errors import ConfigError
from . import datasets
from .load import BenchError, write_json

if TYPE_CHECKING:
    from ...offline.llm import LLM


EXAMPLES = (
    "vserve bench throughput ./my-model --input-len 1024 --output-len 128",
    "vserve bench throughput ./my-model --num-prompts 200 --output-json found.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from .engine_options import add_engine_arguments

    add_engine_arguments(parser)
    datasets.add_arguments(parser, num_prompts=1000)
    group = parser.add_argument_group("measurement")
    group.add_argument("--n", type=int, default=1, metavar="N", help="answers to each prompt (default: 1)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0, greedy)")
    group.add_argument("--disable-detokenize", action="store_true", help="make token ids only, no text")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the results there")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    from .engine_options import run_with_llm

    return run_with_llm(arguments, measure)


def measure(arguments: argparse.Namespace, llm: LLM) -> None:
    from ...offline.sampling_params import SamplingParams
    from .engine_options import random_numbers

    datasets.check(arguments)
    vocabulary = None
    if arguments.dataset_name != "custom":
        vocabulary = datasets.Vocabulary.load(arguments.opt_tokenizer or llm.model.root)
    prompts = datasets.make_dataset(arguments, random_numbers(arguments), vocabulary).sample(arguments.num_prompts)
    base = SamplingParams(
        n=arguments.n, temperature=arguments.temperature, ignore_eos=True, detokenize=not arguments.disable_detokenize
    )
    by_length = {length: dataclasses.replace(base, max_tokens=length) for length in {p.output_len for p in prompts}}
    inputs: list[str | list[int]] = []
    for prompt in prompts:
        if isinstance(prompt.prompt, list) and isinstance(prompt.prompt[0], dict):
            raise ConfigError("the file has chat messages: bench throughput takes prompts of text or token ids")
        inputs.append(prompt.prompt)
    params = [by_length[prompt.output_len] for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=not arguments.disable_tqdm)
    seconds = time.perf_counter() - start
    if failed := [c.stop_reason for output in outputs for c in output.outputs if c.finish_reason == "error"]:
        raise BenchError(f"{len(failed)} requests failed: {failed[0]}")
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    rates = len(outputs) / seconds, (num_input + num_output) / seconds, num_output / seconds
    print(
        "Throughput: {:.2f} requests/s, {:.2f} total tokens/s, {:.2f} output tokens/s\n".format(*rates)
        + f"Elapsed time (s):         {seconds:.3f}\n"
        f"Total num prompt tokens:  {num_input}\n"
        f"Total num output tokens:  {num_output}"
    )
    if arguments.output_json:
        write_json(arguments.output_json, {
            "elapsed_time": seconds, "num_requests": len(outputs), "total_num_tokens": num_input + num_output,
            "num_prompt_tokens": num_input, "num_output_tokens": num_output,
            "requests_per_second": rates[0], "tokens_per_second": rates[1], "output_tokens_per_second": rates[2],
        })  # fmt: skip
