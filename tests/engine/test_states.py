"""Models with recurrent states in the real engine: transformers' tokens whatever happens on the way (fp32, CPU)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from vserve.engine.link.sampling_params import SamplingParams

LENGTH = 20
MARGIN = 1e-3  # of log-probabilities: nearer than that, either token is right
FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


@pytest.fixture(params=FAMILIES)
def engine_of_family(request, tiny_model, engine):
    return type(engine)(tiny_model(request.param))


def greedy(**options) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, **options)


def drawn(*sizes: int) -> list[list[int]]:
    rng = random.Random(sum(sizes))
    return [[rng.randrange(5, 290) for _ in range(size)] for size in sizes]


def test_in_company_in_chunks_and_preempted_they_are_transformers_tokens(engine_of_family) -> None:
    prompts = drawn(3, 4, 6, 90, 65, 64, 130, 63)
    (answers,), stats = engine_of_family.run(
        [(prompt, greedy(logprobs=1, prompt_logprobs=0)) for prompt in prompts], max_num_batched_tokens=80,
        max_num_seqs=8, max_model_len=192, num_gpu_blocks_override=25, block_size=8, enable_prefix_caching=False,
    )  # fmt: skip
    assert stats.num_preemptions > 0
    oracle = AutoModelForCausalLM.from_pretrained(engine_of_family.folder, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = [*prompt, *answer.tokens]
        with torch.inference_mode():
            expected = oracle(torch.tensor([whole])).logits[0].log_softmax(-1)
        for row, token in zip(expected[len(prompt) - 1 : -1], answer.tokens, strict=True):
            assert row[token] > row.max() - MARGIN
        found = [*answer.prompt_logprobs, *answer.logprobs]
        for row, token, scored in zip(expected[:-1], whole[1:], found, strict=True):
            assert scored.logprob == pytest.approx(row[token].item(), abs=MARGIN)
