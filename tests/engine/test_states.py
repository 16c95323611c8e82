"""Models with recurrent states in the real engine: transformers' tokens whatever happens on the way (fp32, CPU)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from vserve.engine.describe.divide import check_divides, state_shares
from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.start.rank import Rank

from ..adapters import merged, write_adapter
from .test_adapters import greedy_params, load, running, tokens_of

LENGTH = 20
MARGIN = 1e-3  # of log-probabilities: nearer than that, either token is right
FAMILIES = (
    "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "falcon_h1", "nemotron_h",
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_next", "lfm2_moe", "granitemoehybrid")),
)  # fmt: skip


@pytest.fixture(params=FAMILIES)
def engine_of_family(request, tiny_model, engine):
    return type(engine)(tiny_model(request.param))


def greedy(**options) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, **options)


def drawn(*sizes: int) -> list[list[int]]:
    rng = random.Random(sum(sizes))
    return [[rng.randrange(5, 290) for _ in range(size)] for size in sizes]


def test_in_company_in_chunks_and_preempted_they_are_transformers_tokens(engine_of_family) -> None:
    prompts = drawn(3, 4, 6, 90, 65, 64, 130, 63)
    (answers,), stats = engine_of_family.run(
        [(prompt, greedy(logprobs=1, prompt_logprobs=0)) for prompt in prompts], max_num_batched_tokens=80,
        max_num_seqs=8, max_model_len=192, num_gpu_blocks_override=25, block_size=8, enable_prefix_caching=False,
    )  # fmt: skip
    assert stats.num_preemptions > 0
    oracle = AutoModelForCausalLM.from_pretrained(engine_of_family.folder, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = [*prompt, *answer.tokens]
        with torch.inference_mode():
            expected = oracle(torch.tensor([whole])).logits[0].log_softmax(-1)
        for row, token in zip(expected[len(prompt) - 1 : -1], answer.tokens, strict=True):
            assert row[token] > row.max() - MARGIN
        found = [*answer.prompt_logprobs, *answer.logprobs]
        for row, token, scored in zip(expected[:-1], whole[1:], found, strict=True):
            assert scored.logprob == pytest.approx(row[token].item(), abs=MARGIN)


def test_a_snapshot_changes_nothing_and_is_found_where_the_prefix_was_cut(engine_of_family) -> None:
    """Equal prompts, at and around multiples of 64; what follows an answer; and a third one beside a shared prefix."""
    (stem,) = drawn(200)
    batch = [(stem[:size], greedy()) for size in (63, 64, 65, 129, 192, 200)]
    forks = [(stem[:140] + tail, greedy()) for tail in drawn(30, 31, 32)]
    waves = [[request] for request in batch]
    options = {"max_model_len": 320, "max_num_seqs": 4}
    cold, _ = engine_of_family.run(*waves, *([fork] for fork in forks), enable_prefix_caching=False, **options)
    expected = [wave[0].tokens for wave in cold]
    warm, stats = engine_of_family.run(*waves, *waves, *([fork] for fork in forks), **options)
    found = [wave[0].tokens for wave in warm]
    assert found == expected[: len(batch)] * 2 + expected[len(batch) :]
    again = [wave[0].num_cached_tokens for wave in warm[len(batch) : 2 * len(batch)]]
    assert again == [(len(prompt) - 1) // 64 * 64 for prompt, _ in batch]
    assert warm[-1][0].num_cached_tokens == 128
    assert stats.num_state_restores > 0 and stats.num_state_slots_used == 0


@pytest.mark.parametrize("budget", [64, 100, 128])
def test_chunks_at_multiples_of_64_are_the_whole_prompt_bitwise(tiny_model, engine, budget: int) -> None:
    """Of mixtures they are not: an expert's products round by how many tokens it has."""
    engine_of_family = type(engine)(tiny_model("qwen3_5_text"))
    batch = [(prompt, greedy(logprobs=3)) for prompt in drawn(190, 64, 70)]
    options = {"max_model_len": 256, "max_num_seqs": 1, "enable_prefix_caching": False}
    (whole,), _ = engine_of_family.run(batch, max_num_batched_tokens=256, **options)
    (chunked,), _ = engine_of_family.run(batch, max_num_batched_tokens=budget, **options)
    for one, other in zip(whole, chunked, strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs


def test_overlapped_steps_and_seeded_samples(engine_of_family, overlap) -> None:
    rng = random.Random(5)
    prompts = drawn(*(rng.randint(3, 150) for _ in range(8)))
    sampling = [
        SamplingParams(max_tokens=LENGTH, temperature=0.9, top_p=0.95, seed=index, ignore_eos=True) if index % 2
        else greedy() for index in range(len(prompts))
    ]  # fmt: skip
    batch = list(zip(prompts, sampling, strict=True))
    alone, _ = engine_of_family.run(*([request] for request in batch), enable_prefix_caching=False, max_model_len=256)
    overlap(2)
    (answers, again), _ = engine_of_family.run(batch, batch, max_model_len=256, max_num_seqs=5)
    expected = [wave[0].tokens for wave in alone]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in again] == expected


