"""Models with latent attention, and with sinks and windows, in the real engine: transformers' tokens (fp32, CPU)."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from vserve.engine.describe.reading import read_folder
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.step.runner import ModelRunner
from vserve.engine.weights.loader import load_model

LENGTH = 12


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "deepseek_v2": {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
    "gpt_oss": {},
}


@pytest.fixture(scope="module", params=MODELS)
def latent(request, tiny_model, engine):
    return type(engine)(tiny_model(request.param, **MODELS[request.param]))


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


def test_one_tensor_a_layer_holds_keys_and_values(tiny_model):
    folder = tiny_model("deepseek_v3", **MODELS["deepseek_v3"])
    config = read_folder(folder)
    model = load_model(folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    runner = ModelRunner(model, max_num_seqs=2, max_model_len=64, block_size=16, device=torch.device("cpu"))
    runner.bind_cache(5, torch.float32)
    found = set()
    for layer in model.attention_layers():
        keys, values = layer.cache.keys, layer.cache.values
        assert keys.shape == (5, 16, 1, 40) and values.shape == (5, 16, 1, 32)
        assert keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
        found.add((keys.untyped_storage().data_ptr(), keys.untyped_storage().nbytes()))
    assert sum(size for _, size in found) == 5 * runner.layout.block_bytes(4) == 5 * 16 * 40 * 4 * 2


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
@pytest.mark.slow
def test_twelve_at_once_are_transformers_tokens(latent, batch, expected, options):
    few = "num_gpu_blocks_override" in options
    if few and "gpt_oss" in str(latent.folder):  # whose windowed layers take blocks of their own
        options = options | {"num_gpu_blocks_override": 3 * options["num_gpu_blocks_override"]}
    (answers,), stats = latent.run(requests(batch), **options)
    assert [answer.tokens for answer in answers] == expected
    assert (stats.num_preemptions > 0) == few


def test_a_cached_prefix_changes_nothing(latent, batch, expected):
    (cold, warm), stats = latent.run(requests(batch), requests(batch))
    assert [a.tokens for a in cold] == [a.tokens for a in warm] == expected
    assert stats.prefix_hits > 0
    for prompt, answer in zip(batch, warm, strict=True):
        assert answer.num_cached_tokens == (len(prompt) - 1) // 16 * 16
