"""What a request excludes is never sampled: allowed_token_ids, bad_words, and both with everything else."""

from __future__ import annotations

import random

import pytest

from vserve.engine.link.sampling_params import SamplingParams

LENGTH = 24


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    return [rng.randrange(5, 290) for _ in range(40)]


def params(**options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True, **options})


def contains(tokens: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(tokens[i : i + len(word)]) == word for i in range(len(tokens) - len(word) + 1))


def test_nothing_but_allowed_tokens(engine, prompt):
    batch = [
        (prompt, params(allowed_token_ids=(7, 31, 32, 299), **options))
        for options in (
            {}, {"temperature": 2.0, "seed": 1}, {"logit_bias": {50: 100.0}}, {"presence_penalty": 2.0},
            {"temperature": 1.5, "seed": 2, "top_k": 2, "bad_words": ((7,),)},
        )
    ]  # fmt: skip
    batch.append((prompt, params(allowed_token_ids=(299,), logprobs=2)))
    free = params(logprobs=2)
    (answers, fresh), _ = engine.run([*batch, (prompt, free)], [(prompt, free)], max_num_seqs=8)
    for answer in answers[:-1]:
        assert len(answer.tokens) == LENGTH and set(answer.tokens) <= {7, 31, 32, 299}
    assert 7 not in answers[4].tokens and len(set(answers[1].tokens)) > 1
    assert answers[5].tokens == [299] * LENGTH
    assert answers[-1].tokens == fresh[0].tokens, "the limits of others, or of a row's last user"
    # Log-probabilities are of the raw logits.
    assert answers[5].logprobs[0].top_ids == answers[-1].logprobs[0].top_ids


@pytest.mark.parametrize("options", [{}, {"num_gpu_blocks_override": 13, "max_model_len": 128}], ids=["", "preempted"])
def test_bad_words_never_come(engine, prompt, options):
    plain = params()
    ((free,),), _ = engine.run([(prompt, plain)])
    out = free.tokens
    words = [
        ((out[0],),), ((out[3], out[4]),), (tuple(out[1:6]),), (tuple(out[:8]), (out[2],), (out[9], 5)),
        ((prompt[-1], out[0]),), ((*out, 5),), ((),),
    ]  # fmt: skip
    batch = [(prompt, params(bad_words=w)) for w in words] + [(prompt, plain)]
    hot = params(temperature=1.0, seed=3, allowed_token_ids=(7, 8, 9))
    batch += [(prompt, hot), (prompt, params(**{**_asdict(hot), "bad_words": ((7, 8), (8, 9, 7), (9, 9))}))]
    (answers,), stats = engine.run(batch, **options)
    for (_, sampling), answer in zip(batch, answers, strict=True):
        assert len(answer.tokens) == LENGTH
        assert not any(contains(answer.tokens, word) for word in sampling.bad_words if word)
    for i in (0, 1, 2, 3):
        assert answers[i].tokens != out
    for word, at in (((out[0],), 0), ((out[3], out[4]), 1), (tuple(out[1:6]), 2)):
        place = next(i for i in range(LENGTH) if contains(out[: i + 1], word))
        assert answers[at].tokens[:place] == out[:place] and answers[at].tokens[place] != out[place]
    # A word that begins in the prompt, one that never gets so far, and none at all change nothing.
    assert answers[4].tokens == answers[5].tokens == answers[6].tokens == answers[7].tokens == out
    assert any(contains(answers[8].tokens, word) for word in ((7, 8), (8, 9, 7), (9, 9)))
    assert bool(options) == (stats.num_preemptions > 0)


def _asdict(sampling: SamplingParams) -> dict:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def test_a_request_that_excludes_everything_ends_alone(engine, prompt):
    ((free,),), _ = engine.run([(prompt, params())])
    impossible = [
        params(allowed_token_ids=(9,), bad_words=((9,),)),
        params(allowed_token_ids=(free.tokens[0],), bad_words=((free.tokens[0], free.tokens[0]),)),
        params(allowed_token_ids=(2,), min_tokens=5, stop_token_ids=(2,)),
    ]
    (answers, again), _ = engine.run([(prompt, params()), *((prompt, p) for p in impossible)], [(prompt, params())])
    assert answers[0].tokens == again[0].tokens == free.tokens
    assert again[0].num_cached_tokens == 32, "the cache of a sound prompt was thrown away"
    assert [a.finish_reason for a in answers[1:]] == ["error"] * 3
    assert [len(a.tokens) for a in answers[1:]] == [0, 1, 0]
    assert all("no token is left to sample" in a.error for a in answers[1:])


@pytest.mark.parametrize(
    "wrong",
    [
        {"allowed_token_ids": (10**6,)}, {"allowed_token_ids": ()}, {"bad_words": ((5, -1),)},
        {"logit_bias": {-7: 1.0}},
        {"logit_bias": {10**6: 1.0}}, {"logprobs": 10**6}, {"prompt_logprobs": -1}, {"temperature": float("nan")},
        {"temperature": 1e300}, {"repetition_penalty": 0.0}, {"top_k": 1 << 40}, {"max_tokens": 0},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_engine_can_sample_is_refused(wrong):
    problem = params(**wrong).problem(300)
    (name,) = wrong
    assert problem is not None and name in problem


def test_what_slips_through_ends_alone(engine, prompt):
    ((free,),), _ = engine.run([(prompt, params())])
    wrong = [params(logit_bias={10**6: 1.0}), params(bad_words=((5, -1),)), params(temperature=1e300)]
    harmless = params(min_tokens=LENGTH, eos_token_ids=(10**6,), ignore_eos=False)  # more ids than the model has
    (answers,), _ = engine.run([(prompt, params()), (prompt, harmless), *((prompt, p) for p in wrong)])
    assert answers[0].tokens == answers[1].tokens == free.tokens
    for answer, sampling in zip(answers[2:], wrong, strict=True):
        assert (answer.finish_reason, answer.tokens, answer.error) == ("error", [], sampling.problem(300))


@pytest.mark.parametrize("token", [-1, 300, 1 << 40])
def test_a_prompt_with_a_token_that_the_model_does_not_have_ends_alone(engine, prompt, token):
    ((free,),), _ = engine.run([(prompt, params())])
    (answers,), _ = engine.run([(prompt, params()), ([*prompt, token, 5], params())])
    assert answers[0].tokens == free.tokens
    assert (answers[1].finish_reason, answers[1].tokens) == ("error", [])
    assert answers[1].error == f"the prompt has the token id {token}; the vocabulary ends at 299"
