"""Random workloads with pictures, on a device that reads for them what plans have put there: see media_device."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import vserve.engine.schedule.encoder_cache as encoder_cache_module
import vserve.engine.schedule.kv_cache as kv_cache_module

from .media_device import MediaSimulation
from .test_scheduler_properties import PARTS, TOTAL_STEPS, caught, quiet, simulate_many  # noqa: F401

EVENTS = {  # in 20,000 steps
    "pictures": 3000, "encoded": 1000, "encoder hit": 300, "embeds": 5000, "cut within a picture": 300, "unseen": 30,
    "blind": 30, "hit": 300, "preemption": 100, "mixed step": 300, "overlapped decode": 1000, "failed step": 100,
    "postponed": 20, "stop": 300, "length": 300,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few patches are much."""
    monkeypatch.setattr(encoder_cache_module, "STEP_PATCHES", 16)
    monkeypatch.setattr(encoder_cache_module, "PATCHES_BESIDE_DECODES", 4)


def pictures_are_right(first_seed: int, steps: float, **options) -> None:
    num_steps, seen = simulate_many(first_seed, steps, simulation_type=MediaSimulation, **options)
    for event, count in EVENTS.items():
        least = int(0.5 * count * num_steps / 20_000)
        assert seen[event] >= least, f"{event} happened {seen[event]} times only in {num_steps} steps"


def test_any_workload_with_pictures_gives_what_each_request_gets_alone() -> None:
    pictures_are_right(61, TOTAL_STEPS / PARTS / 8)
