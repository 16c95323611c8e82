"""A model with latent attention in the real engine: transformers' tokens, whatever happens on the way (fp32, CPU)."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from vserve.engine.request import SamplingParams

LENGTH = 12


@pytest.fixture(scope="module")
def latent(tiny_model, engine):
    return type(engine)(tiny_model("deepseek_v3", rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 0.8,
    }))  # fmt: skip


@pytest.fixture(scope="module")
def batch():
    rng = random.Random(5)
    shared = [rng.randrange(5, 290) for _ in range(40)]
    return [shared[: rng.randrange(41)] + [rng.randrange(5, 290) for _ in range(rng.randint(3, 60))] for _ in range(12)]


@pytest.fixture(scope="module")
def expected(latent, batch):
    """transformers' greedy tokens."""
    oracle = AutoModelForCausalLM.from_pretrained(latent.folder, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for prompt in batch:
            out = oracle.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
            found.append(out[0, len(prompt) :].tolist())
    return found


def requests(batch):
    return [(prompt, SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)) for prompt in batch]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 17, "max_num_seqs": 12},
        {"num_gpu_blocks_override": 12, "max_model_len": 120},
        {"num_gpu_blocks_override": 30, "max_model_len": 120, "block_size": 4, "enable_prefix_caching": False},
    ],
    ids=["roomy", "chunks", "preemption", "small pages"],
)
def test_twelve_at_once_are_transformers_tokens(latent, batch, expected, options):
    (answers,), stats = latent.run(requests(batch), **options)
    assert [answer.tokens for answer in answers] == expected
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in options)


def test_a_cached_prefix_changes_nothing(latent, batch, expected):
    (cold, warm), stats = latent.run(requests(batch), requests(batch))
    assert [a.tokens for a in cold] == [a.tokens for a in warm] == expected
    assert stats.prefix_hits > 0
    for prompt, answer in zip(batch, warm, strict=True):
        assert answer.num_cached_tokens == (len(prompt) - 1) // 16 * 16
