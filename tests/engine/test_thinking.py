"""The matcher that lets a model reason before its grammar applies, and ends the reasoning when its budget is spent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vserve.engine.grammar.guide import ThinkingMatcher
from vserve.engine.link.sampling_params import SamplingParams, Thinking

VOCAB, EOS, BEGIN, END, ANSWER = 70, 0, 40, 41, 50


class OnlyAnswer:
    """A grammar: ANSWER, then the end."""

    ready = True

    def __init__(self) -> None:
        self.said = 0
        self.terminated = False

    def when_ready(self, call: Any) -> None:
        call()

    def binds(self, ahead: int) -> bool:
        return True

    def fill(self, row: np.ndarray) -> None:
        bits = np.zeros(len(row) * 32, dtype=np.uint8)
        bits[EOS if self.said else ANSWER] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        self.terminated = bool(self.said) and token == EOS
        self.said += 1
        return self.terminated or token == ANSWER


class AnswerOrNothing(OnlyAnswer):
    def fill(self, row: np.ndarray) -> None:
        super().fill(row)
        row[EOS // 32] |= 1 << EOS % 32


def allowed(matcher: ThinkingMatcher) -> set[int]:
    row = np.full(-(-VOCAB // 32), 7, dtype=np.int32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def thinking(open: bool = True, budget: int | None = None, end: tuple[int, ...] = (END,)) -> Thinking:
    return Thinking(BEGIN, end, open, budget)


EVERYTHING = set(range(VOCAB))


def test_the_grammar_applies_after_the_end() -> None:
    matcher = ThinkingMatcher(thinking(), OnlyAnswer(), [EOS])
    for token in (5, 60, ANSWER, BEGIN):
        assert allowed(matcher) == EVERYTHING - {EOS}
        assert matcher.accept(token) and not matcher.terminated
    assert matcher.accept(END) and allowed(matcher) == {ANSWER}
    assert not ThinkingMatcher(thinking(), OnlyAnswer(), [EOS]).terminated
    assert matcher.accept(ANSWER) and allowed(matcher) == {EOS} and matcher.accept(EOS) and matcher.terminated


def test_reasoning_may_be_all_where_the_grammar_asks_for_nothing() -> None:
    """As one of tools does that may be called: a model that calls as it thinks could not stop, and wrote on."""
    matcher = ThinkingMatcher(thinking(), AnswerOrNothing(), [EOS])
    for token in (5, 60):
        assert allowed(matcher) == EVERYTHING and matcher.accept(token)
    assert matcher.accept(END) and allowed(matcher) == {ANSWER, EOS}


def test_the_model_may_reason_first_or_not_at_all() -> None:
    matcher = ThinkingMatcher(thinking(open=False), OnlyAnswer(), [EOS])
    assert allowed(matcher) == {BEGIN, ANSWER}
    assert matcher.accept(BEGIN) and allowed(matcher) == EVERYTHING - {EOS}
    matcher = ThinkingMatcher(thinking(open=False), OnlyAnswer(), [EOS])
    assert matcher.accept(ANSWER) and allowed(matcher) == {EOS}
    assert not ThinkingMatcher(thinking(open=False), OnlyAnswer(), [EOS]).accept(7)
    never = ThinkingMatcher(Thinking(-1, (END,), False), OnlyAnswer(), [EOS])
    assert allowed(never) == {ANSWER}


@pytest.mark.parametrize("grammar", [False, True])
def test_a_spent_budget_forces_the_end(grammar: bool) -> None:
    matcher = ThinkingMatcher(thinking(budget=3, end=(END, 42)), OnlyAnswer() if grammar else None, [EOS])
    for _ in range(3):
        assert len(allowed(matcher)) > 60 and matcher.accept(7)
    assert allowed(matcher) == {END} and matcher.accept(END)
    assert allowed(matcher) == {42} and matcher.accept(42)
    assert allowed(matcher) == ({ANSWER} if grammar else EVERYTHING)


def test_what_the_model_ended_is_not_ended_again() -> None:
    matcher = ThinkingMatcher(thinking(budget=3, end=(END, 42)), None, [EOS])
    for token in (END, END, 42, 7, 8, 9):
        assert matcher.accept(token)
        assert not matcher._thinks or len(allowed(matcher)) == VOCAB or allowed(matcher) == {42}
    assert allowed(matcher) == EVERYTHING and not any(matcher.binds(ahead) for ahead in range(4))


@pytest.mark.parametrize("output", [(5, 5, 5, 6), (5, 5, 5, 5, 6), (5, 6, 5, 5, 6)])
def test_an_end_is_seen_wherever_it_begins(output: tuple[int, ...]) -> None:
    matcher = ThinkingMatcher(thinking(end=(5, 5, 6)), OnlyAnswer(), [EOS])
    for token in output:
        assert allowed(matcher) == EVERYTHING - {EOS} and matcher.accept(token)
    assert allowed(matcher) == {ANSWER}


@pytest.mark.parametrize("budget", [0, 1, 4])
@pytest.mark.parametrize("open", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_steps_that_were_planned_ahead_are_masked_in_time(budget: int, open: bool, depth: int) -> None:
    """A step is planned while the values of the `depth` tokens before it are unknown."""
    matcher = ThinkingMatcher(thinking(open, budget), None, [EOS])
    planned = [matcher.binds(ahead) for ahead in range(depth)]
    output = [] if open else [BEGIN]
    for place in range(12):
        planned.append(matcher.binds(depth))
        masked = planned.pop(0)
        wanted = BEGIN if place == 0 and not open else 7
        token = wanted if not masked or wanted in allowed(matcher) else min(allowed(matcher))
        assert matcher.accept(token)
        output += [token] if place or open else []
    assert output == ([] if open else [BEGIN]) + [7] * budget + [END] + [7] * (len(output) - budget - 1 - (not open))


def test_the_engine_refuses_what_it_cannot_force() -> None:
    assert SamplingParams(max_tokens=1, thinking=Thinking(1, (), True)).problem(VOCAB)
    assert SamplingParams(max_tokens=1, thinking=Thinking(1, (VOCAB,), True)).problem(VOCAB)
    assert SamplingParams(max_tokens=1, thinking=Thinking(VOCAB, (1,), True)).problem(VOCAB)
    assert SamplingParams(max_tokens=1, thinking=Thinking(-1, (1,), True)).problem(VOCAB) is None
