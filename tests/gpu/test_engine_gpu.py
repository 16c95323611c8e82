"""The engine on a real GPU in bfloat16: two layers of the 8B shape against float32, batching, and preemption."""

from __future__ import annotations

import json

import pytest
import torch

from vserve.engine.link.sampling_params import SamplingParams

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
    return folder


@pytest.fixture
def answer(generate, checkpoint):
    """answer(prompts, sampling, **options) → (tokens, their log-probabilities) of each prompt, and statistics."""

    def run(prompts, sampling, **options):
        requests = [(prompt, sampling) for prompt in prompts]
        answers, stats = generate(checkpoint, requests, max_model_len=4096, **options)
        assert all(outputs[-1].finish_reason == "length" for outputs in answers)
        results = []
        for outputs in answers:
            tokens = [token for output in outputs for token in output.token_ids]
            results.append((tokens, [entry for output in outputs for entry in output.logprobs or []]))
        return results, stats

    return run


def random_prompts(*lengths):
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    return [torch.randint(3, 128256, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("step", [1024, 4096])
def test_two_layers_of_the_8b_shape_match_float32(checkpoint, answer, step):
    from transformers import LlamaForCausalLM

    prompts = random_prompts(5, 17, 300, 1111, 2500)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=8)
    results, stats = answer(prompts, sampling, max_num_batched_tokens=step)
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


def test_chunks_cache_and_preemption_leave_the_greedy_answer(answer):
    """In bf16 near ties may fall either way, so the answers are compared where the margin is clear."""
    prompts = random_prompts(700, 1300, 64, 33)
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, logprobs=2)
    whole, _ = answer(prompts, sampling, enable_prefix_caching=False)
    for options in (
        {"enforce_eager": True},
        {"max_num_batched_tokens": 256},
        {"num_gpu_blocks_override": 256, "max_num_batched_tokens": 512},
    ):
        other, stats = answer(prompts * 3, sampling, **options)
        assert stats.num_free_blocks == stats.num_blocks
        for i, (tokens, _) in enumerate(other):
            expected, margins = whole[i % len(prompts)]
            for at, (a, b) in enumerate(zip(tokens, expected, strict=True)):
                if a != b:
                    top = margins[at].top_logprobs
                    assert top[0] - top[1] < 0.1, f"request {i} differs at {at} with a clear margin"
                    break


def test_seeded_sampling_with_every_filter_completes(answer):
    prompts = random_prompts(*range(1, 40))
    sampling = SamplingParams(
        max_tokens=16, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=0.2, seed=7, ignore_eos=True, logit_bias={5: 2.0, 9: -100.0}, min_tokens=4,
        stop_token_ids=(9,),  # and its bias, without which it would cut an answer short in one of some hundred runs
    )  # fmt: skip
    results, stats = answer(prompts, sampling)
    assert all(len(tokens) == 16 for tokens, _ in results)
    assert stats.num_free_blocks == stats.num_blocks


def test_graphs_give_the_tokens_of_eager_steps_in_float32(answer):
    prompts = random_prompts(5, 80, 300, 1111, 40, 7)
    sampling = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    graphs, stats = answer(prompts, sampling, dtype="float32", max_mixed_tokens=256)
    assert stats.num_graph_misses == 0 and stats.num_late_compilations == 0
    eager, _ = answer(prompts, sampling, dtype="float32", max_mixed_tokens=256, enforce_eager=True)
    assert [tokens for tokens, _ in graphs] == [tokens for tokens, _ in eager]
