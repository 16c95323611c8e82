"""The fixture `generate` leaves no engine behind, on which the tests with a card depend; here without one."""

from __future__ import annotations

import gc

import pytest

from vserve.engine import rank
from vserve.engine.request import SamplingParams
from vserve.engine.runner import ModelRunner
from vserve.server.client.engine_client import EngineDeadError
from vserve.server.client.mailbox import Mailbox

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def num_runners() -> int:
    return sum(type(thing) is ModelRunner for thing in gc.get_objects())


def test_nothing_is_left_of_an_engine_that_has_answered(generate, tiny_model):
    answers, stats = generate(tiny_model("llama"), [([5, 6, 7], GREEDY), ([8], GREEDY)], device="cpu")
    assert [sum(len(output.token_ids) for output in outputs) for outputs in answers] == [4, 4]
    assert stats.num_free_blocks == stats.num_blocks
    assert num_runners() == 0


@pytest.mark.parametrize("place", ["start", "requests"])
def test_nothing_is_left_while_an_error_is_kept(generate, tiny_model, monkeypatch, place):
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
