"""Masks beside the event loop: what they may cost a request, and how long others wait for them."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

import vserve.engine.start.arrivals as arrivals_module
from vserve.engine.grammar import guide as guide_module
from vserve.engine.grammar.grammar import Grammars, pack, prepare
from vserve.engine.grammar.guide import ALLOWANCE, ALLOWANCE_PER_TOKEN, QUICK, Guide
from vserve.engine.link.messages import AddGrammar
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.step import mask
from vserve.engine.step.mask import MaskThreads, Patience
from vserve.server.client.engine_client import EngineClient

from .conftest import collect

# Every text of it can be read in ever more ways.
AMBIGUOUS = b'%llguidance {"no_forcing": true}\nstart: e\ne: e e e | e e | "a" | "b" | "ab"\n'
TOKENS = [b"a", b"b", b"ab", b"ba", b"aa", b"bb", b"aab", b"abab"]


class Clock:
    """CPU time that matchers spend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "thread_time", lambda: self.now)


class Matcher:
    """Allows everything; `costs` are the seconds of its masks, the last one for ever."""

    terminated = False

    def __init__(self, clock: Clock, *costs: float) -> None:
        self.clock, self.costs = clock, list(costs)

    def binds(self, ahead: int) -> bool:
        return True

    def fill(self, row: np.ndarray) -> None:
        self.clock.now += self.costs.pop(0) if len(self.costs) > 1 else self.costs[0]
        row[:] = -1

    def accept(self, token_id: int) -> bool:
        self.clock.now += 0.001
        return True


def test_a_request_has_a_budget(monkeypatch) -> None:
    """35 ms a token is refused soon, and what grammars usually take never is."""
    clock = Clock(monkeypatch)
    guide, num_tokens = Guide(Matcher(clock, 0.035), 64), 0
    while not guide.error:
        guide.fill()
        if not guide.error:
            assert guide.accept(1) == ""
            num_tokens += 1
    assert num_tokens == int(ALLOWANCE / (0.036 - ALLOWANCE_PER_TOKEN))
    assert "0.58 s for 15 tokens" in guide.error and "3 ms a token" in guide.error and "less ambiguous" in guide.error
    usual = Guide(Matcher(clock, 0.3, 0.001), 64)
    for _ in range(1000):
        usual.fill()
        assert usual.accept(1) == "" and not usual.error


def test_slow_guides_are_left_out_of_steps_until_their_masks_are_there(monkeypatch) -> None:
    guide = Guide(Matcher(Clock(monkeypatch), 2 * QUICK, 2 * QUICK, 0.0), 64)
    assert guide.may_decode(1), "nothing is known of it yet"
    guide.fill()
    assert guide.may_decode(0) and guide.slow
    assert not guide.may_decode(1), "the mask that is there is of the token in flight"
    guide.accept(1)
    assert not guide.may_decode(0) and not guide.may_decode(1)
    guide.filling = True
    assert not guide.may_decode(0)
    guide.fill()
    assert guide.may_decode(0)
    for _ in range(4):
        guide.accept(1)
        guide.fill()
    assert not guide.slow, "it was quick for a while"


