"""What the grammars of a step's requests allow: a mask made while the forward runs, and the tokens sampled under it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from ..grammar.guide import Guide
from ..options.cgroup import num_cores
from ..schedule.request import Request

if TYPE_CHECKING:
    from ..schedule.step import Step

TELLING = 2e-3  # seconds of many quick masks, after which the event loop is told that there are some
_QUICK, _SLOW, _NEW = range(3)  # lanes: of guides whose masks are quick, or slow, and that have made none yet
LONGEST = 0.25  # seconds that a step waits though nobody in it can go on: who arrives meanwhile can


class Patience:
    """How long a step waits for masks while others could go on: of each second no more than a share, seen over many
    steps, however many grammars are slow."""

    SHARE = 0.1
    MOST = 0.05  # seconds of one step
    LEAST = 2e-3  # seconds that every step may wait: a quick mask takes less

    def __init__(self) -> None:
        self._left = self.MOST
        self._seen = time.monotonic()

    def left(self) -> float:
        now = time.monotonic()
        self._left = min(self.MOST, self._left + self.SHARE * (now - self._seen))
        self._seen = now
        return self.LEAST + max(0.0, self._left)

    def spend(self, seconds: float) -> None:
        self._left -= max(0.0, seconds - self.LEAST)


class MaskThreads:
    """The libraries leave the GIL to others while they look for what may follow. Quick masks do not queue behind slow
    ones: those have threads of their own."""

    def __init__(self, wake: Callable[[], None], num_threads: int | None = None) -> None:
        """`wake` is called on the event loop when a mask is there; `num_threads`: for either kind of mask."""
        self._wake = wake
        self._num_threads = num_threads or max(1, min(4, num_cores() // 8))
        # The first mask may be the longest: the new ones have a lane to themselves.
        self._lanes: tuple[SimpleQueue[Guide | None], ...] = (SimpleQueue(), SimpleQueue(), SimpleQueue())
        self._is_waking = False  # a call of `_masks_made` is on its way: it is for every mask that is there by then
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled = asyncio.Event()

    def begin(self, guide: Guide) -> None:
        """Starts making the mask of the next token, unless it is there."""
        if guide.filling or guide.settled:
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for number in (_QUICK, _SLOW, _NEW) * self._num_threads:
                threading.Thread(target=self._run, args=(number,), name="vserve-masks", daemon=True).start()
        guide.filling = True
        self._lanes[_NEW if guide.is_new else _SLOW if guide.slow else _QUICK].put(guide)

    async def settle(self, guides: Sequence[Guide], seconds: float, others: bool) -> None:
        """Returns when all of these are settled; after so many seconds, if somebody could go on by then: one of these,
        or `others` in the same step; after LONGEST in any case."""
        begun = time.monotonic()
        while any(guide.filling for guide in guides):
            self._settled.clear()
            could_go_on = others or not all(guide.filling for guide in guides)
            left = begun + (seconds if could_go_on else LONGEST) - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), min(left, seconds))

    def close(self) -> None:
        for lane in self._lanes:
            for _ in range(self._num_threads):
                lane.put(None)

    def _run(self, number: int) -> None:
        assert self._loop is not None
        lane = self._lanes[number]
        while (guide := lane.get()) is not None:
            guide.fill()
            if number == _QUICK:
                self._fill_more(lane)
            if not self._is_waking:
                self._is_waking = True
                try:
                    self._loop.call_soon_threadsafe(self._masks_made)
                except RuntimeError:
                    return  # the loop is closed: nobody waits any more

    def _fill_more(self, lane: SimpleQueue[Guide | None]) -> None:
        """To be told costs the event loop more than a quick mask costs: of many it is told at the end. The others may
        take seconds each, behind which a mask that is there must not stay unknown."""
        until = time.monotonic() + TELLING
        while time.monotonic() < until:
            try:
                guide = lane.get_nowait()
            except Empty:
                return
            if guide is None:
                lane.put(None)  # for the caller, who ends by it
                return
            guide.fill()

    def _masks_made(self) -> None:
        self._is_waking = False  # first: whatever is ready from here on needs another call
        self._settled.set()
        self._wake()


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
