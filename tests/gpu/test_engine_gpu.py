"""The engine on a real GPU in bfloat16: two layers of the 8B shape against float32, batching, and preemption."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest
import torch

from vserve.engine.config import EngineConfig
from vserve.engine.request import SamplingParams
from vserve.server.engine_client import EngineClient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TWO_LAYERS = dict(
    vocab_size=128256, hidden_size=4096, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, intermediate_size=14336, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0,
    tie_word_embeddings=False, initializer_range=0.02, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(torch.seed() % 2**31)
    folder = tmp_path_factory.mktemp("two-layers")
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**TWO_LAYERS)).to(torch.bfloat16)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    del model
    torch.cuda.empty_cache()
    return folder


async def answers(folder, prompts, sampling, **options):
    """Token ids and log-probabilities of each prompt, all at once through the real engine loop."""
    client = EngineClient(
        EngineConfig(str(folder), engine_in_process=True, gpu_memory_utilization=0.4, max_model_len=4096, **options)
    )
    await client.start()

    async def one(prompt):
        mailbox = client.submit(prompt, sampling)
        tokens, logprobs = [], []
        while True:
            output = await mailbox.get()
            tokens += output.token_ids
            logprobs += output.logprobs or []
            if output.finish_reason is not None:
                assert output.finish_reason == "length", output
                return tokens, logprobs

    try:
        results = await asyncio.gather(*(one(prompt) for prompt in prompts))
        stats = client.stats
    finally:
        await client.close()
    return results, stats


def generate(*arguments, **options):
    results = asyncio.run(answers(*arguments, **options))
    gc.collect()  # the engine's objects form cycles, and its cache is large
    torch.cuda.empty_cache()
    return results


def random_prompts(*lengths):
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    return [torch.randint(3, 128256, (n,), generator=generator).tolist() for n in lengths]


def test_two_layers_of_the_8b_shape_match_float32(checkpoint):
    from transformers import LlamaForCausalLM

    prompts = random_prompts(5, 17, 300, 1111, 2500)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=8)
    results, stats = generate(checkpoint, prompts, sampling, max_num_batched_tokens=1024)
    assert stats.num_free_blocks == stats.num_blocks
    oracle = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()
    worst = 0.0
    for prompt, (tokens, logprobs) in zip(prompts, results, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + tokens], device="cuda")
            expected = oracle(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        for i, (token, got) in enumerate(zip(tokens, logprobs, strict=True)):
            ids_, values = torch.tensor([token, *got.top_ids]), torch.tensor([got.logprob, *got.top_logprobs])
            worst = max(worst, (expected[i, ids_.cuda()].cpu() - values).abs().max().item())
            # bf16 may swap near ties, never anything clear
            assert expected[i].max() - expected[i, token] < 0.1
    print(f"largest log-probability error {worst:.4f}")
    assert worst < 0.1


def test_chunks_cache_and_preemption_leave_the_greedy_answer(checkpoint):
    """In bf16 near ties may fall either way, so the answers are compared where the margin is clear."""
    prompts = random_prompts(700, 1300, 64, 33)
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, logprobs=2)
    whole, _ = generate(checkpoint, prompts, sampling, enable_prefix_caching=False)
    for options in (
        {"enforce_eager": True},
        {"max_num_batched_tokens": 256},
        {"num_gpu_blocks_override": 256, "max_num_batched_tokens": 512},
    ):
        other, stats = generate(checkpoint, prompts * 3, sampling, **options)
        assert stats.num_free_blocks == stats.num_blocks
        for i, (tokens, _) in enumerate(other):
            expected, margins = whole[i % len(prompts)]
            for at, (a, b) in enumerate(zip(tokens, expected, strict=True)):
                if a != b:
                    top = margins[at].top_logprobs
                    assert top[0] - top[1] < 0.1, f"request {i} differs at {at} with a clear margin"
                    break


def test_seeded_sampling_with_every_filter_completes(checkpoint):
    prompts = random_prompts(*range(1, 40))
    sampling = SamplingParams(
        max_tokens=16, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=0.2, seed=7, ignore_eos=True, logit_bias={5: 2.0}, min_tokens=4, stop_token_ids=(9,),
    )  # fmt: skip

    results, stats = generate(checkpoint, prompts, sampling)
    assert all(len(tokens) == 16 for tokens, _ in results)
    assert stats.num_free_blocks == stats.num_blocks


def test_graphs_give_the_tokens_of_eager_steps_in_float32(checkpoint):
    prompts = random_prompts(5, 80, 300, 1111, 40, 7)
    sampling = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    graphs, stats = generate(checkpoint, prompts, sampling, dtype="float32", max_mixed_tokens=256)
    assert stats.num_graph_misses == 0 and stats.num_late_compilations == 0
    eager, _ = generate(checkpoint, prompts, sampling, dtype="float32", max_mixed_tokens=256, enforce_eager=True)
    assert [tokens for tokens, _ in graphs] == [tokens for tokens, _ in eager]
