"""Answers with drafts are those without, in every field, whoever drafts (fp32, CPU)."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import vserve.engine.cache.batch as batch_module
import vserve.engine.start.arrivals as arrivals_module
import vserve.engine.step.runner as runner_module
from vserve.engine.cache.rows import RowTables
from vserve.engine.errors import ConfigError
from vserve.engine.grammar.guide import ThinkingMatcher
from vserve.engine.link.sampling_params import Pooling, SamplingParams, Thinking
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.speculation import Speculation, read_speculation
from vserve.engine.schedule.sharing import Depth
from vserve.engine.step.runner import ModelRunner

LENGTH = 24
END = 2


def config(count: int, **options: Any) -> str:
    """Always so many drafts, where there are any."""
    table = {"num_speculative_tokens_per_batch_size": [[1, 64, count]]}
    return json.dumps({"method": "ngram", "num_speculative_tokens": count, **table, **options})


class Told:
    """Drafts what it was told comes next: right, wrong or either. Knows nothing of one row in four."""

    sequences: ClassVar[list[list[int]]] = []
    share = 1.0  # of right drafts
    made = 0

    def __init__(self, settings: Speculation) -> None:
        self.count, self.rng = settings.num_drafts, random.Random(settings.num_drafts)

    def propose(self, tables: RowTables, rows: Tensor, sample_index: Tensor) -> Tensor:
        found = torch.zeros_like(rows)
        for i, (row, sample) in enumerate(zip(rows.tolist(), sample_index.tolist(), strict=True)):
            if sample < 0:
                continue
            length = int(tables.num_computed[row]) + 1
            history = tables.history.tokens(row, length, length - 1).tolist()
            known = [tokens[length:] for tokens in self.sequences if tokens[:length] == history]
            drafts = (known[0] if known else [])[: self.count]
            drafts += [7] * (self.count - len(drafts))
            drafts = [token if self.rng.random() < self.share else (token + 1) % 290 for token in drafts]
            room = torch.arange(length, length + self.count) % tables.history.ring
            tables.history.recent[row, room] = torch.tensor(drafts, dtype=torch.int32)
            found[i] = tables.num_proposed[row] = self.count if row % 4 != 3 else 0
            Told.made += 1
        return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> type[Told]:
    monkeypatch.setattr(runner_module, "NgramDrafter", Told)
    monkeypatch.setattr(Told, "made", 0)
    return Told


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return poison(monkeypatch)


def poison(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """NaN where the keys and values of wrong drafts lie. Counts them, and steps with drafts by how many tokens held."""
    seen: Counter[str] = Counter()
    runners: list[ModelRunner] = []
    bind, verify = ModelRunner.bind_cache, batch_module.verify_drafts

    def bind_cache(self: ModelRunner, *arguments: Any) -> None:
        bind(self, *arguments)
        runners[:] = [self]

    def verify_drafts(history, num_computed, num_proposed, rows, *others) -> None:
        before = {row: int(num_computed[row]) for row in rows.tolist()}
        verify(history, num_computed, num_proposed, rows, *others)
        (runner,), num_drafts = runners, others[-1]
        layers, size = runner.model.attention_layers(), runner.block_size
        for row, count in before.items():
            if num_computed[row] == count:
                continue  # padding
            seen["kept"] += int(num_computed[row]) - count
            for place in range(int(num_computed[row]), count + 1 + num_drafts):
                seen["poisoned"] += 1
                for layer in layers:
                    block = int(runner.tables.block_tables[layer.group][row, place // size])
                    layer.cache.keys[block, place % size] = float("nan")
                    layer.cache.values[block, place % size] = float("nan")
        seen["verified"] += len(before)

    monkeypatch.setattr(ModelRunner, "bind_cache", bind_cache)
    monkeypatch.setattr(batch_module, "verify_drafts", verify_drafts)
    return seen


def requests(seed: int = 3) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(5, 290) for _ in range(rng.choice([3, 17, 40, 90]))] for _ in range(20)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.0, "max_tokens": 1}, {"temperature": 0.0, "max_tokens": 2},
        {"temperature": 0.0, "max_tokens": 5, "logprobs": 3, "prompt_logprobs": 2}, {"temperature": 0.0, "logprobs": 0},
        {"seed": 1}, {"seed": 2, "top_k": 5}, {"seed": 3, "top_p": 0.7, "min_p": 0.02, "logprobs": 2},
        {"seed": 4, "repetition_penalty": 1.4}, {"seed": 5, "presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"seed": 6, "logit_bias": {9: 4.0, 11: -100.0}}, {"seed": 7, "allowed_token_ids": (5, 6, 7, 8)},
        {"seed": 8, "allowed_token_ids": (5, 6, 7), "bad_words": ((6,), (5, 7), (7, 5, 5))},
        {"seed": 9, "stop_token_ids": tuple(range(5, 290, 7)), "min_tokens": 3},
        {"seed": 10, "stop_token_ids": tuple(range(5, 290, 11))},
        {"seed": 11, "eos_token_ids": tuple(range(5, 290, 9)), "ignore_eos": False, "min_tokens": 9},
        {"seed": 12, "eos_token_ids": tuple(range(5, 290, 13)), "ignore_eos": False, "max_tokens": 7},
        {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 4, "stop_token_ids": tuple(range(5, 290, 3))},
        {"pooling": Pooling("mean")}, {"pooling": Pooling("last")},
    ]  # fmt: skip
    options = {"max_tokens": LENGTH, "temperature": 0.9, "ignore_eos": True}
    return [(prompt, SamplingParams(**{**options, **way})) for prompt, way in zip(prompts, ways, strict=True)]


def same(answers: list[Any], expected: list[Any]) -> None:
    for index, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        for name in ("tokens", "finish_reason", "stop_reason", "error"):
            assert getattr(answer, name) == getattr(wanted, name), f"request {index}: {name}"
        for name in ("logprobs", "prompt_logprobs"):
            ours, theirs = getattr(answer, name) or [], getattr(wanted, name) or []
            assert [entry.rank for entry in ours] == [entry.rank for entry in theirs], f"request {index}: {name}"
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.logprob == pytest.approx(other.logprob, abs=2e-4)
                count = min(len(mine.top_ids), len(other.top_ids))  # what others ask for may be there as well
                assert mine.top_logprobs[:count] == pytest.approx(other.top_logprobs[:count], abs=2e-4)
                assert mine.top_ids[:count] == other.top_ids[:count]
        ours, theirs = (torch.frombuffer(bytearray(each.embedding or b""), dtype=torch.float32) if each.embedding else
                        torch.zeros(0) for each in (answer, wanted))  # fmt: skip
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def plain(engine: Any) -> tuple[list[Any], list[Any]]:
    batch = requests()
    (answers,), stats = engine.run(batch, max_num_seqs=16)
    assert stats.num_drafts == 0
    reasons = Counter(answer.finish_reason for answer in answers)
    assert reasons["stop"] >= 4 and reasons["length"] >= 10 and len({tuple(a.tokens) for a in answers}) >= 18
    return batch, answers


CHUNKS = {"max_num_batched_tokens": 128, "max_mixed_tokens": 24}
PREEMPTED = {"num_gpu_blocks_override": 12, "max_model_len": 144}
CASES = [
    (1, 0.5, 1, {}), (2, 1.0, 2, CHUNKS), (3, 0.0, 2, {}), (4, 0.7, 3, PREEMPTED), (5, 0.8, 2, PREEMPTED | CHUNKS),
    (6, 1.0, 1, CHUNKS), (7, 0.9, 2, {"block_size": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("count", "share", "depth", "options"), CASES)
def test_drafts_change_no_answer(
    engine: Any, plain: Any, told: Any, poisoned: Any, monkeypatch: Any, overlap: Any, count: int, share: float,
    depth: int, options: dict[str, Any],
) -> None:  # fmt: skip
    batch, expected = plain
    monkeypatch.setattr(Told, "share", share)
    monkeypatch.setattr(Told, "sequences", [p + a.tokens for (p, _), a in zip(batch, expected, strict=True)])
    if depth > 1:
        overlap(depth)
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "speculative_config": config(count), **options}
    (cold, warm), stats = engine.run(batch, batch, **settings)
    same(cold, expected)
    same(warm, expected)
    tight = "num_gpu_blocks_override" in options
    assert (stats.num_preemptions > 0) == tight and (stats.prefix_hits > 0 or tight)
    assert 0 < stats.num_draft_tokens <= count * stats.num_drafts
    held = sum(stats.num_accepted_tokens)
    assert (held == 0) == (share == 0.0) and poisoned["poisoned"] > 0
    if share == 1.0:
        assert poisoned["kept"] > 0.5 * (1 + count) * poisoned["verified"]
    assert stats.num_accepted_tokens == tuple(sorted(stats.num_accepted_tokens, reverse=True))


@pytest.mark.parametrize("depth", [1, 2])
def test_n_grams_of_what_repeats_itself(engine: Any, overlap: Any, depth: int, poisoned: Any) -> None:
    again = {"max_tokens": 60, "ignore_eos": True, "allowed_token_ids": (5, 6)}
    batch = [*requests()[:6], *(([5, 6, 7] * 8, SamplingParams(**again, temperature=t, seed=3)) for t in (0.0, 0.4))]
    (expected,), _ = engine.run(batch)
    if depth > 1:
        overlap(depth)
    asked = json.dumps({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3})
    (answers,), stats = engine.run(batch, speculative_config=asked)
    same(answers, expected)
    assert stats.num_drafts > 0 and sum(stats.num_accepted_tokens) > 0
    assert poisoned["verified"] > 0


class Nine:
    """Nine outputs, each of three tokens, then the end."""

    ready = True

    def __init__(self) -> None:
        self.place = 0

    def allowed(self) -> set[int]:
        return {END} if self.place == 9 else {10 + self.place, 70 + self.place, 295 - self.place}

    def binds(self, ahead: int) -> bool:
        return True

    def fill(self, row: np.ndarray) -> None:
        bits = np.zeros(len(row) * 32, dtype=np.uint8)
        bits[list(self.allowed())] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self.place += 1
        return True

    def rollback(self, count: int) -> None:
        self.place -= count

    @property
    def terminated(self) -> bool:
        return self.place == 10

    def when_ready(self, call: Any) -> None:
        call()


class Grammars:
    def matcher(self, key: str) -> Any:
        return Nine() if key == "nine" else ThinkingMatcher(Thinking(-1, (50, 51), True, 12), None, ())


@pytest.mark.parametrize("depth", [1, 2])
def test_beside_grammars_and_budgets(engine: Any, told: Any, monkeypatch: Any, overlap: Any, depth: int) -> None:
    monkeypatch.setattr(arrivals_module, "Grammars", Grammars)
    rng = random.Random(5)
    prompts = [[rng.randrange(60, 290) for _ in range(length)] for length in (3, 17, 40, 33)]
    free = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    batch = [(prompt, SamplingParams(**free)) for prompt in prompts]
    batch += [(prompt, SamplingParams(**free, grammar="nine")) for prompt in prompts]
    batch += [(prompt, SamplingParams(**free, grammar="budget")) for prompt in prompts]
    (expected,), _ = engine.run(batch)
    monkeypatch.setattr(Told, "sequences", [p + a.tokens for (p, _), a in zip(batch, expected, strict=True)])
    if depth > 1:
        overlap(depth)
    (answers,), stats = engine.run(batch, speculative_config=config(3), max_num_seqs=16, max_num_batched_tokens=64)
    same(answers, expected)
    assert all(answer.tokens[-1] == END for answer in answers[4:8])
    assert all(answer.tokens[12:14] == [50, 51] for answer in answers[8:])
    assert stats.num_drafts > 0 and sum(stats.num_accepted_tokens) > 30


def test_windows_keep_what_wrong_drafts_still_need(
    windowed_engine: Any, told: Any, poisoned: Any, monkeypatch: Any, overlap: Any
) -> None:
    batch = [(prompt, sampling) for prompt, sampling in requests()[:14] if sampling.pooling is None]
    (expected,), _ = windowed_engine.run(batch)
    monkeypatch.setattr(Told, "share", 0.6)
    monkeypatch.setattr(Told, "sequences", [p + a.tokens for (p, _), a in zip(batch, expected, strict=True)])
    overlap(2)
    (answers,), stats = windowed_engine.run(
        batch, speculative_config=config(4), max_num_batched_tokens=128, block_size=4
    )
    same(answers, expected)
    assert sum(stats.num_accepted_tokens) > 0 and poisoned["poisoned"] > 0


# ---- how many ----
class Result:
    def __init__(self, counts: list[int], drafted: list[int], proposed: int) -> None:
        self.counts, self.drafted, self.num_proposed = counts, drafted, proposed


class Step:
    def __init__(self, num_drafting: int) -> None:
        self.num_drafting = num_drafting
        self.sampled: list[Any] = ["a request"] * num_drafting


def test_depth_follows_load_matches_and_what_holds() -> None:
    depth = Depth(((8, 7), (32, 3), (64, 1)))
    assert depth.depth(1) == 0, "nobody has drafts yet"
    depth.learn(Step(0), Result([], [], 1))
    assert [depth.depth(count) for count in (8, 60, 60)] == [7, 0, 0], "one in sixty is not worth it"
    depth.learn(Step(0), Result([], [], 9))
    assert [depth.depth(count) for count in (1, 8, 9, 32, 33, 64, 65)] == [7, 7, 3, 3, 1, 1, 0]
    for _ in range(40):
        depth.learn(Step(2), Result([1, 2], [3, 3], 2))
    assert depth.depth(1) == 1, "few hold"
    depth.learn(Step(0), Result([], [], 5))
    assert sum(depth.depth(60) for _ in range(64)) == 2, "now and then it is tried again"
    for _ in range(200):
        depth.learn(Step(2), Result([4, 4], [3, 3], 2))
    assert depth.depth(1) == 7
    depth.learn(Step(2), Result([4, 4], [3, 3], 0))
    assert depth.depth(1) == 0, "nobody has any"


def test_what_is_counted() -> None:
    depth = Depth(((8, 3),))
    depth.learn(Step(3), Result([4, 1, 2, 1], [2, 3, 0], 0))
    # The first kept more than had been proposed, the third took what stood there by chance: neither is its drafter's.
    counted = {"num_drafts": 2, "num_draft_tokens": 5, "num_accepted_tokens": (1, 1, 0)}
    assert depth.counts() == counted
    step = Step(1)
    step.sampled = [None]  # its mask was late
    depth.learn(step, Result([3], [3], 0))
    assert depth.counts() == counted


# ---- acceptance that is imposed ----
SYNTHETIC = {"rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("asked", "rates"),
    [
        ({"synthetic_acceptance_length": 3}, (1.0, 1.0, 0.0)),
        ({"synthetic_acceptance_length": 2.25}, (1.0, 0.25, 0.0)),
        ({"synthetic_acceptance_length": 1}, (0.0, 0.0, 0.0)),
        ({"synthetic_acceptance_rates": [0.9, 0.5, 0.5]}, (0.9, 0.5, 0.5)),
    ],
)
def test_an_imposed_acceptance(engine: Any, overlap: Any, asked: dict[str, Any], rates: tuple[float, ...]) -> None:
    overlap(2)
    options = json.loads(config(3)) | SYNTHETIC | asked
    assert read_speculation(json.dumps(options)).acceptance == rates
    batch = [([5, 6, 7, 8 + i], SamplingParams(max_tokens=60, seed=i, ignore_eos=True)) for i in range(16)]
    (answers,), stats = engine.run(batch, speculative_config=json.dumps(options), load_format="dummy", max_num_seqs=16)
    assert all(len(answer.tokens) == 60 and answer.finish_reason == "length" for answer in answers)
    shares = [held / stats.num_drafts for held in stats.num_accepted_tokens]
    assert stats.num_drafts > 50 and shares == pytest.approx(rates, abs=0.12)


def test_an_imposed_acceptance_is_for_random_weights_alone(engine: Any) -> None:
    asked = json.dumps(json.loads(config(3)) | SYNTHETIC | {"synthetic_acceptance_length": 2})
    with pytest.raises(Exception, match="measures and answers nothing; add --load-format dummy"):
        engine.run([([5], SamplingParams(max_tokens=2))], speculative_config=asked)


# ---- what is asked for ----
@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"method": "ngram"}, Speculation(7, 5, 5, ((8, 7), (32, 3), (64, 1)))),
        ({"method": "ngram_gpu", "num_speculative_tokens": 2}, Speculation(2, 5, 5, ((8, 2), (32, 2), (64, 1)))),
        ({"model": "[ngram]", "prompt_lookup_max": 4}, Speculation(7, 4, 4, ((8, 7), (32, 3), (64, 1)))),
        ({"prompt-lookup-min": 2, "prompt_lookup_max": 4}, Speculation(7, 2, 4, ((8, 7), (32, 3), (64, 1)))),
        ({"model": "m"}, Speculation(3, 5, 5, ((8, 3), (32, 3), (64, 1)), "", "m")),
        ({"method": "glm4_moe_mtp"}, Speculation(3, 5, 5, ((8, 3), (32, 3), (64, 1)), "mtp")),
        ({"method": "eagle", "model": "m", "revision": "r", "quantization": "fp8", "max_model_len": 99,
          "draft_sample_method": "greedy", "num_speculative_tokens": 1},
         Speculation(1, 5, 5, ((8, 1), (32, 1), (64, 1)), "eagle", "m", "r", "fp8", 99, True)),
        ({"model": "m", "draft_tensor_parallel_size": 4},
         Speculation(3, 5, 5, ((8, 3), (32, 3), (64, 1)), "", "m", num_ranks=4)),
        ({"method": "ngram", "num_speculative_tokens": 0}, None),
        (
            {"method": "ngram", "num_speculative_tokens": 4,
             "num_speculative_tokens_per_batch_size": [[1, 4, 4], [9, 16, 2]]},
            Speculation(4, 5, 5, ((8, 4), (16, 2))),
        ),
        ({"method": "ngram", "disable_by_batch_size": 5}, Speculation(7, 5, 5, ((4, 7),))),
        *(
            ({"method": "ngram", "rejection_sample_method": method}, Speculation(7, 5, 5, ((8, 7), (32, 3), (64, 1))))
            for method in ("standard", "block", "probabilistic")
        ),
        (
            {"model": "[ngram]", "acceptance_method": "rejection_sampler", "disable_mqa_scorer": True},
            Speculation(7, 5, 5, ((8, 7), (32, 3), (64, 1))),
        ),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, Speculation(7, 5, 5, ((8, 7), (32, 3), (64, 1)))),
    ],
)  # fmt: skip
def test_read(asked: dict[str, Any], found: Speculation | None) -> None:
    assert read_speculation(json.dumps(asked)) == found


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"method": "medusa"}, "heads of Medusa are not served yet; use {\"method\": \"eagle3\""),
        ({"method": "eagle3"}, "its model is None: it must be the folder, or the hub's name, of who is to draft"),
        ({"model": 3}, "its model is 3: it must be the folder"),
        ({"model": "m", "draft_sample_method": "best"}, "its draft_sample_method is 'best': it must be greedy or prob"),
        ({"model": "m", "parallel_drafting": True}, "its parallel_drafting is True: drafts are made one after the"),
        ({"model": "m", "draft_tensor_parallel_size": 0}, "its draft_tensor_parallel_size is 0: it must be an integer"),
        ({"model": "m", "quantization": 8}, "its quantization is 8: it must be a text"),
        ({"method": "suffix"}, "suffix decoding are not served yet; use {\"method\": \"ngram\""),
        ({"method": "mlp_speculator"}, "MLP speculators"),
        ({"method": "magic"}, "its method is 'magic': it must be ngram, eagle, eagle3, mtp or draft_model"),
        ({"method": "ngram", "rejection_sample_method": "fly"}, "accepts tokens that the model would not have sampled"),
        ({"model": "[ngram]", "acceptance_method": "typical_acceptance_sampler"}, "would not have sampled"),
        ({"method": "ngram", "acceptance_method": "rejection_sampler", "rejection_sample_method": "fly"},
         "its rejection_sample_method is 'fly'"),
        ({"method": "ngram", "synthetic_acceptance_length": 3}, 'say "rejection_sample_method": "synthetic"'),
        ({"method": "ngram", **SYNTHETIC}, "say synthetic_acceptance_length or synthetic_acceptance_rates, one of"),
        ({"method": "ngram", **SYNTHETIC, "synthetic_acceptance_length": 9}, "it must be a number from 1 to 8"),
        ({"method": "ngram", **SYNTHETIC, "synthetic_acceptance_length": True}, "is True: it must be a number"),
        ({"method": "ngram", **SYNTHETIC, "synthetic_acceptance_rates": [0.5]}, "they must be 7, one a draft"),
        (
            {"method": "ngram", **SYNTHETIC, "num_speculative_tokens": 2, "synthetic_acceptance_rates": [0.5, 0.6]},
            "none above the one before it",
        ),
        (
            {"method": "ngram", **SYNTHETIC, "num_speculative_tokens": 1, "synthetic_acceptance_rates": [2]},
            "a list of numbers from 0 to 1",
        ),
        ({"method": "ngram", "num_speculative_tokens": 16}, "its num_speculative_tokens is 16: it must be an integer"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_min 4 is above"),
        ({"method": "ngram", "drafts": 3}, "it has 'drafts': it may have method, model, num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 2]]}, "it must be a list such as"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[4, 2, 1]]}, "has [4, 2, 1]: rows grow"),
        ([], "it must be a JSON object"),
    ],
)  # fmt: skip
def test_refused(asked: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig("m", speculative_config=json.dumps(asked))
    assert message in str(caught.value) and str(caught.value).startswith("--speculative-config")


def test_depths_that_a_step_has_room_for() -> None:
    settings = Speculation(7, 5, 5, ((8, 7), (32, 3), (64, 1)))
    assert settings.within(256, 8192) == settings
    assert settings.within(16, 512).depths == ((8, 7), (16, 3))
    assert settings.within(4, 16).depths == ((2, 7), (4, 3))
    assert not any(drafts for _, drafts in settings.within(4, 2).depths)
    assert dataclasses.replace(settings, depths=((4, 7), (4, 3))).within(64, 512).depths == ((4, 7),)
