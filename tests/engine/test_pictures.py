"""Pictures in the real engine: transformers' tokens and log-probabilities whatever happens on the way (fp32, CPU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from vserve.engine.describe.divide import check_stages
from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ModelError
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.step.seeing import NOT_ENCODED

from ..models.test_model_parity import load
from ..picture_prompts import Prompt, log_probabilities, picture, prompt_of
from .conftest import Engine

MARGIN = 1e-3  # of log-probabilities: nearer than that, either token is right
FAMILIES = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen2_5_vl"]


@pytest.fixture(params=FAMILIES)
def engine_of_family(request, tiny_model) -> Engine:
    return engine_of(tiny_model, request.param)


def engine_of(tiny_model, family: str) -> Engine:
    return Engine(str(tiny_model(family, max_position_embeddings=256)))


def greedy(**options) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | options))


def request(prompt: Prompt, **options) -> tuple[list[int], SamplingParams, dict[str, Any]]:
    salt = options.pop("salt", None)
    return prompt[0], greedy(**options), {"media": prompt[1], "cache_salt": salt}


def check(engine: Engine, prompt: Prompt, answer: Any) -> None:
    assert answer.error is None, answer.error
    ids, media = prompt
    whole = [*ids, *answer.tokens]
    wanted = log_probabilities(engine.folder, whole, media)
    for row, token in zip(wanted[len(ids) - 1 : -1], answer.tokens, strict=True):
        assert row[token] > row.max() - MARGIN
    found = [*(answer.prompt_logprobs or []), *answer.logprobs]
    first = len(whole) - 1 - len(found)
    for row, token, scored in zip(wanted[first:-1], whole[first + 1 :], found, strict=True):
        assert scored.logprob == pytest.approx(row[token].item(), abs=MARGIN)


def parts(engine: Engine) -> list[Prompt]:
    """No picture, one, two beside each other, one at the beginning and one at the end."""
    shapes = [(9,), (3, (64, 96), 4), (2, (96, 64), (128, 32), 5), ((64, 64), 70, (32, 160)), (5, (160, 96), 3)]
    return [prompt_of(engine.folder, *shape) for shape in shapes]


def test_prompts_with_pictures_are_transformers(engine_of_family) -> None:
    """All at once, in chunks that end within pictures, overlapped with answers, and preempted."""
    engine = engine_of_family
    prompts = parts(engine)
    wave = [request(prompt, logprobs=0, prompt_logprobs=0) for prompt in prompts]
    options = {"max_model_len": 128, "block_size": 8, "enable_prefix_caching": False}
    (answers,), stats = engine.run(
        wave, **options, max_num_batched_tokens=66, max_num_seqs=3, num_gpu_blocks_override=22
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        check(engine, prompt, answer)
    assert stats.num_encoded_patches > 0


def test_hits_before_at_and_inside_a_picture(engine_of_family) -> None:
    """And none of other pixels, or of another salt."""
    engine = engine_of_family
    size = 64 if "qwen3_5" in engine.folder else 8  # where prefixes are found
    one, other = (picture(engine.folder, 256, 192, seed) for seed in (1, 2))
    first, second = (prompt_of(engine.folder, size - 1, item, 20, one, 40) for item in (one, other))
    second = [*first[0]], second[1]
    last = first[0][: size + 1 + one.length], first[1][:1]  # its last token is the picture's
    prompts = [first, first, second, first, second, last]
    salts = [None, None, None, "other", None, None]
    waves = [[request(prompt, logprobs=0, salt=salt)] for prompt, salt in zip(prompts, salts, strict=True)]
    answers, stats = engine.run(*waves, max_model_len=256, block_size=8, max_num_seqs=2)
    found = [answer for (answer,) in answers]
    whole, inside = (len(first[0]) - 1) // size * size, (len(last[0]) - 1) // size * size
    assert last[1][0].start < inside or size == 64
    before = size if size == 8 else 0  # where there is no snapshot yet
    assert [answer.num_cached_tokens for answer in found] == [0, whole, before, 0, whole, inside]
    for answer, prompt in zip(found, prompts, strict=True):
        check(engine, prompt, answer)
    assert found[0].logprobs[0] != found[2].logprobs[0], "the model does not look at its pictures: nothing is tested"
    assert stats.encoder_hits > 0 and stats.num_encoder_tokens_used > 0


def test_overlapped_steps_and_preemption(tiny_model, overlap) -> None:
    overlap(2)
    engine = engine_of(tiny_model, "qwen3_vl")
    prompts = parts(engine) * 2
    (answers,), stats = engine.run(
        [request(prompt, logprobs=0, max_tokens=20) for prompt in prompts], max_model_len=128, block_size=8,
        max_num_seqs=5, max_num_batched_tokens=40, num_gpu_blocks_override=24, mm_encoder_cache_tokens=16,
    )  # fmt: skip
    assert stats.num_preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        check(engine, prompt, answer)


def test_a_picture_that_cannot_be_encoded_is_nobody_elses(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has it gets an error, others of the same step their answers, and it may come again."""
    engine = engine_of(tiny_model, "qwen3_vl")
    good, bad = prompt_of(engine.folder, 3, (64, 96), 4), prompt_of(engine.folder, 30, (96, 64), 4)
    left = [2]  # times: in company, then alone

    def failing(self: Any, items: Any) -> Any:
        if left[0] and any(item.key == bad[1][0].key for _, item in items):
            left[0] -= 1
            raise RuntimeError("out of memory")
        return encode(self, items)

    tower = type(load(Path(engine.folder)).tower)
    encode = tower.encode
    monkeypatch.setattr(tower, "encode", failing)
    waves = [[request(good, logprobs=0), request(bad), request(good, logprobs=0)], [request(bad, logprobs=0)]]
    ((one, none, two), (again,)), stats = engine.run(*waves, max_model_len=128, block_size=8)
    check(engine, good, one)
    check(engine, good, two)
    assert none.error == NOT_ENCODED and not none.tokens
    check(engine, bad, again)
    assert stats.num_invariant_violations == 0


