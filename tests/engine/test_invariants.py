"""The engine's books are checked at rest; what does not balance is counted and said, and nobody is turned away."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from vserve.engine.errors import InvariantError
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.schedule.block_pool import BlockPool
from vserve.engine.schedule.kv_cache import KVCacheManager

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("failure", [InvariantError("a block was lost"), KeyError(7)])
def test_an_engine_whose_books_are_off_goes_on_and_says_so(engine, monkeypatch, caplog, failure):
    real = KVCacheManager.check_invariants
    checks = []

    def check(self, running, thorough):
        real(self, running, thorough)
        checks.append(True)
        if len(checks) <= 3:
            raise type(failure)(*failure.args)  # a new one: it keeps the frames it passes, and they the engine

    monkeypatch.setattr(KVCacheManager, "check_invariants", check)
    with caplog.at_level(logging.ERROR, "vserve"):
        waves, stats = engine.run(*[[([5, 6, 7], GREEDY)]] * 4)
    assert [answer.finish_reason for (answer,) in waves] == ["length"] * 4
    assert stats.num_invariant_violations >= 2  # the last word of a wave leaves before its books are checked
    said = [record.message for record in caplog.records if "do not balance" in record.message]
    assert len(said) == 2 and all("report it" in line for line in said), "the first, the second and the fourth time"


def test_checks_hold_without_assertions():
    """`python -O` drops every `assert`."""
    script = (
        "from vserve.engine.schedule.block_pool import BlockPool\n"
        "pool = BlockPool(4)\n"
        "pool.num_free = 2\n"
        "try:\n    pool.check_invariants()\n"
        "except AssertionError as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "InvariantError 3 blocks in the free list, 2 counted\n"


def test_what_is_wrong_is_named():
    pool = BlockPool(4)
    pool.num_free = 2
    with pytest.raises(InvariantError, match="3 blocks in the free list"):
        pool.check_invariants()
