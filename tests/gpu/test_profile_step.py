"""The arithmetic of tools/gpu/profile_step.py, on kernels that overlap."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "gpu"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    yield importlib.import_module("profile_step")
    for name in ("profile_step", "bench_steps", "model_folder"):
        del sys.modules[name]


def step(start: float, layers: int) -> list[dict[str, Any]]:
    """Of layers of 10 us: `rope` adds 1, `attend` 3, which has waited for as long as that, `multiply` 6."""
    events = [{"name": "embed", "ts": start, "dur": 5.0}]
    for layer in range(layers):
        end = start + 5.0 + 10.0 * layer
        events += [
            {"name": "rope", "ts": end - 2.0, "dur": 3.0},
            {"name": "attend", "ts": end - 1.0, "dur": 5.0},
            {"name": "multiply", "ts": end + 1.0, "dur": 9.0},
        ]
    return events


def test_what_kernels_add_is_what_a_layer_takes(script: Any) -> None:
    """In whatever order they are told of; what is between two steps belongs to no layer."""
    events = [*step(0.0, 4), *step(100.0, 4)]
    parts = script.parts_of_layer(events[::-1], "rope")
    assert parts == [("rope", 1.0, 3.0, 2.0), ("attend", 3.0, 5.0, 2.0), ("multiply", 6.0, 9.0, 3.0)]


def test_names_that_are_not_there_are_told(script: Any) -> None:
    with pytest.raises(ValueError, match=r"'rotate': see \['attend', 'embed', 'multiply', 'rope'\]"):
        script.parts_of_layer(step(0.0, 4), "rotate")
