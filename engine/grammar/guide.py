"""One output's way through its grammar: the reasoning before it, and the account of what masks cost."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from ..link.sampling_params import Thinking
from .grammar import MAX_ROLLBACK, GrammarError, Matcher

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


logger = logging.getLogger(__name__)
T = TypeVar("T")

# CPU seconds that the masks and tokens of one request may take: so many at once, and so many more for each token. Usual
# is 10 µs a token; an ambiguous grammar takes more with every token, and its client has to mend it.
ALLOWANCE = 0.5
ALLOWANCE_PER_TOKEN = 3e-3
# Masks that take longer than this are made before a step is planned, and not while others wait for it.
QUICK = 2e-3
FORGETTING = 0.75  # of the longest mask, with each that follows
AHEAD = 1e-3  # CPU seconds for masks behind drafts; that the request waits for them is the most it pays


class Guide:
    """A Matcher with one mask made ahead. `fill` may run on a thread; all else belongs to the event loop's."""

    def __init__(self, matcher: Matcher, vocab_size: int) -> None:
        # int32 [1 + n, ceil(V / 32)], of the next token and of those behind n drafts, once it is made
        self.mask: np.ndarray | None = None
        self.error = ""  # why there is none
        self.filling = False  # a thread has it
        self.drafted = False  # of what stands behind its tokens on the device, some result has told or will tell
        self.drafts: Sequence[int] = ()  # as the last one told
        self._masked: list[int] = []  # the n drafts
        self._last: int | None = None  # the draft behind those, after which nothing is sampled
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._spent = 0.0  # CPU seconds
        self._num_tokens = 0
        self._longest = 0.0  # CPU seconds of a mask, lately

    @property
    def settled(self) -> bool:
        """Nothing is left to do before the next token can be sampled."""
        return self.mask is not None or bool(self.error)

    @property
    def is_new(self) -> bool:
        """No mask has been made yet."""
        return not self._longest

    @property
    def slow(self) -> bool:
        """Its next mask may keep others waiting."""
        return self._longest > QUICK

    @property
    def terminated(self) -> bool:
        return self._matcher.terminated

    def binds(self, ahead: int) -> bool:
        return self._matcher.binds(ahead)

    def may_decode(self, num_in_flight_tokens: int) -> bool:
        """Whether a step may be planned that samples the next token: not while its mask would be waited for."""
        if self.filling:
            return False
        if num_in_flight_tokens:  # a mask that is there is theirs
            return not self.slow
        return self.settled or not self.slow or not self._matcher.binds(0)

    def may_draft(self, ahead: int) -> bool:
        """Whether a step may be planned with drafts before the token after the next `ahead` ones."""
        return not self._matcher.binds(ahead) or (self.drafted and not self.slow)

    def forget_drafts(self) -> None:
        """The row of the device is another's."""
        self.drafted, self.drafts = False, ()

    def rows(self, num_drafts: int) -> tuple[np.ndarray, int]:
        """The masks that there are of the next token and of those behind so many drafts, and how many of the drafts
        may hold: not those behind which a mask is missing."""
        assert self.mask is not None
        count, drafts = 0, self.drafts  # they may be others than when the mask was begun
        for draft, masked in zip(drafts[:num_drafts], self._masked, strict=False):
            if draft != masked:
                break
            count += 1
        ended = count == len(self._masked) and count < len(drafts) and drafts[count] == self._last
        return self.mask[: 1 + count], num_drafts if ended else count

    def fill(self) -> None:
        """Makes the mask, or finds out why there can be none. Raises nothing."""
        try:
            drafts = self.drafts
            rows = np.empty((1 + len(drafts), self._num_words), dtype=np.int32)
            self._timed(self._matcher.fill, rows[0], is_mask=True)
            if drafts or self._masked:
                self._look_ahead(rows, drafts)
            self.mask = rows[: 1 + len(self._masked)]
        except BaseException as error:  # a panic of llguidance's is no Exception; the thread has to go on
            self.error = _failure(error)
        self.filling = False  # last: from here on the event loop's thread has it

    def _look_ahead(self, rows: np.ndarray, drafts: Sequence[int]) -> None:
        """Masks of the tokens behind drafts, as long as the grammar allows these and no request waits for long. It
        is not the request that asked for them: its account does not pay."""
        self._masked, self._last = [], None
        matcher, started, accepted = self._matcher, time.thread_time(), 0
        now = started
        try:
            for draft in () if self.slow else drafts:
                allowed = matcher.accept(draft)
                accepted += allowed
                if not allowed or matcher.terminated:
                    self._last = draft
                    break
                matcher.fill(rows[accepted])
                self._masked.append(draft)
                before, now = now, time.thread_time()
                self._longest = max(self._longest, now - before)
                if now - started > AHEAD:
                    break
        except BaseException as error:  # as in `fill`. Where the token comes, its own mask will say what is wrong
            logger.debug("no mask behind a draft: %s", error)
            self._longest = max(self._longest, time.thread_time() - now)
        if accepted:
            matcher.rollback(accepted)

    def accept(self, token_id: int) -> str:
        """Takes in the next token; why it cannot, or ""."""
        self.mask = None
        self._num_tokens += 1
        try:
            if self._timed(self._matcher.accept, token_id, is_mask=False):
                return ""
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as above; on this thread it would end the engine
            return _failure(error)
        return f"the grammar of this request does not allow the token {token_id} that was sampled"

    def _timed(self, work: Callable[[T], bool | None], argument: T, is_mask: bool) -> bool | None:
        started = time.thread_time()
        result = work(argument)
        seconds = time.thread_time() - started
        self._spent += seconds
        if is_mask:
            self._longest = max(seconds, FORGETTING * self._longest)
        if self._spent > (limit := ALLOWANCE + ALLOWANCE_PER_TOKEN * self._num_tokens):
            raise GrammarError(
                f"it took {self._spent:.2f} s for {self._num_tokens} tokens, and {limit:.2f} s are allowed "
                f"({ALLOWANCE:g} s, and {1e3 * ALLOWANCE_PER_TOKEN:g} ms a token): make it less ambiguous, with fewer "
                "ways to read the same text"
            )
        return result


def _failure(error: BaseException) -> str:
    logger.warning("the grammar of a request failed", exc_info=error)
    return f"the grammar of this request failed: {type(error).__name__}: {error}"
