"""Random workloads of a model with recurrent state: see state_device."""

from __future__ import annotations
import pytest
from .state_device import EagerDevice, StateSimulation
from .test_scheduler_properties import PARTS, TOTAL_STEPS, quiet, simulate_many  # noqa: F401


@pytest.mark.parametrize("options", [{}, {"windowed": True}, {"stages": True}])
def test_any(options):
    num_steps, seen = simulate_many(51, TOTAL_STEPS / PARTS / 4, simulation_type=StateSimulation, **options)
    print(num_steps, seen)
