"""The whole engine over models that transformers' code computes: prefixes, chunks, preemptions, company, seeds."""

from __future__ import annotations

import logging
import random

import pytest

from vserve.engine.link.sampling_params import SamplingParams
from vserve.server.client.mailbox import EngineDeadError

from .conftest import Engine

LENGTH = 12
# Model type → blocks that are too few for all. The second has experts, sinks, and a window in every other layer.
MODELS = {"granite": 8, "gpt_oss": 16}


def requests(count: int = 6) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(7)
    common = [rng.randrange(5, 290) for _ in range(24)]
    prompts = [common + [rng.randrange(5, 290) for _ in range(rng.randrange(3, 60))] for _ in range(count)]
    kinds = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 5}]
    return [
        (prompt, SamplingParams(max_tokens=LENGTH, ignore_eos=True, **kinds[i % 2])) for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module", params=MODELS)
def foreign(request, foreign_model) -> Engine:
    return Engine(foreign_model(request.param))


@pytest.fixture(scope="module")
def alone(foreign):
    waves, _ = foreign.run(*([one] for one in requests()), enable_prefix_caching=False, model_impl="transformers")
    return [wave[0].tokens for wave in waves]


@pytest.mark.parametrize("budget", [17, 64])
def test_company_and_chunks_change_nothing(foreign, alone, budget) -> None:
    (answers,), _ = foreign.run(
        requests(),
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        model_impl="transformers",
        enable_prefix_caching=False,
    )
    assert [answer.tokens for answer in answers] == alone


def test_a_cached_prefix_changes_nothing(foreign, alone) -> None:
    (cold, warm), stats = foreign.run(requests(), requests(), model_impl="transformers")
    assert [a.tokens for a in cold] == [a.tokens for a in warm] == alone
    assert stats.prefix_hits > 0
    for (prompt, _), answer in zip(requests(), warm, strict=True):
        assert answer.num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_preemption_changes_nothing(foreign, alone) -> None:
    blocks = next(blocks for name, blocks in MODELS.items() if name in foreign.folder.name)
    options = {"num_gpu_blocks_override": blocks, "max_model_len": 110, "model_impl": "transformers"}
    (answers,), stats = foreign.run(requests(), **options)
    assert [a.tokens for a in answers] == alone
    assert stats.num_preemptions > 0


@pytest.mark.slow
def test_two_ranks_change_nothing(foreign, alone) -> None:
    """As transformers' plan divides it; where it divides nothing, that is said before weights are read."""
    options = {"model_impl": "transformers", "tensor_parallel_size": 2}
    if "gpt_oss" in foreign.folder.name:
        with pytest.raises(EngineDeadError) as raised:
            foreign.run(requests(1), **options)
        assert str(raised.value) == (
            "--tensor-parallel-size 2: GptOssForCausalLM is computed by transformers' code, and transformers' "
            "plan divides none of it: leave it out, or take --data-parallel-size 2 for as many that each hold all of "
            "the model"
        )
        return
    (answers,), _ = foreign.run(requests(), **options)
    assert [answer.tokens for answer in answers] == alone


def test_the_start_says_who_computes(foreign_model, caplog) -> None:
    caplog.set_level(logging.INFO)
    Engine(foreign_model("starcoder2")).run(requests(1))
    (line,) = (record.getMessage() for record in caplog.records if "is computed by" in record.getMessage())
    assert line == (
        "Starcoder2ForCausalLM is computed by transformers' code, on vserve's cache and kernels (there is no family of "
        "our own)"
    )
