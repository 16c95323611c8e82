"""The fixture `generate` leaves no engine behind, on which the tests with a card depend; here without one."""

from __future__ import annotations

import gc

import pytest

from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.start import rank
from vserve.engine.step.runner import ModelRunner
from vserve.server.client.engine_client import EngineDeadError
from vserve.server.client.mailbox import Mailbox

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def all_runners() -> list[ModelRunner]:
    return [thing for thing in gc.get_objects() if type(thing) is ModelRunner]


@pytest.fixture
def num_runners():
    """How many runners there are that were not there before the test: an earlier one may still hold its own."""
    gc.collect()
    kept = all_runners()
    before = {id(runner) for runner in kept}
    yield lambda: sum(id(runner) not in before for runner in all_runners())
    kept.clear()


def test_nothing_is_left_of_an_engine_that_has_answered(generate, tiny_model, num_runners):
    answers, stats = generate(tiny_model("llama"), [([5, 6, 7], GREEDY), ([8], GREEDY)], device="cpu")
    assert [sum(len(output.token_ids) for output in outputs) for outputs in answers] == [4, 4]
    assert stats.num_free_blocks == stats.num_blocks
    assert num_runners() == 0


@pytest.mark.parametrize("place", ["start", "requests"])
@pytest.mark.slow
def test_nothing_is_left_while_an_error_is_kept(generate, tiny_model, monkeypatch, num_runners, place):
    async def get(self: Mailbox) -> None:
        raise EngineDeadError("broken on purpose")

    def warm_up(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    if place == "start":
        monkeypatch.setattr(rank, "warm_up", warm_up)
    else:
        monkeypatch.setattr(Mailbox, "get", get)
    with pytest.raises(EngineDeadError, match="broken on purpose") as kept:  # as pytest keeps that of a failed test
        generate(tiny_model("llama"), [([5, 6, 7], GREEDY), ([8], GREEDY)], device="cpu")
    assert kept.value.__traceback__ is not None
    assert num_runners() == 0
