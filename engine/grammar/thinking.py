"""Where an output stands in its reasoning: the grammar waits for the end of it, and a budget brings that end about."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..link.sampling_params import Thinking
from .grammar import MAX_ROLLBACK, Matcher

ALL = -1  # 32 tokens that are allowed


class ThinkingMatcher:
    """A Matcher that lets the model think, for `thinking.budget` tokens at most, and follows the grammar from then on.

    Without a grammar, which means with a budget, everything is allowed but for the moment in which the end is forced.
    """

    def __init__(self, thinking: Thinking, grammar: Matcher | None, stop_token_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._begin, self._end = thinking.begin, thinking.end
        self._budget = thinking.budget
        self._may_begin = not thinking.open and thinking.begin >= 0  # with the next token, and with no later one
        self._thinks = thinking.open
        self._num_tokens = 0  # of reasoning
        self._num_end_tokens = 0  # of `end` that have come
        self._stops = stop_token_ids
        self._asks_nothing: bool | None = None  # not known before the first token of reasoning
        # Before each of the last tokens: the first four of these, and whether the grammar took it in.
        self._before: deque[tuple[bool, bool, int, int, bool]] = deque(maxlen=MAX_ROLLBACK)

    @property
    def ready(self) -> bool:
        return self._grammar is None or self._grammar.ready

    def when_ready(self, call: Callable[[], object]) -> None:
        if self._grammar is None:
            call()
        else:
            self._grammar.when_ready(call)

    def binds(self, ahead: int) -> bool:
        if self._grammar is not None:
            return True
        if self._budget is None or not (self._thinks or self._may_begin):
            return False
        return self._num_tokens + ahead >= self._budget + self._may_begin

    def fill(self, row: np.ndarray) -> None:
        if not self._thinks:
            if self._grammar is None:
                row[:] = ALL
            else:
                self._grammar.fill(row)
                if self._may_begin:
                    _allow(row, self._begin)
        elif self._budget is not None and self._num_tokens >= self._budget:
            row[:] = 0
            _allow(row, self._end[self._num_end_tokens])
        else:
            row[:] = ALL
            if self._grammar is not None and not self._may_end(row.size):  # what it asks for is still to come
                for token_id in self._stops:
                    row[token_id // 32] &= ~_bit(token_id)

    def accept(self, token_id: int) -> bool:
        begins = self._may_begin and token_id == self._begin
        follows = not self._thinks and not begins and self._grammar is not None
        if follows and self._grammar is not None and not self._grammar.accept(token_id):
            return False
        self._before.append((self._may_begin, self._thinks, self._num_tokens, self._num_end_tokens, follows))
        if self._thinks:
            self._think(token_id)
        else:
            self._may_begin, self._thinks = False, begins
        return True

    def rollback(self, count: int) -> None:
        followed = 0
        for _ in range(count):
            self._may_begin, self._thinks, self._num_tokens, self._num_end_tokens, follows = self._before.pop()
            followed += follows
        if followed and self._grammar is not None:
            self._grammar.rollback(followed)

    @property
    def terminated(self) -> bool:
        return not self._thinks and self._grammar is not None and self._grammar.terminated

    def _may_end(self, size: int) -> bool:
        """Whether the grammar, which has seen nothing yet, asks for nothing: the model may then end as it thinks.
        `size`: of a row."""
        assert self._grammar is not None
        if self._asks_nothing is None:
            row = np.empty(size, dtype=np.int32)
            self._grammar.fill(row)
            self._asks_nothing = any(row[token_id // 32] & _bit(token_id) for token_id in self._stops)
        return self._asks_nothing

    def _think(self, token_id: int) -> None:
        self._num_tokens += 1
        # The most of `end` that these tokens end in: where it repeats itself, one attempt begins within another.
        tail = (*self._end[: self._num_end_tokens], token_id)
        self._num_end_tokens = next(n for n in range(len(tail), -1, -1) if tail[len(tail) - n :] == self._end[:n])
        self._thinks = self._num_end_tokens < len(self._end)


def _bit(token_id: int) -> np.int32:
    return np.array([1 << token_id % 32], dtype=np.uint32).view(np.int32)[0]


def _allow(row: np.ndarray, token_id: int) -> None:
    row[token_id // 32] |= _bit(token_id)
