"""Families whose layers differ from llama's in the real engine: transformers' tokens in company (fp32, CPU)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from vserve.engine.cache.kv_layout import KVLayout
from vserve.engine.describe.reading import read_folder
from vserve.engine.link.sampling_params import SamplingParams

from ..tiny_models import PICTURES, reference

LENGTH = 14
MARGIN = 1e-3  # of log-probabilities: nearer than that, either token is right
FAMILIES = (
    "gemma2", "gemma3", "gemma4_text", "phi3", "glm4", "granite", "cohere2", "olmo3", "smollm3", "minimax_m2",
    "mimo_v2_flash", "hy_v3", "laguna", "llama4_text", "mistral4",
)  # fmt: skip
WITH_PICTURES = ("mistral3", "qwen3_vl_moe", "glm4v")  # the layers of others are those of text


@pytest.fixture(params=[*FAMILIES, *(
    pytest.param(kind, marks=() if kind in WITH_PICTURES else pytest.mark.slow) for kind in PICTURES
)])  # fmt: skip
def engine_of_family(request, tiny_model, engine):
    return type(engine)(tiny_model(request.param))


def test_twelve_at_once_in_a_tiny_cache_are_transformers_tokens(engine_of_family) -> None:
    """Prompts longer than the windows, in chunks; short ones before them outgrow the cache, and some are preempted.
    Prompts are scored, too."""
    sizes = [random.randint(3, 6) for _ in range(8)] + [random.randint(20, 60) for _ in range(4)]
    prompts = [[random.randrange(5, 290) for _ in range(size)] for size in sizes]
    config = read_folder(Path(engine_of_family.folder))
    layout = KVLayout.of(config.kv_specs(), 8, 128)
    sampling = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    (answers,), stats = engine_of_family.run(
        [(prompt, sampling) for prompt in prompts], max_num_batched_tokens=48, max_num_seqs=12, max_model_len=128,
        num_gpu_blocks_override=layout.request_blocks(128, chunk=48), block_size=8, enable_prefix_caching=False,
        language_model_only=config.pictures,
    )  # fmt: skip
    assert stats.num_preemptions > 0
    oracle = reference(engine_of_family.folder, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = [*prompt, *answer.tokens]
        with torch.inference_mode():
            expected = oracle(torch.tensor([whole])).logits[0].log_softmax(-1)
        for row, token in zip(expected[len(prompt) - 1 : -1], answer.tokens, strict=True):
            assert row[token] > row.max() - MARGIN
        found = [*answer.prompt_logprobs, *answer.logprobs]
        for row, token, scored in zip(expected[:-1], whole[1:], found, strict=True):
            assert scored.logprob == pytest.approx(row[token].item(), abs=MARGIN)