def test_mixtures_in_chunks_are_near_the_whole_prompt(engine_of_family) -> None:
    batch = [(prompt, greedy(logprobs=0)) for prompt in drawn(190, 70)]
    options = {"max_model_len": 256, "max_num_seqs": 1, "enable_prefix_caching": False}
    (whole,), _ = engine_of_family.run(batch, max_num_batched_tokens=256, **options)
    (chunked,), _ = engine_of_family.run(batch, max_num_batched_tokens=64, **options)
    for one, other in zip(whole, chunked, strict=True):
        assert one.tokens == other.tokens
        expected = [found.logprob for found in one.logprobs]
        assert [found.logprob for found in other.logprobs] == pytest.approx(expected, abs=MARGIN)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_batched_tokens": 64, "max_num_seqs": 4},
         r"--max-num-batched-tokens is 64: .*room for 64 tokens .*raise the first to 67 or lower the second to 1$"),
        ({"kv_cache_memory_bytes": 100_000, "max_num_seqs": 9, "max_model_len": 64},
         r"no memory is left for recurrent states: 9 running requests need .*set --max-num-seqs \d or less, or raise "
         r"--kv-cache-memory-bytes \(now 100000\), or use --mamba-ssm-cache-dtype float16"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "1,3"},
         "--pipeline-parallel-size 2: stage 1 would have no layer with attention, and of such a model each needs one"),
    ],
    ids=["budget", "memory", "stages"],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_the_start(tiny_model, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=words):
        Rank(EngineConfig(str(tiny_model("qwen3_5_text")), device="cpu", cpu_threads=1, **options), lambda _: None)


def test_it_is_divided_by_heads_of_keys(tiny_model) -> None:
    check_divides(config := read_folder(tiny_model("qwen3_5_text")), 2)
    words = "2 heads of keys of a gated delta net cannot be divided over 4 ranks: take one of 1, 2, or"
    with pytest.raises(ModelError, match=words):
        check_divides(config, 4)
    (half, *_), (whole, *_) = state_shares(config, 2), state_shares(config, 1)
    assert (half.num_heads, half.channels, half.gates) == (3, whole.channels // 2, whole.gates // 2)
    assert whole == config.state_specs()[0]


@pytest.mark.parametrize(
    "engine_of_family",
    ["qwen3_5_text", *(pytest.param(f"qwen3_{kind}", marks=pytest.mark.slow) for kind in ("5_moe_text", "next"))],
    indirect=True,
)
def test_two_ranks_answer_as_one(engine_of_family) -> None:
    """Twice, the second time from snapshots; in chunks, preempted."""
    batch = [(prompt, greedy(logprobs=1)) for prompt in drawn(3, 90, 65, 130)]
    options = {"max_num_batched_tokens": 80, "max_num_seqs": 4, "max_model_len": 192}
    (expected,), _ = engine_of_family.run(batch, enable_prefix_caching=False, **options)
    (answers, again), stats = engine_of_family.run(batch, batch[1:], tensor_parallel_size=2, **options)
    for answer, wanted in zip(answers + again, expected + expected[1:], strict=True):
        assert answer.tokens == wanted.tokens
        scores = [found.logprob for found in wanted.logprobs]
        assert [found.logprob for found in answer.logprobs] == pytest.approx(scores, abs=2e-4)
    assert stats.num_state_restores == 3


NGRAMS = {"speculative_config": '{"method": "ngram", "prompt_lookup_max": 1}'}
TWICE: dict[str, Any] = {  # each half of the layers has both kinds
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention"] * 2},
}


@pytest.mark.parametrize(
    ("family", "drafts"),
    [("qwen3_5_text", {}), ("qwen3_5_text", NGRAMS),
     *(pytest.param(family, NGRAMS, marks=pytest.mark.slow) for family in ("lfm2", "falcon_h1", "nemotron_h"))],
)  # fmt: skip
def test_two_stages_answer_as_one(tiny_model, engine, family: str, drafts: dict[str, Any]) -> None:
    served = type(engine)(tiny_model(family, **TWICE.get(family, {})))
    few = {"allowed_token_ids": (5, 6, 7)}  # so that texts repeat themselves
    batch = [(prompt, greedy(logprobs=1, **few)) for prompt in drawn(3, 90, 65, 130)]
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "max_model_len": 192}
    (expected,), _ = served.run(batch, enable_prefix_caching=False, **options)
    (answers, again), stats = served.run(batch, batch[1:], pipeline_parallel_size=2, **options, **drafts)
    for answer, wanted in zip(answers + again, expected + expected[1:], strict=True):
        assert answer.tokens == wanted.tokens
        scores = [found.logprob for found in wanted.logprobs]
        assert [found.logprob for found in answer.logprobs] == pytest.approx(scores, abs=2e-4)
    assert stats.num_state_restores == 3 and (stats.num_drafts > 5) == bool(drafts)