def test_patience_is_a_share_of_the_time(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience, waited = Patience(), 0.0
    for _ in range(1000):  # every step of 10 ms waits as long as it may
        seconds = patience.left()
        patience.spend(seconds)
        waited += seconds
        now += 0.01
    assert waited <= 1000 * Patience.LEAST + Patience.MOST + Patience.SHARE * 10.0 + 1e-6
    now += 60
    assert patience.left() == pytest.approx(Patience.LEAST + Patience.MOST)


class Stuck(Matcher):
    """Its mask takes as long as a test wants."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def fill(self, row: np.ndarray) -> None:
        assert self.go.wait(60)
        row[:] = -1


def test_waiting_ends_when_somebody_can_go_on(monkeypatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(mask, "LONGEST", 30.0)
        clock = Clock(monkeypatch)
        told: list[bool] = []
        threads = MaskThreads(lambda: told.append(True), num_threads=1)
        stuck, quick = Stuck(), Guide(Matcher(clock, 0.0), 64)
        late = Guide(stuck, 64)
        guides = [quick, late]
        for guide in guides:
            threads.begin(guide)
        begun = time.monotonic()
        await threads.settle(guides, 0.01, others=False)
        assert quick.settled and late.filling and time.monotonic() - begun < 30
        await threads.settle([late], 0.01, others=True)
        assert late.filling and time.monotonic() - begun < 30
        stuck.go.set()
        await threads.settle([late], 60, others=True)
        assert late.settled and told
        threads.close()

    asyncio.run(main())


@pytest.mark.parametrize("longest", [0.0, 1.0], ids=["a first one", "a slow one"])
def test_quick_masks_do_not_queue_behind_slow_ones(monkeypatch, longest) -> None:
    """Nor behind one of which nothing is known; and whoever waits for them hears of it at once."""

    async def main() -> None:
        clock = Clock(monkeypatch)
        threads = MaskThreads(lambda: None, num_threads=1)
        stuck = Stuck()
        slow = Guide(stuck, 64)
        slow._longest = longest
        threads.begin(slow)
        quick = [Guide(Matcher(clock, 0.0), 64) for _ in range(8)]
        for guide in quick:
            guide._longest = 1e-5
            threads.begin(guide)
        await threads.settle(quick, 60, others=False)
        assert all(guide.settled for guide in quick) and slow.filling
        stuck.go.set()
        await threads.settle([slow], 60, others=True)
        threads.close()

    asyncio.run(main())


def test_a_mask_that_is_there_is_known_though_the_next_one_takes_long(monkeypatch) -> None:
    """A loop that has nothing else to do sleeps until it is told."""

    async def main() -> None:
        told = asyncio.Event()
        threads = MaskThreads(told.set, num_threads=1)
        stuck, other = Stuck(), Stuck()
        for guide in (first := Guide(other, 64), second := Guide(stuck, 64)):  # new ones: one lane
            threads.begin(guide)
        other.go.set()
        await asyncio.wait_for(told.wait(), 30)
        assert first.settled and second.filling
        stuck.go.set()
        await threads.settle([second], 60, others=True)
        threads.close()

    asyncio.run(main())


def test_many_quick_masks_are_told_of_seldom(monkeypatch) -> None:
    async def main() -> None:
        told: list[bool] = []
        threads = MaskThreads(lambda: told.append(True), num_threads=1)
        stuck = Stuck()
        guides = [Guide(stuck if i == 0 else Matcher(Clock(monkeypatch), 0.0), 64) for i in range(65)]
        for guide in guides:
            guide._longest = 1e-5
            threads.begin(guide)
        monkeypatch.setattr(mask, "TELLING", 60.0)
        stuck.go.set()
        await threads.settle(guides, 60, others=False)
        assert all(guide.settled for guide in guides)
        await asyncio.sleep(0.05)
        assert len(told) == 1
        threads.close()

    asyncio.run(main())


@pytest.fixture
def told(monkeypatch) -> None:
    """The engine knows the vocabulary, and the grammar "ambiguous"."""

    class Told(Grammars):
        def __init__(self) -> None:
            super().__init__()
            self.set_vocabulary(prepare(pack([TOKENS[i % 8] for i in range(300)] + [b""] * 20, (2,))))
            self.add(AddGrammar("ambiguous", "llguidance", AMBIGUOUS))

    monkeypatch.setattr(arrivals_module, "Grammars", Told)


@pytest.mark.parametrize("depth", [1, 2])
def test_ambiguous_grammars_are_refused_while_others_are_served(tiny_model, told, monkeypatch, overlap, depth) -> None:
    """Each ends with its reason; the canary's answer is as ever, and no wait for a mask is longer than it may be."""
    if depth > 1:
        overlap(depth)
    monkeypatch.setattr(guide_module, "ALLOWANCE", 0.05)
    monkeypatch.setattr(guide_module, "ALLOWANCE_PER_TOKEN", 1e-4)
    waits: list[tuple[float, float]] = []
    settle = MaskThreads.settle

    async def timed(self, guides, seconds, others):
        begun = time.monotonic()
        await settle(self, guides, seconds, others)
        if others:
            waits.append((time.monotonic() - begun, seconds))

    monkeypatch.setattr(MaskThreads, "settle", timed)

    async def main():
        client = EngineClient(
            EngineConfig(str(tiny_model("llama")), device="cpu", cpu_threads=1, engine_in_process=True)
        )
        await client.start()
        try:
            free = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
            alone = await collect(client, [5, 6, 7], free)
            endless = {"max_tokens": 400, "temperature": 1.0, "grammar": "ambiguous", "ignore_eos": True}
            hostile = [
                asyncio.create_task(collect(client, [9, 10 + i], SamplingParams(seed=i, **endless))) for i in range(4)
            ]
            await asyncio.sleep(0.05)
            canaries = [await collect(client, [5, 6, 7], free) for _ in range(4)]
            return alone, canaries, await asyncio.gather(*hostile)
        finally:
            await client.close()

    alone, canaries, hostile = asyncio.run(main())
    assert all(canary.tokens == alone.tokens for canary in canaries)
    for answer in hostile:
        assert answer.finish_reason == "error" and "less ambiguous" in answer.error, answer
        assert 0 < len(answer.tokens) < 400
    assert all(seconds <= Patience.MOST + Patience.LEAST + 1e-9 for _, seconds in waits)
