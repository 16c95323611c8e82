"""Answers with a grammar, or a budget for their reasoning, are the same with drafts as without (fp32, CPU)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vserve.engine.grammar.guide as guide_module
import vserve.engine.start.arrivals as arrivals_module
import vserve.engine.step.runner as runner_module
from vserve.engine.grammar.grammar import BACKENDS, GrammarError, GrammarMatcher, Vocabulary, pack, prepare
from vserve.engine.grammar.guide import Guide, ThinkingMatcher
from vserve.engine.link.sampling_params import SamplingParams, Thinking
from vserve.server.grammar.compile import compile
from vserve.server.grammar.constraint import Constraint
from vserve.server.grammar.tools import tool_use
from vserve.server.parsers.formats import known

END = 2
PIECES = [b'{"', b'":', b'": "', b'", "', b'"}', b"true", b"false", b"null", b"name", b"red", b"green", b"ab", b"10"]
TOKENS = [b"", b"", b"", *(bytes([byte]) for byte in range(256)), *PIECES]
TOKENS += [b""] * (300 - len(TOKENS))
CLOSE = (50, 51)  # tokens that end a reasoning
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["name", "age", "on"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {
    "type": "object", "properties": {"deep": {"type": "boolean"}, "pages": {"enum": [1, 10, 100]}},
    "required": ["deep", "pages"], "additionalProperties": False}}}]  # fmt: skip


def constraints() -> dict[str, Constraint]:
    use = tool_use(TOOLS, "required", None)
    assert use is not None
    hermes = next(format for format in known()[0] if format.name == "hermes")
    return {
        "json": Constraint("json", json.dumps(SCHEMA, sort_keys=True)),
        "choice": Constraint("choice", json.dumps(["red or green", "red and green", "blue", "red"])),
        "regex": Constraint("regex", r"(ab|c[0-9]{2}){2,6}!?"),
        "lark": Constraint("grammar", 'start: item ("," item)*\nitem: "ab" | "name" /[0-9]{1,3}/\n'),
        "tools": use.constraints(hermes, None)[0],
    }


@pytest.fixture(scope="session")
def drafts(load_module: Any) -> Any:
    """What it has in common with answers that follow no grammar."""
    return load_module(Path(__file__).with_name("test_speculation.py"))


@pytest.fixture
def told(drafts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(runner_module, "NgramDrafter", drafts.Told)
    return drafts.Told


@pytest.fixture(scope="module")
def grammars() -> Iterator[type]:
    vocabulary = Vocabulary(prepare(pack(TOKENS, (END,))))
    compiled, backends = {}, set()
    for name, constraint in constraints().items():
        backend, payload = compile(constraint, vocabulary)
        compiled[name] = BACKENDS[backend](vocabulary, payload)
        backends.add(backend)
    assert backends == set(BACKENDS)

    class Grammars:
        def matcher(self, key: str) -> GrammarMatcher:
            return GrammarMatcher(vocabulary, compiled[key])

    yield Grammars


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "eos_token_ids": (END,), "ignore_eos": False}
    seeded = {**options, "temperature": 1.0}
    reasoning = [Thinking(-1, CLOSE, True, 9), Thinking(40, CLOSE, False, 4), Thinking(-1, CLOSE, True, 0)]
    ways = [{**options, "grammar": name} for name in constraints()]
    ways += [{**seeded, "seed": seed, "grammar": name} for seed, name in enumerate(constraints())]
    ways += [{**seeded, "seed": 9, "grammar": "json", "thinking": one} for one in reasoning]
    ways += [{**options, "grammar": "tools", "thinking": one} for one in reasoning]
    ways += [{**seeded, "seed": 3, "thinking": one} for one in reasoning]
    ways += [
        {**seeded, "seed": 4, "grammar": "json", "max_tokens": 7},
        {**seeded, "seed": 4, "grammar": "regex", "logprobs": 2},
        {**seeded, "seed": 5, "grammar": "json", "repetition_penalty": 1.3, "logit_bias": {259: 3.0}},
        options, seeded | {"seed": 1},
        {**seeded, "seed": 6, "grammar": "choice", "stop_token_ids": (3 + ord("e"),), "min_tokens": 5},
    ]  # fmt: skip
    lengths = [3, 17, 40, 33, 64, 5]
    return [
        ([rng.randrange(3, 290) for _ in range(lengths[i % 6])], SamplingParams(**way)) for i, way in enumerate(ways)
    ]


@pytest.fixture(scope="module")
def plain(engine: Any, grammars: type) -> Iterator[tuple[list[Any], list[Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals_module, "Grammars", grammars)
        batch = requests()
        (answers,), stats = engine.run(batch, max_num_seqs=32)
    assert not any(answer.error for answer in answers) and stats.num_drafts == 0
    assert sum(answer.finish_reason == "stop" for answer in answers) > 9
    for (_, sampling), answer in zip(batch, answers, strict=True):
        text = b"".join(TOKENS[token] for token in answer.tokens).decode(errors="replace")
        if sampling.grammar == "json" and sampling.thinking is None and answer.finish_reason == "stop":
            assert set(json.loads(text)) == {"name", "age", "on"}
    yield batch, answers


TIGHT = {"num_gpu_blocks_override": 24, "max_model_len": 160}
CASES = [
    (1, 1.0, 1, {}), (2, 0.5, 2, {}), (3, 1.0, 2, {}), (4, 0.8, 3, TIGHT), (5, 0.0, 2, {}),
    (6, 0.9, 1, {"block_size": 4}), (7, 1.0, 2, {"max_num_batched_tokens": 300, "max_mixed_tokens": 24}),
]  # fmt: skip


@pytest.mark.parametrize(("count", "share", "depth", "options"), CASES)
@pytest.mark.slow
def test_drafts_change_no_answer_that_follows_a_grammar(
    engine: Any, grammars: type, plain: Any, drafts: Any, told: Any, monkeypatch: Any, overlap: Any, count: int,
    share: float, depth: int, options: dict[str, Any],
) -> None:  # fmt: skip
    batch, expected = plain
    poisoned = drafts.poison(monkeypatch)
    monkeypatch.setattr(arrivals_module, "Grammars", grammars)
    monkeypatch.setattr(told, "share", share)
    monkeypatch.setattr(told, "sequences", [p + a.tokens for (p, _), a in zip(batch, expected, strict=True)])
    rolled = []
    real = Guide.rows
    monkeypatch.setattr(Guide, "rows", lambda self, most: rolled.append(len((found := real(self, most))[0])) or found)
    if depth > 1:
        overlap(depth)
    settings = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "speculative_config": drafts.config(count),
        **options,
    }
    (answers,), stats = engine.run(batch, **settings)
    drafts.same(answers, expected)
    assert stats.num_drafts > 0 and stats.num_invariant_violations == 0 and poisoned["verified"] > 0
    if share == 1.0:
        assert max(rolled) == 1 + count, "every draft had its mask"
        assert sum(stats.num_accepted_tokens) > 0.4 * stats.num_draft_tokens
    if share == 0.0:
        assert sum(stats.num_accepted_tokens) == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_that_are_late_or_short(
    engine: Any,
    grammars: type,
    plain: Any,
    drafts: Any,
    told: Any,
    monkeypatch: Any,
    overlap: Any,
    depth: int,
) -> None:
    """Some rows sit out, and some drafts have no masks: nothing is lost."""
    batch, expected = plain
    monkeypatch.setattr(arrivals_module, "Grammars", grammars)
    monkeypatch.setattr(told, "sequences", [p + a.tokens for (p, _), a in zip(batch, expected, strict=True)])
    late, luck = [], random.Random(3)
    fill, postpone, ahead = Guide.fill, guide_module.Guide._look_ahead, guide_module.AHEAD
    assert ahead > 0

    def slowly(self: Guide) -> None:
        if luck.random() < 0.1:
            late.append(self)
            import time

            time.sleep(0.02)
        fill(self)

    def short(self: Guide, rows: np.ndarray, drafts: Any) -> None:
        postpone(self, rows, drafts[: luck.randrange(4)])

    monkeypatch.setattr(Guide, "fill", slowly)
    monkeypatch.setattr(Guide, "_look_ahead", short)
    monkeypatch.setattr("vserve.engine.start.loop.Patience.left", lambda self: 0.002)
    if depth > 1:
        overlap(depth)
    (answers,), stats = engine.run(
        batch, speculative_config=drafts.config(3), max_num_seqs=32, max_num_batched_tokens=256
    )
    drafts.same(answers, expected)
    assert late and stats.num_drafts > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_of_a_model(engine: Any, grammars: type, plain: Any, monkeypatch: Any, overlap: Any, depth: int) -> None:
    """The model drafts for itself: it knows no grammar, and is right where that leaves it a choice."""
    batch, expected = plain
    monkeypatch.setattr(arrivals_module, "Grammars", grammars)
    if depth > 1:
        overlap(depth)
    table = {"num_speculative_tokens_per_batch_size": [[1, 64, 3]]}
    asked = json.dumps({"model": str(engine.folder), "num_speculative_tokens": 3, **table})
    (answers,), stats = engine.run(batch, speculative_config=asked, max_num_seqs=32, max_num_batched_tokens=512)
    assert [(answer.tokens, answer.finish_reason, answer.error) for answer in answers] == [
        (answer.tokens, answer.finish_reason, answer.error) for answer in expected
    ]
    assert stats.num_drafts > 0 and sum(stats.num_accepted_tokens) > 0


def test_an_imposed_acceptance_leaves_grammars_alone(
    engine: Any, grammars: type, drafts: Any, monkeypatch: Any, overlap: Any
) -> None:
    """Drafts that hold whatever the masks say would end their requests with an error."""
    monkeypatch.setattr(arrivals_module, "Grammars", grammars)
    overlap(2)
    imposed = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}
    asked = json.dumps(json.loads(drafts.config(3)) | imposed)
    batch = requests()
    (answers,), stats = engine.run(
        batch, speculative_config=asked, load_format="dummy", max_num_seqs=32, max_num_batched_tokens=512
    )
    assert not any(answer.error for answer in answers) and stats.num_drafts > 0


def test_a_grammar_that_breaks_behind_a_draft_breaks_when_that_is_sampled(
    engine: Any,
    drafts: Any,
    told: Any,
    monkeypatch: Any,
) -> None:
    class Breaks:
        """Five tokens, any; then no mask can be made, or no token taken in."""

        ready, terminated = True, False

        def __init__(self, key: str) -> None:
            self.key, self.count = key, 0

        def when_ready(self, call: Any) -> None:
            call()

        def binds(self, ahead: int) -> bool:
            return True

        def fill(self, row: np.ndarray) -> None:
            if self.count == 5 and self.key == "fill":
                raise GrammarError("no mask")
            row[:] = -1

        def accept(self, token: int) -> bool:
            if self.count == 5 and self.key == "accept":
                raise GrammarError("no token")
            allowed = self.count < 5 or self.key != "refuse"
            self.count += allowed
            return allowed

        def rollback(self, count: int) -> None:
            self.count -= count

    class Grammars:
        def matcher(self, key: str) -> Any:
            return Breaks(key)

    monkeypatch.setattr(arrivals_module, "Grammars", Grammars)
    free = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    keys = ("fill", "accept", "refuse", "holds")
    batch = [([5, 6, 7 + i], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, grammar=key))
             for i, key in enumerate(keys)]  # fmt: skip
    (whole, expected), _ = engine.run([(prompt, free) for prompt, _ in batch], batch)
    monkeypatch.setattr(told, "sequences", [p + a.tokens for (p, _), a in zip(batch, whole, strict=True)])
    (answers,), stats = engine.run(batch, speculative_config=drafts.config(7))
    drafts.same(answers, expected)
    assert [len(answer.tokens) for answer in answers] == [5, 5, 5, 20] and stats.num_drafts > 0
    assert [bool(answer.error) for answer in answers] == [True, True, True, False]


# ---- the guide alone ----
def guide(grammars: Any, key: str, drafts: list[int]) -> Guide:
    made = Guide(grammars().matcher(key), 300)
    made.drafts = drafts
    made.fill()
    assert not made.error
    return made


def tokens_of(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def allowed(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_masks_behind_drafts_are_those_of_each_token(grammars: Any) -> None:
    drafts = tokens_of("red or")
    ahead = guide(grammars, "choice", drafts)
    rows, most = ahead.rows(len(drafts))
    assert len(rows) == 7 and most == 6
    alone = Guide(grammars().matcher("choice"), 300)
    for row, token in zip(rows, [*drafts, None], strict=True):
        alone.fill()
        assert alone.mask is not None and allowed(row) == allowed(alone.mask[0])
        assert token is None or (alone.accept(token) == "" and ahead.accept(token) == "")


def test_behind_a_refused_draft_nothing_is_masked_and_nothing_cut(grammars: Any) -> None:
    made = guide(grammars, "choice", [*tokens_of("re"), 5, 5])
    rows, most = made.rows(4)
    assert len(rows) == 3 and most == 4
    made.drafts = [*tokens_of("re"), *tokens_of("d"), 5]  # others than those it was made for
    rows, most = made.rows(4)
    assert len(rows) == 3 and most == 2
    made.drafts = []
    rows, most = made.rows(4)
    assert len(rows) == 1 and most == 0
    assert made.accept(tokens_of("r")[0]) == "", "the matcher is where it was"


def test_slow_masks_are_not_made_behind_drafts(grammars: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(guide_module, "AHEAD", -1.0)
    rows, most = guide(grammars, "choice", tokens_of("red or")).rows(6)
    assert len(rows) == 2 and most == 1, "as soon as it takes long, no more"
    monkeypatch.setattr(guide_module, "QUICK", -1.0)
    made = guide(grammars, "choice", tokens_of("red or"))
    made.drafted = True
    assert len(made.rows(6)[0]) == 1 and not made.may_draft(3), "its own mask was slow"


@pytest.mark.parametrize("key", sorted(constraints()))
def test_rollback_is_as_if_nothing_had_come(grammars: Any, key: str) -> None:
    """Random walks: some tokens ahead and back, by a matcher alone and by one that thinks before."""
    rng = random.Random(key)
    for thinks in (None, Thinking(40, CLOSE, False, 3), Thinking(-1, CLOSE, True, 5)):
        here, there = (grammars().matcher(key) for _ in range(2))
        if thinks is not None:
            here, there = ThinkingMatcher(thinks, here, (END,)), ThinkingMatcher(thinks, there, (END,))

        def mask(matcher: Any) -> set[int]:
            row = np.empty(10, dtype=np.int32)
            matcher.fill(row)
            return allowed(row)

        while not there.terminated and rng.random() < 0.95:
            count = 0
            while count < 15 and not here.terminated and rng.random() < 0.8:
                token = rng.choice(sorted(mask(here))) if rng.random() < 0.8 else rng.randrange(2, 290)
                count += here.accept(token)
            here.rollback(count)
            assert mask(here) == mask(there) and not here.terminated
            token = rng.choice(sorted(mask(there)))
            assert here.accept(token) and there.accept(token)
            assert here.terminated == there.terminated