def test_a_model_without_states_has_none_to_store(tiny_model) -> None:
    config = EngineConfig(str(tiny_model("llama")), device="cpu", cpu_threads=1, mamba_ssm_cache_dtype="float16")
    with pytest.raises(ConfigError, match=r"--mamba-ssm-cache-dtype float16: LlamaForCausalLM keeps no .*leave it out"):
        Rank(config, lambda _: None)


@pytest.mark.parametrize("seqs", [None, 5])
def test_the_cache_is_divided_between_blocks_and_states(tiny_model, seqs: int | None) -> None:
    """A third of it for running requests where nobody names how many; a quarter of the rest for snapshots."""
    folder = tiny_model("qwen3_5_text")

    def rank(**options: Any) -> Rank:
        named = {"kv_cache_memory_bytes": 600_000, "max_num_seqs": seqs, "max_model_len": 64} | options
        return Rank(EngineConfig(str(folder), device="cpu", cpu_threads=1, **named), lambda _: None)

    settings = (made := rank()).settings
    states, slots = settings.plan.states, made.runner.builder.states
    ring, matrices = 8 * (2 * 2 * 8 + 6 * 16 + 12) * 4, 6 * 8 * 16 * 4
    assert states.slot_bytes == 2 * (ring + matrices)
    assert states.running == settings.max_num_seqs == (seqs or 200_000 // states.slot_bytes)
    left = 600_000 - (1 + states.running) * states.slot_bytes
    assert states.snapshots == left // 4 // states.slot_bytes > 0
    assert settings.num_state_slots == states.count == slots.num_slots == 1 + states.running + states.snapshots
    assert sum(tensor.nbytes for tensor in slots.tensors) == states.num_bytes
    assert 0 <= 600_000 - states.num_bytes - settings.plan.cache < settings.plan.layout.block_bytes(4)
    assert f"{states.running} requests at once and {states.snapshots} snapshots" in settings.plan.table()
    assert (("max_num_seqs" in settings.reduced) and any("--max-num-seqs" in n for n in settings.notices)) == (not seqs)
    half = rank(mamba_ssm_cache_dtype="float16", state_cache_fraction=0.0).settings.plan.states
    assert half.slot_bytes == 2 * (ring + matrices // 2) and half.snapshots == 0
    assert rank(enable_prefix_caching=False).settings.plan.states.snapshots == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_states_of_sixteen_bits_are_near(tiny_model, engine, dtype: str) -> None:
    made = type(engine)(tiny_model("qwen3_5_text"))
    batch = [(prompt, SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)) for prompt in drawn(150)]
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 1, "max_model_len": 256}
    (exact,), _ = made.run(batch, **options)
    (near,), _ = made.run(batch, mamba_ssm_cache_dtype=dtype, **options)
    assert near[0].logprobs[0].logprob == pytest.approx(exact[0].logprobs[0].logprob, abs=0.1)
    assert near[0].logprobs != exact[0].logprobs


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("qwen3_5_text", 1), ("qwen3_next", 1), ("falcon_h1", 1),
     *(pytest.param(family, 2, marks=pytest.mark.slow) for family in ("qwen3_5_text", "qwen3_next"))],
)  # fmt: skip
def test_adapters_of_projections_are_as_merged(tiny_model, engine, tmp_path: Path, family: str, ranks: int) -> None:
    """Those of two adapters and of none at once, twice: snapshots of one are not another's."""
    folder = Path(tiny_model(family))
    targets = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "in_proj_a", "in_proj_ba", "in_proj", "out_proj",
               "q_proj", "o_proj")  # fmt: skip
    adapters = [None, *(write_adapter(tmp_path / str(seed), folder, targets, seed=seed) for seed in (1, 2))]
    (prompt,) = drawn(150)
    expected = [merged(folder, adapter) for adapter in adapters]

    async def run() -> list[list[int]]:
        options = {"max_loras": 2, "max_lora_rank": 8, "max_model_len": 256, "max_num_batched_tokens": 128}
        options["tensor_parallel_size"] = ranks
        async with running(folder, **options) as client:
            for index, adapter in enumerate(adapters):
                if adapter is not None:
                    await load(client, index, adapter)
            asked = [greedy_params(adapter=index) for index in range(len(adapters))] * 2
            first = await asyncio.gather(*(tokens_of(client, prompt, sampling) for sampling in asked[:3]))
            found = [*first, *(await asyncio.gather(*(tokens_of(client, prompt, one) for one in asked[3:])))]
            assert client.stats.num_state_restores == 3
            return found

    found = asyncio.run(run())
    assert found[:3] == found[3:] and len({tuple(tokens) for tokens in found}) == 3
    for model, tokens in zip(expected, found, strict=False):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for row, token in zip(logits, tokens, strict=True):
            assert row[token] > row.max() - MARGIN
