"""Exceptions in the middle of a step, where a test asks for them."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from vserve.engine.layers.attention import Attention
from vserve.engine.speculation.drafter import NgramDrafter
from vserve.engine.speculation.model_drafter import ModelDrafter
from vserve.engine.step.sampled import Pending
from vserve.engine.step.sampler import Sampler

MESSAGE = "raised by the stress"
# Place → (class, method, calls that a wave makes of it, about, where the place is in use).
PLACES: dict[str, tuple[type, str, int]] = {
    "attention": (Attention, "forward", 120),
    "sampler": (Sampler, "__call__", 40),
    "drafts of n-grams": (NgramDrafter, "propose", 40),
    "drafts of a model": (ModelDrafter, "_draw", 40),
    "result": (Pending, "wait", 40),
}


class Injector:
    """Does nothing unless it is armed, and then counts what it has raised."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._due: dict[str, set[int]] = {}  # by place: how many of its calls are left until one raises
        self.raised: dict[str, int] = dict.fromkeys(PLACES, 0)
        for place, (owner, name, _) in PLACES.items():
            patch.setattr(owner, name, self._wrapped(place, getattr(owner, name)))

    def arm(self, rng: random.Random) -> None:
        """Some calls will raise: in attention and where drafts are made, if they are, and others at times."""
        places = ["attention", "drafts of n-grams", "drafts of a model"]
        for place in [*places, *rng.sample(["attention", "sampler", "result"], rng.randrange(3))]:
            self._due.setdefault(place, set()).add(1 + rng.randrange(PLACES[place][2]))

    def disarm(self) -> None:
        self._due = {}

    def _wrapped(self, place: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if (due := self._due.get(place)) is not None:
                self._due[place] = {calls - 1 for calls in due if calls > 1}
                if 1 in due:
                    self.raised[place] += 1
                    kind = torch.OutOfMemoryError if self.raised[place] % 2 else RuntimeError
                    raise kind(f"{MESSAGE}: {place}")
            return function(*arguments, **options)

        return call
