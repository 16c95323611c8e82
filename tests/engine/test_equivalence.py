"""The same tokens whatever the engine does on the way: chunks, cache hits, preemption, company (fp32, CPU)."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from vserve.engine.link.messages import unpack_tokens
from vserve.engine.link.sampling_params import SamplingParams

from .conftest import RANKS

LENGTH = 24


def prompts(count: int, low: int = 3, high: int = 120) -> list[list[int]]:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # shown when a test fails
    rng = random.Random(seed)
    return [[rng.randrange(5, 290) for _ in range(rng.randint(low, high))] for _ in range(count)]


def greedy(**options) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, **options)


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=LENGTH, temperature=0.9, top_p=0.95, top_k=40, seed=seed, ignore_eos=True, repetition_penalty=1.05
    )


@pytest.fixture(scope="module")
def alone(engine):
    """Each prompt by itself in a roomy engine: what every other way must equal."""
    batch = [(p, greedy()) for p in prompts(6)] + [(p, seeded(i)) for i, p in enumerate(prompts(3))]
    waves, _ = engine.run(*([request] for request in batch), enable_prefix_caching=False)
    return batch, [wave[0].tokens for wave in waves]


def tokens(answers):
    assert {a.finish_reason for a in answers} == {"length"}
    return [a.tokens for a in answers]


@pytest.mark.parametrize("budget", [16, 17, 64])
def test_chunked_prefill_changes_nothing(engine, alone, budget):
    batch, expected = alone
    (answers,), _ = engine.run(batch, max_num_batched_tokens=budget, max_num_seqs=16)
    assert tokens(answers) == expected


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_the_block_size_changes_nothing(engine, alone, block_size):
    batch, expected = alone
    (answers,), _ = engine.run(batch, block_size=block_size)
    assert tokens(answers) == expected


def test_a_cached_prefix_changes_nothing(engine, alone):
    batch, expected = alone
    (cold, warm), stats = engine.run(batch, batch)
    assert tokens(cold) == tokens(warm) == expected
    assert stats.prefix_hits > 0
    for (prompt, _), answer in zip(batch, warm, strict=True):
        assert answer.num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_generated_tokens_are_cached_too(engine, alone):
    batch, expected = alone
    longer = [(prompt + out, greedy()) for (prompt, _), out in zip(batch, expected, strict=True)]
    (cold,), _ = engine.run(longer, enable_prefix_caching=False)
    (_, warm), _ = engine.run(batch, longer)
    assert tokens(warm) == tokens(cold)
    for (prompt, _), answer in zip(longer, warm, strict=True):
        # All full blocks but that of the last token, whose key was never computed.
        assert answer.num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_preemption_changes_nothing(engine, alone):
    batch, expected = alone
    for caching in (True, False):
        (answers,), stats = engine.run(
            batch, num_gpu_blocks_override=12, max_model_len=160, enable_prefix_caching=caching
        )
        assert tokens(answers) == expected
        assert stats.num_preemptions > 0


def test_company_changes_nothing(engine, alone):
    batch, expected = alone
    others = [(p, seeded(100 + i) if i % 2 else greedy()) for i, p in enumerate(prompts(32))]
    (answers,), _ = engine.run(batch + others, max_num_seqs=48)
    assert [a.tokens for a in answers[: len(batch)]] == expected


def test_a_seed_is_a_promise_and_its_absence_is_not(engine):
    prompt = prompts(1)[0]
    hot = [(prompt, SamplingParams(max_tokens=LENGTH, temperature=1.5, seed=s, ignore_eos=True)) for s in (1, 1, 2)]
    free = [(prompt, SamplingParams(max_tokens=LENGTH, temperature=1.5, ignore_eos=True))] * 2
    (answers,), _ = engine.run(hot + free)
    one, again, two, some, other = tokens(answers)
    assert one == again != two
    assert some != other


def test_stops_come_from_ids_and_lengths(engine, alone):
    batch, expected = alone
    (prompt, _), out = batch[0], expected[0]
    stop = out[10]
    first = out.index(stop)
    (answers,), _ = engine.run(
        [
            (prompt, SamplingParams(max_tokens=LENGTH, temperature=0.0, stop_token_ids=(stop,))),
            (prompt, SamplingParams(max_tokens=LENGTH, temperature=0.0, eos_token_ids=(stop,))),
            (prompt, SamplingParams(max_tokens=LENGTH, temperature=0.0, eos_token_ids=(stop,), ignore_eos=True)),
            (prompt, SamplingParams(max_tokens=LENGTH, temperature=0.0, eos_token_ids=(stop,), min_tokens=LENGTH)),
            (prompt, SamplingParams(max_tokens=first + 1, temperature=0.0, stop_token_ids=(stop,))),
        ]
    )
    by_id, by_eos, ignored, masked, both = answers
    assert (by_id.tokens, by_id.finish_reason, by_id.stop_reason) == (out[: first + 1], "stop", stop)
    assert (by_eos.tokens, by_eos.finish_reason, by_eos.stop_reason) == (out[: first + 1], "stop", None)
    assert (ignored.tokens, ignored.finish_reason) == (out, "length")
    assert len(masked.tokens) == LENGTH and stop not in masked.tokens[: LENGTH - 1]
    assert both.finish_reason == "stop"


def test_the_context_ends_where_it_ends(engine):
    prompt = prompts(1, 30, 30)[0]
    (answers,), _ = engine.run(
        [(prompt, SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True))], max_model_len=64
    )
    assert len(answers[0].tokens) == 64 - 30 and answers[0].finish_reason == "length"


def test_logit_bias_decides(engine):
    prompt = prompts(1)[0]
    (answers,), _ = engine.run(
        [(prompt, SamplingParams(max_tokens=5, temperature=t, logit_bias={77: 100.0}, seed=1)) for t in (0.0, 1.0)]
    )
    assert answers[0].tokens == answers[1].tokens == [77] * 5


def test_log_probabilities_are_of_the_raw_logits(engine, alone):
    batch, expected = alone
    prompt = batch[0][0]
    plain = greedy(logprobs=3)
    changed = SamplingParams(
        max_tokens=1, temperature=0.7, seed=3, logprobs=3, logit_bias={int(expected[0][0]): -100.0}, min_tokens=1
    )
    (answers,), _ = engine.run([(prompt, plain), (prompt, changed), (prompt, greedy(logprobs=0)), (prompt, greedy())])
    first, other, sampled_only, none = answers
    assert first.tokens == expected[0]
    for token, row in zip(first.tokens, first.logprobs, strict=True):
        assert row.rank == 1 and row.top_ids[0] == token
        assert row.logprob == pytest.approx(row.top_logprobs[0], abs=1e-5)
        assert sorted(row.top_logprobs, reverse=True) == row.top_logprobs and len(row.top_ids) == 3
    assert other.logprobs[0].top_logprobs == pytest.approx(first.logprobs[0].top_logprobs, abs=1e-4)
    assert other.tokens[0] != expected[0][0]
    assert [row.logprob for row in sampled_only.logprobs] == pytest.approx(
        [row.logprob for row in first.logprobs], abs=1e-4
    )
    assert none.logprobs == []


def test_of_the_last_layer_a_prompt_needs_its_last_token_alone(engine, alone, monkeypatch):
    """On some GPUs its attention computes no more; here, what it may leave out is poison."""
    from vserve.engine.layers import attention

    real, poisoned = attention.prefill_attention, []

    def last_only(query, cache, batch, scoring, *, work, out):
        real(query, cache, batch, scoring, work=work, out=out)
        if work.last_only:
            starts = batch.query_start.tolist()
            last = [end - 1 for start, end in pairwise(starts) if end > start]
            kept = out[last]
            out[starts[0] : starts[-1]] = float("nan")
            out[last] = kept
            poisoned.append(starts)

    monkeypatch.setattr(attention, "prefill_attention", last_only)
    batch, expected = alone
    scored = (batch[0][0], greedy(prompt_logprobs=1))
    (answers,), _ = engine.run([*batch, scored], max_num_batched_tokens=64, max_num_seqs=16)
    assert tokens(answers) == [*expected, expected[0]]
    assert len(poisoned) > 2 and all(entry.logprob < 0 for entry in answers[-1].prompt_logprobs)


def test_nan_fails_only_its_own_request(engine, monkeypatch):
    from vserve.engine.models.blocks import CausalLM

    real = CausalLM.forward

    def poisoned(self, input_ids, positions, batch, embeddings=None, wanted=None):
        hidden = real(self, input_ids, positions, batch, embeddings, wanted)
        hidden[(input_ids if wanted is None else input_ids[wanted]) == 299] = float("nan")
        return hidden

    monkeypatch.setattr(CausalLM, "forward", poisoned)
    good = prompts(1)[0]
    never = greedy(logit_bias={299: -100.0})  # by chance, a sound request might generate the poison itself
    (answers,), _ = engine.run([(good, never), ([*good[:-1], 299], never), (good[:-2], never)])
    assert [a.finish_reason for a in answers] == ["length", "error", "length"]
    assert "NaN" in answers[1].error


@pytest.mark.skipif(RANKS > 1, reason="with several ranks it ends the engine")
def test_a_step_that_raises_ends_its_requests_and_no_others(engine, monkeypatch):
    from vserve.engine.step.runner import ModelRunner

    real = ModelRunner.execute
    steps = []

    def failing(self, plan):
        steps.append(plan)
        if plan.step >= 0 and any(299 in unpack_tokens(new.token_ids) for new in plan.new_rows):
            raise MemoryError("injected")
        return real(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", failing)
    good = prompts(1)[0]
    (first, second), _ = engine.run([([*good[:-1], 299], greedy())], [(good, greedy())])
    assert first[0].finish_reason == "error" and "injected" in first[0].error
    assert second[0].finish_reason == "length" and len(second[0].tokens) == LENGTH


def test_a_mixture_too(mixture_engine):
    """Who shares a step changes how many rows an expert gets, and nothing else: twelve at once, hardly any cache."""
    batch = [(p, greedy() if i % 3 else seeded(i)) for i, p in enumerate(prompts(12))]
    waves, _ = mixture_engine.run(*([request] for request in batch), enable_prefix_caching=False)
    expected = [wave[0].tokens for wave in waves]
    (answers,), stats = mixture_engine.run(
        batch, num_gpu_blocks_override=16, max_model_len=160, max_num_batched_tokens=64
    )
    assert tokens(answers) == expected
    assert stats.num_preemptions > 0
