"""Log-probabilities of prompts and outputs are those of transformers, whatever the engine does on the way (fp32)."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from vserve.engine.link.sampling_params import SamplingParams

TOP = 3
LENGTH = 20


@pytest.fixture(scope="module")
def reference(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)

    @torch.inference_mode()
    def logprobs(tokens: list[int]) -> torch.Tensor:
        """[n, V]: of what follows each token."""
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(dim=-1)

    return logprobs


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    return [[rng.randrange(5, 290) for _ in range(length)] for length in (1, 2, 15, 16, 31, 90, 120)]


def scored(k: int = TOP, **options) -> SamplingParams:
    settings = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True, "logprobs": k, "prompt_logprobs": k}
    return SamplingParams(**{**settings, **options})


def check(reference, prompt, answer, k: int = TOP) -> None:
    tokens = prompt + answer.tokens
    expected = reference(tokens)
    entries = answer.prompt_logprobs + answer.logprobs
    assert len(answer.prompt_logprobs) == len(prompt) - 1 and len(entries) == len(tokens) - 1
    for place, entry in enumerate(entries):
        row, token = expected[place], tokens[place + 1]
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        # Neighbours in rank may lie closer together than two implementations do.
        assert (row > row[token] + 1e-3).sum() < entry.rank <= (row > row[token] - 1e-3).sum() + 1
        values, _ = row.topk(k)
        assert len(entry.top_ids) == k and entry.top_logprobs == pytest.approx(values.tolist(), abs=1e-3)
        assert row[entry.top_ids].tolist() == pytest.approx(entry.top_logprobs, abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"max_num_batched_tokens": 17, "max_num_seqs": 3},
        {"max_num_seqs": 1},
        {"num_gpu_blocks_override": 9, "max_model_len": 144},
        {"block_size": 4, "num_gpu_blocks_override": 36, "max_model_len": 144, "max_num_batched_tokens": 24},
    ],
    ids=["roomy", "chunks of 16", "chunks of 17", "alone", "preempted", "preempted in chunks"],
)
def test_equal_to_transformers(engine, reference, prompts, options):
    (answers,), stats = engine.run([(p, scored()) for p in prompts], **options)
    for prompt, answer in zip(prompts, answers, strict=True):
        check(reference, prompt, answer)
    assert ("num_gpu_blocks_override" in options) == (stats.num_preemptions > 0)


def test_the_prefix_cache_is_not_read_but_written(engine, reference, prompts):
    prompt = prompts[-1]
    plain = SamplingParams(max_tokens=1, temperature=0.0)
    (first, second, third), stats = engine.run([(prompt, scored())], [(prompt, scored())], [(prompt, plain)])
    check(reference, prompt, first[0])
    check(reference, prompt, second[0])
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, 0)
    assert third[0].num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert stats.prefix_queries == len(prompt)


def test_others_in_the_batch_pay_and_get_nothing(engine, reference, prompts):
    """Beside the scored: requests that ask for other numbers of tokens, and for none."""
    plain = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    batch = []
    for prompt in prompts:
        batch += [(prompt, scored()), (prompt, plain), (prompt, scored(0)), (prompt, scored(5, logprobs=None))]
    (answers,), _ = engine.run(batch, max_num_seqs=28, max_num_batched_tokens=64)
    for (prompt, sampling), answer in zip(batch, answers, strict=True):
        if sampling.prompt_logprobs is None:
            assert answer.prompt_logprobs is None and answer.logprobs == []
        else:
            assert [len(e.top_ids) for e in answer.prompt_logprobs] == [sampling.prompt_logprobs] * (len(prompt) - 1)
        if sampling == scored():
            check(reference, prompt, answer)


def test_prompts_of_raw_logits_whatever_is_sampled(engine, reference, prompts):
    prompt = prompts[-2]
    changed = scored(
        temperature=1.3, seed=5, logit_bias={7: 50.0}, allowed_token_ids=(7, 8), repetition_penalty=1.5, max_tokens=2
    )
    (answers,), _ = engine.run([(prompt, changed)])
    check(reference, prompt, answers[0])
