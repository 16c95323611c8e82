"""What the grammars of a step's requests allow: a mask made while the forward runs, and the tokens sampled under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..grammar.guide import Guide
from ..schedule.request import Request

if TYPE_CHECKING:
    from ..schedule.step import Step


@dataclass(frozen=True)
class TokenMask:
    rows: list[int]  # samples: with drafts, several of one request
    bits: np.ndarray  # int32 [len(rows), ceil(V / 32)], bit 1 = allowed
    postponed: tuple[int, ...] = ()  # indexes into plan.sampled: they sample nothing yet
    # Index into plan.sampled, and how many of its drafts may hold: behind the next one there is no mask.
    cuts: tuple[tuple[int, int], ...] = ()

    @property
    def limits(self) -> bool:
        """Any sample; not where all of them were postponed."""
        return bool(self.rows)


def guides(sampled: Sequence[Request | None]) -> list[Guide]:
    """Of the live constrained rows among a step's samples, all of whose predecessors have been taken in."""
    return [r.grammar for r in sampled if r is not None and r.grammar is not None and not r.finished]


def bound(step: Step) -> Iterator[tuple[int, int, Request, Guide]]:
    """Of the rows whose tokens may be limited in this step: index among `sampled`, drafts, request and guide. All that
    was sampled before has been taken in."""
    for index, request in enumerate(step.sampled):
        if request is None or (guide := request.grammar) is None or request.finished:
            continue
        num_drafts = step.num_drafts if index < step.num_drafting else 0
        if not num_drafts or guide.binds(num_drafts):
            yield index, num_drafts, request, guide


def make_mask(step: Step, vocab_size: int) -> tuple[TokenMask | None, list[tuple[Request, str]], list[Request]]:
    """Of the masks that the guides have ready; None when no live row is constrained.

    Also returns the requests whose grammar failed, and what to tell them: their rows are not in the mask; and those
    whose mask is not ready yet: they are named in the mask, and have to be postponed.
    """
    rows: list[int] = []
    bits: list[np.ndarray] = []
    late: list[int] = []
    cuts: list[tuple[int, int]] = []
    errors: list[tuple[Request, str]] = []
    postponed: list[Request] = []
    for index, num_drafts, request, guide in bound(step):
        if guide.error:
            errors.append((request, guide.error))
        elif guide.filling or guide.mask is None:
            late.append(index)
            postponed.append(request)
        else:
            masks, most = guide.rows(num_drafts)
            first = index + min(index, step.num_drafting) * step.num_drafts
            rows += range(first, first + len(masks))
            bits.append(masks)
            if most < num_drafts:
                cuts.append((index, most))
    if not rows and not late:
        return None, errors, postponed
    stacked = np.concatenate(bits) if bits else np.empty((0, -(-vocab_size // 32)), dtype=np.int32)
    return TokenMask(rows, stacked, tuple(late), tuple(cuts)), errors, postponed
