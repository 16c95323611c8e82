"""Models that transformers' code computes, on a GPU: whole forwards in CUDA graphs, and the CPU's tokens."""

from __future__ import annotations

import random

import pytest
import torch

from vserve.engine.link.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DENSE = (
    "starcoder2", "gpt_neox", "gemma2", "gemma3_text", "granite", "cohere2", "opt", "gpt2", "phi3", "stablelm", "glm4",
    "olmo3", "smollm3", "exaone4", "nemotron",
)  # fmt: skip
MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "mixtral", "granitemoe")


def requests(count: int = 12, length: int = 16):
    rng = random.Random(3)
    prompts = [[rng.randrange(5, 290) for _ in range(rng.randrange(3, 120))] for _ in range(count)]
    return [(prompt, SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)) for prompt in prompts]


def run(generate, folder, **options) -> list[list[int]]:
    answers, stats = generate(folder, requests(), max_num_seqs=16, model_impl="transformers", **options)
    if options.get("device") != "cpu" and not options.get("enforce_eager"):
        assert stats.num_graph_misses == 0
    return [[token for output in outputs for token in output.token_ids] for outputs in answers]


@pytest.mark.parametrize("model_type", DENSE)
def test_graphs_give_the_tokens_of_the_cpu(generate, foreign_model, model_type) -> None:
    """In fp32, where near-ties are rare: but for one answer of twelve, which may part at one."""
    folder = foreign_model(model_type)
    expected = run(generate, folder, device="cpu")
    found = run(generate, folder, device="cuda", dtype="float32")
    assert sum(ours == theirs for ours, theirs in zip(found, expected, strict=True)) >= 11


@pytest.mark.parametrize("model_type", MIXTURES)
def test_mixtures_go_into_graphs(generate, foreign_model, model_type) -> None:
    folder = foreign_model(model_type)
    graphs = run(generate, folder, device="cuda", dtype="bfloat16")
    eager = run(generate, folder, device="cuda", dtype="bfloat16", enforce_eager=True)
    first = [(ours[0], theirs[0]) for ours, theirs in zip(graphs, eager, strict=True)]
    assert sum(ours == theirs for ours, theirs in first) >= 10, "bf16 rounds otherwise in other shapes"


def test_a_mixture_that_no_graph_takes_says_so(generate, foreign_model) -> None:
    with pytest.raises(Exception, match="pass --dtype bfloat16 there, or --enforce-eager"):
        run(generate, foreign_model("gpt_oss"), device="cuda", dtype="float16")
    assert run(generate, foreign_model("gpt_oss"), device="cuda", dtype="float16", enforce_eager=True)