WRONG = {
    "picture 1 of the prompt: its tokens": {"start": 500},
    "picture 1 of the prompt: 0 of its": {"start": 0, "length": 2},
    "bytes are not the pixels": {"pixels": b"rgb"},
    "cannot be merged": {"grid": (1, 3, 4)},
    "stand for 2 x 2 patches": {"grid": (1, 2, 2)},
}


def test_wrong_items_are_errors_of_their_requests(tiny_model) -> None:
    engine = engine_of(tiny_model, "qwen3_vl")
    ids, (item,) = prompt_of(engine.folder, 3, (64, 96), 4)
    wave = [request((ids, (msgspec.structs.replace(item, **wrong),))) for wrong in WRONG.values()]
    wave += [request((ids, (item, item)))]
    (answers,), _ = engine.run(wave, max_model_len=128)
    for words, answer in zip([*WRONG, "picture 2 of the prompt: its tokens"], answers, strict=True):
        assert words in answer.error
    options: dict[str, Any] = {"max_model_len": 128, "mm_encoder_cache_tokens": 5}
    ((answer,),), _ = engine.run([request((ids, (item,)))], **options)
    assert "have 6 tokens, and the encoder cache has room for 5" in answer.error
    ((answer,),), _ = engine.run([request((ids, (item,)))], max_model_len=128, language_model_only=True)
    assert "reads no pictures" in answer.error


@pytest.mark.parametrize("divided", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.slow
def test_divided_models(tiny_model, divided: dict[str, int]) -> None:
    """Each rank encodes, or the first stage, which has the layers that pictures add to."""
    engine = Engine(str(tiny_model("qwen3_vl", max_position_embeddings=256, num_hidden_layers=4)))
    prompts = parts(engine)
    wave = [request(prompt, logprobs=0) for prompt in prompts]
    (answers, again), stats = engine.run(wave, wave, max_model_len=128, block_size=8, max_num_seqs=3, **divided)
    for prompt, answer, warm in zip(prompts, answers, again, strict=True):
        check(engine, prompt, answer)
        check(engine, prompt, warm)
    assert stats.num_encoded_patches > 0


def test_stages_that_pictures_would_cross_are_refused(tiny_model) -> None:
    with pytest.raises(ModelError, match="pictures add to the first 2 layers"):
        check_stages(read_folder(tiny_model("qwen3_vl", max_position_embeddings=256)), 2)
