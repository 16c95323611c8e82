"""Heads of EAGLE and draft models: what they draft is what plain code drafts, and answers stay what they are."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import vserve.engine.start.arrivals as arrivals_module
from vserve.engine.link.plan import StepPlan
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.parallel.group import SingleGroup
from vserve.engine.speculation.model_drafter import ModelDrafter
from vserve.engine.step.runner import ModelRunner
from vserve.kernels.sampling.sampling import sample_torch

LENGTH = 20


@pytest.fixture(scope="session")
def draft_models(load_module: Any) -> Any:
    return load_module(Path(__file__).parents[1] / "draft_models.py")


@pytest.fixture(scope="module")
def target(tiny_model: Any) -> Path:
    return tiny_model("llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def served(target: Path, engine: Any) -> Any:
    return type(engine)(target)


@pytest.fixture(scope="module")
def heads(draft_models: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {
        "eagle3": draft_models.eagle3(folder / "eagle3", draft_vocab=140),
        "speculators": draft_models.eagle3(folder / "speculators", layer="layers.0"),
        "eagle": draft_models.eagle(folder / "eagle", bias=True),
    }


def config(model: Path, count: int, **options: Any) -> str:
    table = {"num_speculative_tokens_per_batch_size": [[1, 64, count]]}
    return json.dumps({"model": str(model), "num_speculative_tokens": count, **table, **options})


def requests(seed: int = 3) -> list[tuple[list[int], SamplingParams]]:
    random = Random(seed)
    prompts = [[random.randrange(5, 290) for _ in range(length)] for length in (3, 17, 40, 90, 33, 1, 64, 12)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"seed": 1}, {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"seed": 2, "top_k": 9, "top_p": 0.9}, {"temperature": 0.0, "max_tokens": 2}, {"seed": 3, "min_p": 0.02},
        {"temperature": 0.0, "repetition_penalty": 1.3}, {"seed": 4, "stop_token_ids": tuple(range(5, 290, 9))},
    ]  # fmt: skip
    options = {"max_tokens": LENGTH, "temperature": 0.9, "ignore_eos": True}
    return [(prompt, SamplingParams(**{**options, **way})) for prompt, way in zip(prompts, ways, strict=True)]


@pytest.fixture(scope="module")
def plain(served: Any) -> list[Any]:
    (answers,), _ = served.run(requests())
    return answers


def same(answers: list[Any], expected: list[Any]) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.error is None and answer.tokens == wanted.tokens
        assert (answer.finish_reason, answer.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        for name in ("logprobs", "prompt_logprobs"):
            ours, theirs = getattr(answer, name) or [], getattr(wanted, name) or []
            assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=2e-4)


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """(history, sampling, drafts), each time that somebody drafts."""
    seen: list[tuple[list[int], SamplingParams, list[int]]] = []
    propose = ModelDrafter.propose

    def recorded(self, tables, batch, header, shape):
        found = propose(self, tables, batch, header, shape)
        for row, sample, count in zip(header[0].tolist(), header[2].tolist(), found.tolist(), strict=False):
            if sample >= 0 and count:
                length = int(tables.num_computed[row]) + 1
                tokens = tables.history.tokens(row, length + count, length - 1).tolist()
                seen.append((tokens[:length], tables.sampling[row], tokens[length:]))
        return found

    monkeypatch.setattr(ModelDrafter, "propose", recorded)
    return seen


def draw(sampling: SamplingParams) -> Any:
    def drawn(logits: torch.Tensor, place: int) -> torch.Tensor:
        ways = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed or 0, place)
        kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
        return sample_torch(
            logits[None], *(torch.tensor([way], dtype=kind) for way, kind in zip(ways, kinds, strict=True))
        )

    return drawn


CHUNKS = {"max_num_batched_tokens": 64, "max_mixed_tokens": 24}
PREEMPTED = {"num_gpu_blocks_override": 7, "max_model_len": 112}
RANKS, WHOLE = {"tensor_parallel_size": 2}, {"draft_tensor_parallel_size": 1}  # and every rank has the whole drafter
CASES = [
    ("eagle3", 3, 1, {}), ("speculators", 2, 1, CHUNKS), ("eagle", 3, 1, {"block_size": 4}),
    pytest.param("eagle3", 4, 1, PREEMPTED | CHUNKS, marks=pytest.mark.slow), ("eagle3", 3, 1, RANKS | CHUNKS),
    pytest.param("eagle", 2, 1, RANKS | WHOLE, marks=pytest.mark.slow),
]  # fmt: skip


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """→ what goes into --speculative-config, what goes beside it."""
    asked = {name: value for name, value in options.items() if name in WHOLE}
    return asked, {name: value for name, value in options.items() if name not in WHOLE}


@pytest.mark.parametrize(("name", "count", "depth", "options"), CASES)
@pytest.mark.slow
def test_heads_draft_what_plain_code_drafts(
    served: Any, target: Path, heads: Any, plain: Any, proposed: Any, draft_models: Any, name: str, count: int,
    depth: int, options: dict[str, Any],
) -> None:  # fmt: skip
    asked, options = split(options)
    (answers,), stats = served.run(
        requests(),
        speculative_config=config(heads[name], count, **asked),
        max_num_seqs=8,
        enable_prefix_caching=False,
        **options,
    )
    same(answers, plain)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tensors = load_file(heads[name] / "model.safetensors")
    oracle = draft_models.Plain(tensors, model, normed_residual=name == "speculators")
    histories = [prompt + answer.tokens for (prompt, _), answer in zip(requests(), answers, strict=True)]
    checked = 0
    with torch.no_grad():
        for history, sampling, drafts in proposed:
            if any(known[: len(history)] == history for known in histories):
                assert drafts == oracle.drafts(history, count, draw(sampling)), f"behind {len(history)} tokens"
                checked += 1
    assert checked > 60 and stats.num_drafts > 40
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in options)


def test_a_draft_model_drafts_what_transformers_makes_of_it(
    served: Any, plain: Any, proposed: Any, tiny_model: Any
) -> None:
    """The second time, behind prompts whose keys and values it finds in the cache. In codes it drafts a little else."""
    folder = tiny_model("qwen3", num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (answers, again), stats = served.run(
        requests(), requests(), speculative_config=config(folder, 3), max_num_seqs=8, **CHUNKS
    )
    same(answers, plain)
    same(again, plain)
    histories = [prompt + answer.tokens for (prompt, _), answer in zip(requests(), answers, strict=True)]
    checked = 0
    with torch.no_grad():
        for history, sampling, drafts in proposed[::3]:
            if any(known[: len(history)] == history for known in histories):
                tokens, draws = list(history), draw(sampling)
                for _ in drafts:
                    tokens.append(int(draws(model(torch.tensor([tokens])).logits[0, -1], len(tokens))))
                assert drafts == tokens[len(history) :], f"behind {len(history)} tokens"
                checked += 1
    assert checked > 60 and stats.num_drafts > 40
    whole = {tuple(history): drafts for history, _, drafts in proposed}
    proposed.clear()
    (answers,), _ = served.run(requests(), speculative_config=config(folder, 3, quantization="int8"), max_num_seqs=8)
    same(answers, plain)
    alike = [drafts == whole[tuple(history)] for history, _, drafts in proposed if tuple(history) in whole]
    assert 0.5 < sum(alike) / len(alike) < 1


def mtp(count: int, **options: Any) -> str:
    table = {"num_speculative_tokens_per_batch_size": [[1, 64, count]]}
    return json.dumps({"method": "mtp", "num_speculative_tokens": count, **table, **options})


@pytest.mark.parametrize(("family", "own", "options"), [
    ("deepseek_v3", True, CHUNKS), ("glm4_moe", False, {"block_size": 4}),
    ("deepseek_v3", True, RANKS | {"enable_expert_parallel": True}),
    pytest.param("glm4_moe", False, RANKS | WHOLE, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.slow
def test_layers_behind_the_last_one_draft_what_plain_code_drafts(
    engine: Any, tiny_models: Any, draft_models: Any, proposed: Any, tmp_path: Path, family: str, own: bool,
    options: dict[str, Any],
) -> None:  # fmt: skip
    folder = tiny_models.tiny_checkpoint(tmp_path / "model", family, num_hidden_layers=3)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    draft_models.with_drafting_layer(folder, own)
    served, batch = type(engine)(folder), requests()
    (expected,), _ = served.run(batch)
    asked, options = split(options)
    (answers, again), stats = served.run(
        batch, batch, speculative_config=mtp(3, **asked), max_num_seqs=8, enable_prefix_caching=False, **options
    )
    same(answers, expected)
    same(again, expected)
    oracle = draft_models.PlainLayer(load_file(folder / "model.safetensors"), whole)
    histories = [prompt + answer.tokens for (prompt, _), answer in zip(batch, answers, strict=True)]
    checked = 0
    with torch.no_grad():
        for history, sampling, drafts in proposed[:80]:
            if any(known[: len(history)] == history for known in histories):
                assert drafts == oracle.drafts(history, 3, draw(sampling)), f"behind {len(history)} tokens"
                checked += 1
    assert checked > 50 and stats.num_drafts > 40


SERVED = [
    ("eagle3", 1, 2, {}), ("eagle", 2, 3, CHUNKS), ("eagle3", 3, 2, PREEMPTED | CHUNKS),
    ("speculators", 5, 2, {"kv_cache_dtype": "auto"}), ("model", 4, 2, CHUNKS), ("model", 3, 3, PREEMPTED),
]  # fmt: skip


@pytest.mark.parametrize(("name", "count", "depth", "options"), SERVED)
def test_answers_stay_what_they_are(
    served: Any, heads: Any, plain: Any, overlap: Any, tiny_model: Any, name: str, count: int, depth: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Several steps in flight; the second time prompts are found in the cache."""
    overlap(depth)
    drafter = heads.get(name) or tiny_model("qwen3", num_hidden_layers=1)
    (cold, warm), stats = served.run(
        requests(), requests(), speculative_config=config(drafter, count), max_num_seqs=8, **options
    )
    same(cold, plain)
    same(warm, plain)
    tight = "num_gpu_blocks_override" in options
    assert (stats.num_preemptions > 0) == tight and (stats.prefix_hits > 0 or tight)
    assert stats.num_drafts > 40 and stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("depth", "options"),
    [
        (1, {}), (2, CHUNKS), (2, PREEMPTED | CHUNKS), (1, RANKS | CHUNKS),
        pytest.param(1, RANKS | WHOLE, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_target_that_drafts_for_itself_is_always_right(
    served: Any, target: Path, plain: Any, overlap: Any, depth: int, options: dict[str, Any]
) -> None:
    """The noise is the request's own: what is sampled is drafted, too. Where the target has penalties or drafts are cut
    short, it differs."""
    if depth > 1:
        overlap(depth)
    batch = [pair for pair in requests() if pair[1].repetition_penalty == 1.0 and not pair[1].stop_token_ids]
    expected = [answer for answer, pair in zip(plain, requests(), strict=True) if pair in batch]
    asked, options = split(options)
    (answers, again), stats = served.run(
        batch, batch, speculative_config=config(target, 4, **asked), max_num_seqs=8, **options
    )
    same(answers, expected)
    same(again, expected)
    held = sum(stats.num_accepted_tokens) / stats.num_draft_tokens
    assert held > 0.8, "but for the last tokens of answers, all hold"


@pytest.mark.parametrize("name", ["windows", "latent", "codes"])
def test_every_kind_of_cache(windowed_engine: Any, tiny_model: Any, engine: Any, overlap: Any, name: str) -> None:
    """Layers with windows, in groups that share memory; latent attention; a cache of 8 bits with a scale a token."""
    kinds = {
        "windows": (windowed_engine, {}),
        "latent": (type(engine)(tiny_model("minicpm3")), {}),
        "codes": (engine, {"kv_cache_dtype": "fp8_per_token_head"}),
    }
    drafted, options = kinds[name]
    batch = [pair for pair in requests() if not pair[1].stop_token_ids]
    (expected,), _ = drafted.run(batch, **options)
    overlap(2)
    asked = config(Path(drafted.folder), 4)
    (answers, again), stats = drafted.run(
        batch, batch, speculative_config=asked, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, **options
    )
    same(answers, expected)
    same(again, expected)
    held = sum(stats.num_accepted_tokens) / stats.num_draft_tokens
    assert held > 0.7, f"{held:.2f} of the drafts held"


@pytest.mark.parametrize("depth", [1, 2])
def test_beside_grammars_and_budgets(
    served: Any, target: Path, load_module: Any, monkeypatch: pytest.MonkeyPatch, overlap: Any, depth: int
) -> None:
    grammars = load_module(Path(__file__).with_name("test_speculation.py")).Grammars
    monkeypatch.setattr(arrivals_module, "Grammars", grammars)
    free = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
    prompts = [prompt for prompt, _ in requests()][:4]
    batch = [(prompt, SamplingParams(**free, grammar=name)) for name in (None, "nine", "budget") for prompt in prompts]
    (expected,), _ = served.run(batch)
    if depth > 1:
        overlap(depth)
    (answers,), stats = served.run(batch, speculative_config=config(target, 3), max_num_seqs=16, **CHUNKS)
    same(answers, expected)
    assert sum(stats.num_accepted_tokens) > 40


def test_contexts_that_are_too_long_for_it_get_no_drafts(served: Any, target: Path, plain: Any) -> None:
    """Nor does a text that is as long as a context may be lose a token."""
    (answers,), stats = served.run(requests(), speculative_config=config(target, 3, max_model_len=16))
    same(answers, plain)
    few = stats.num_drafts
    (answers,), stats = served.run(requests(), speculative_config=config(target, 3), max_model_len=112)
    same(answers, plain)
    assert 0 < few < stats.num_drafts / 4
    prompt = requests()[3][0]
    last = [(prompt, SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True))]
    (expected,), _ = served.run(last, max_model_len=100)
    (answers,), stats = served.run(last, speculative_config=config(target, 5), max_model_len=100)
    same(answers, expected)
    assert len(answers[0].tokens) == 10 and sum(stats.num_accepted_tokens) > 3


def test_depth_follows_the_load_where_there_are_no_graphs(
    served: Any, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the table that was given, and by the one that holds where none was. Answers end one after the other."""
    seen: dict[int, set[int]] = {}
    execute = ModelRunner.execute

    def recorded(self: ModelRunner, plan: StepPlan) -> None:
        if plan.num_drafts:
            seen.setdefault(plan.num_decodes, set()).add(plan.num_drafts)
        execute(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", recorded)
    few = [([7 + i] * 9, SamplingParams(max_tokens=10 + 6 * i, temperature=0.0, ignore_eos=True)) for i in range(8)]
    many = [(prompt, SamplingParams(max_tokens=6 + 2 * i, temperature=0.0)) for i, (prompt, _) in enumerate(few * 2)]
    asked = {"model": str(target), "num_speculative_tokens": 5}
    table = {"num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 5, 2], [6, 8, 1]]}
    for batch, more, depths in ((few, table, ((2, 5), (5, 2), (8, 1))), (many, {}, ((8, 5), (16, 3)))):
        seen.clear()
        (expected,), _ = served.run(batch)
        (answers,), _ = served.run(batch, speculative_config=json.dumps(asked | more))
        same(answers, expected)
        assert {drafts for counts in seen.values() for drafts in counts} == {count for _, count in depths}
        for decodes, counts in seen.items():
            allowed = next(count for most, count in depths if decodes <= most)
            assert max(counts) <= allowed, f"{decodes} requests"


def test_all_ranks_verify_the_drafts_of_the_first(
    served: Any, target: Path, plain: Any, proposed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen by a rank that has rounded otherwise, and drawn other tokens."""

    def broadcast(self: Any, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return x.fill_(7) if x.dim() == 2 else x  # drafts, not the tokens that were sampled

    monkeypatch.setattr(SingleGroup, "broadcast", broadcast)
    (answers,), _ = served.run(requests(), speculative_config=config(target, 3), max_num_seqs=8)
    same(answers, plain)
    assert len(proposed) > 60 and all(drafts == [7] * 3 for _, _, drafts in proposed)


def test_drafts_may_be_greedy(served: Any, target: Path, proposed: Any) -> None:
    """Where an answer is drawn, they are right less often than with the request's noise."""
    batch = [
        (prompt, SamplingParams(max_tokens=12, seed=i, ignore_eos=True)) for i, (prompt, _) in enumerate(requests())
    ]
    held = []
    for method in ("greedy", "probabilistic"):
        _, stats = served.run(batch, speculative_config=config(target, 2, draft_sample_method=method))
        held.append(sum(stats.num_accepted_tokens) / stats.num_draft_tokens)
    assert held[0] < 0.8 * held[1] and held[1] > 0.8
