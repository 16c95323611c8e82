"""Families whose layers differ from llama's in the real engine: transformers' tokens in company (fp32, CPU)."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from vserve.engine.model_config import ModelConfig
from vserve.engine.request import SamplingParams

LENGTH = 10
MARGIN = 1e-3  # of log-probabilities: nearer than that, either token is right
# Blocks of the cache: little more than the longest context takes, of which layers with a window need several kinds.
FAMILIES = {
    "gemma2": 20,
    "gemma3": 30,
    "phi3": 14,
    "glm4": 14,
    "granite": 14,
    "cohere2": 30,
    "olmo3": 20,
    "smollm3": 14,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_twelve_at_once_in_a_tiny_cache_are_transformers_tokens(family, tiny_model, engine) -> None:
    """Prompts longer than the windows, in chunks, with preemptions; prompts are scored, too."""
    prompts = [[random.randrange(5, 290) for _ in range(random.randint(3, 60))] for _ in range(12)]
    sampling = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    own = type(engine)(tiny_model(family))
    (answers,), stats = own.run(
        [(prompt, sampling) for prompt in prompts], max_num_batched_tokens=48, max_num_seqs=12, max_model_len=72,
        num_gpu_blocks_override=FAMILIES[family], block_size=8, enable_prefix_caching=False,
    )  # fmt: skip
    windows = any(layer.attention.window for layer in ModelConfig.from_folder(own.folder).layers)
    assert windows or stats.num_preemptions > 0  # windows give blocks back
    oracle = AutoModelForCausalLM.from_pretrained(own.folder, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = [*prompt, *answer.tokens]
        with torch.inference_mode():
            expected = oracle(torch.tensor([whole])).logits[0].log_softmax(-1)
        for row, token in zip(expected[len(prompt) - 1 : -1], answer.tokens, strict=True):
            assert row[token] > row.max() - MARGIN
        found = [*answer.prompt_logprobs, *answer.logprobs]
        for row, token, scored in zip(expected[:-1], whole[1:], found, strict=True):
            assert scored.logprob == pytest.approx(row[token].item(), abs=MARGIN)
