"""What the grammars of a step's requests allow: a mask made while the forward runs, and the tokens sampled under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .guide import Guide
from .request import Request


@dataclass(frozen=True)
class TokenMask:
    rows: list[int]  # indexes into plan.sampled
    bits: np.ndarray  # int32 [len(rows), ceil(V / 32)], bit 1 = allowed
    postponed: tuple[int, ...] = ()  # indexes into plan.sampled: they sample nothing yet

    def behind(self, count: int) -> TokenMask:
        """The same, with indexes into the samples of a step where so many are verified drafts, all of others."""
        rows, postponed = [row + count for row in self.rows], tuple(row + count for row in self.postponed)
        return TokenMask(rows, self.bits, postponed) if count else self


def guides(sampled: Sequence[Request | None]) -> list[Guide]:
    """Of the live constrained rows among a step's samples, all of whose predecessors have been taken in."""
    return [r.grammar for r in sampled if r is not None and r.grammar is not None and not r.finished]


def make_mask(
    sampled: Sequence[Request | None], vocab_size: int
) -> tuple[TokenMask | None, list[tuple[Request, str]], list[Request]]:
    """Of the masks that the guides have ready; None when no live row is constrained.

    Also returns the requests whose grammar failed, and what to tell them: their rows are not in the mask; and those
    whose mask is not ready yet: they are named in the mask, and have to be postponed.
    """
    rows: list[int] = []
    bits: list[np.ndarray] = []
    late: list[int] = []
    errors: list[tuple[Request, str]] = []
    postponed: list[Request] = []
    for index, request in enumerate(sampled):
        if request is None or (guide := request.grammar) is None or request.finished:
            continue
        if guide.error:
            errors.append((request, guide.error))
        elif guide.filling or guide.mask is None:
            late.append(index)
            postponed.append(request)
        else:
            rows.append(index)
            bits.append(guide.mask)
    if not rows and not late:
        return None, errors, postponed
    stacked = np.stack(bits) if bits else np.empty((0, -(-vocab_size // 32)), dtype=np.int32)
    return TokenMask(rows, stacked, tuple(late)), errors, postponed
