"""Random workloads with pictures, on a device that reads for them what plans have put there: see media_device."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import vserve.engine.schedule.encoder_cache as encoder_cache_module
import vserve.engine.schedule.kv_cache as kv_cache_module
import vserve.engine.schedule.scheduler as scheduler_module

from .media_device import BESIDE, STEP, MediaSimulation
from .test_scheduler_properties import PARTS, TOTAL_STEPS, caught, quiet, simulate_many  # noqa: F401

EVENTS = {  # in 20,000 steps
    "pictures": 3000, "encoded": 1000, "encoder hit": 300, "embeds": 5000, "cut within a picture": 300, "unseen": 30,
    "blind": 30, "hit": 300, "preemption": 100, "mixed step": 300, "overlapped decode": 1000, "failed step": 100,
    "postponed": 20, "stop": 300, "length": 300,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few patches are much."""
    monkeypatch.setattr(encoder_cache_module, "STEP_PATCHES", STEP)
    monkeypatch.setattr(encoder_cache_module, "PATCHES_BESIDE_DECODES", BESIDE)


def pictures_are_right(first_seed: int, steps: float, **options) -> None:
    num_steps, seen = simulate_many(first_seed, steps, simulation_type=MediaSimulation, **options)
    for event, count in EVENTS.items():
        least = int(0.5 * count * num_steps / 20_000)
        assert seen[event] >= least, f"{event} happened {seen[event]} times only in {num_steps} steps"


def test_any_workload_with_pictures_gives_what_each_request_gets_alone() -> None:
    pictures_are_right(61, TOTAL_STEPS / PARTS / 8)


@pytest.mark.parametrize("options", [{}, {"windowed": True}, {"stages": True}])
@pytest.mark.slow
def test_many_more_workloads_with_pictures(options: dict[str, bool]) -> None:
    pictures_are_right(5_000_000, TOTAL_STEPS / PARTS / 2, **options)


LOST = "        for entry in lost:\n            self._lose(entry)\n"
PASSED = "passed = len(self._tokens_of(request.token_ids, item, item.start, first))"
BEHIND = "media[i].start + media[i].length <= computed]"
MUTATIONS = {  # what is broken: (file, what is to be replaced by what)
    "pictures left out of keys": ("kv_cache", "if start * block_size < request.media_end else {}", "if False else {}"),
    "chunks beyond what is encoded": ("encoder_cache", "if held > self.capacity:", "if False:"),
    "more in a step than it may": ("encoder_cache", "(patches > budget and not none_yet)", "False"),
    "features of the beginning again": ("encoder_cache", PASSED, "passed = 0"),
    "separators taken for features": ("encoder_cache", "np.flatnonzero(np.diff(indexes) > 1) + 1", "[]"),
    "held for ever": ("encoder_cache", BEHIND, "False]"),
    "held by those who have left": ("kv_cache", "self.encoder.free(request)", "pass"),
    "what a failed step was to make found": ("encoder_cache", LOST, ""),
    "salts left out": ("encoder_cache", "return request.cache_salt, item.key", "return None, item.key[:8]"),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.slow
def test_oracle_sees_broken_books_of_pictures(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room, right, wrong = MUTATIONS[mutation]
    module = {"kv_cache": kv_cache_module, "encoder_cache": encoder_cache_module}[room]
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"the line to break is in {room}.py {source.count(right)} times"
    broken = ModuleType(module.__name__)
    exec(compile(source.replace(right, wrong), f"broken {room}.py", "exec"), broken.__dict__)
    broken.__dict__.update(STEP_PATCHES=STEP, PATCHES_BESIDE_DECODES=BESIDE)
    if room == "kv_cache":
        monkeypatch.setattr(scheduler_module, "KVCacheManager", broken.KVCacheManager)
    else:
        monkeypatch.setattr(kv_cache_module, "EncoderCache", broken.EncoderCache)
        monkeypatch.setattr(kv_cache_module, "media_keys", broken.media_keys)
    assert caught(300, simulation_type=MediaSimulation), "nothing noticed"
