"""Random workloads of a model with recurrent state, on a device whose states are hash chains: see state_device."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import vserve.engine.schedule.kv_cache as kv_cache_module
import vserve.engine.schedule.scheduler as scheduler_module
import vserve.engine.schedule.state_group as state_group_module

from .state_device import EagerDevice, StateSimulation
from .test_scheduler_properties import PARTS, TOTAL_STEPS, caught, quiet, simulate_many  # noqa: F401

EVENTS = {  # in 20,000 steps
    "restore": 500, "prompt snapshot": 1000, "decode snapshot": 300, "skipped export": 200, "waits for a slot": 2000,
    "goes on in a snapshot": 4, "preemption": 100, "mixed step": 500, "overlapped decode": 2000,
    "failed step": 200, "postponed": 50,
    "stop": 500, "length": 500,
}  # fmt: skip


DRAFTED = EVENTS | {
    "drafts": 16_000, "drafts on drafts": 500, "several kept": 2000, "without drafts beside drafts": 300, "cut": 100,
    "postponed with drafts": 15, "export in several plans": 100, "mixed step": 300, "goes on in a snapshot": 0,
    "stop": 300, "length": 300,
}  # fmt: skip


def states_are_right(first_seed: int, steps: float, **options) -> None:
    num_steps, seen = simulate_many(first_seed, steps, simulation_type=StateSimulation, **options)
    for event, count in (DRAFTED if options.get("drafts") else EVENTS).items():
        least = int(0.5 * count * num_steps / 20_000)
        assert seen[event] >= least, f"{event} happened {seen[event]} times only in {num_steps} steps"


def test_any_workload_with_states_gives_what_each_request_gets_alone() -> None:
    states_are_right(51, TOTAL_STEPS / PARTS / 8)


def test_any_workload_with_states_and_drafts_gives_what_each_request_gets_alone() -> None:
    states_are_right(61, TOTAL_STEPS / PARTS / 8, drafts=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"windowed": True}, {"stages": True}, {"drafts": True}, {"drafts": True, "windowed": True}],
)  # fmt: skip
@pytest.mark.slow
def test_many_more_workloads_with_states(options: dict[str, bool]) -> None:
    states_are_right(3_000_000, TOTAL_STEPS / PARTS, **options)


SHORTER = "< len(hits[0]):\n                hits = self._match(request, length)\n            if state.is"
AS_LONG = SHORTER.replace("hits = self._match(request, length)", "break")
START = "            pool.share(source)\n"
WRITTEN = "held.due, snapshot.written, snapshot.registered = None, True, registered"
MUTATIONS = {  # what is broken: (file, what is to be replaced by what)
    "admitted without a slot": ("kv_cache", ("if state is not None and not state.pool.num_free:", "if False:")),
    "matching past a snapshot": ("kv_cache", (SHORTER, AS_LONG)),
    "what a failed step was to write registered": ("kv_cache", ("self.state.drop(registered)", "pass")),
    "snapshots of a failed step not revoked": (
        "state_group", ("snapshot.registered.append((pool, snapshot.slot, key))", "pass"),
    ),
    "registered before the step is given out": (
        "state_group", (WRITTEN, WRITTEN + "; self.pending.remove(snapshot); self._register(snapshot)"),
    ),
    "a prompt's last token taken for folded": (
        "state_group",
        ("prompt_end = request.num_tokens - 1", "prompt_end = request.num_tokens"),
        ("folds_to = end - (end == request.target)", "folds_to = end"),
    ),
    "registered under a later key": ("state_group", ("self.block_size - 1, req", "self.block_size, req")),
    "a snapshot overwritten while it is copied": (
        "state_group", (START, START + "            pool.release([source] if slot == NULL_SLOT else [])\n"),
        ("if source != held.slot:", "if False:"),
    ),
    "chunks that end anywhere": ("state_group", ("max(0, end - end % self.grain - start)", "num_new")),
    "the slot of who leaves kept": ("kv_cache", ("self.state.free(request)", "self.state.held.pop(request.id)")),
}  # fmt: skip
DRAFTING = {  # of steps with drafts
    "exported by the host's count": (
        "state_group", ("if folds_to - request.num_in_flight_drafts >= snap", "if folds_to >= snap"),
    ),
    "the snapshot of who leaves kept": ("state_group", ("if held.due is not None:", "if False:")),
}  # fmt: skip


@pytest.mark.parametrize("mutation", [*MUTATIONS, *DRAFTING])
@pytest.mark.slow
def test_oracle_sees_broken_books_of_states(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room, *replacements = (MUTATIONS | DRAFTING)[mutation]
    module = {"kv_cache": kv_cache_module, "state_group": state_group_module}[room]
    source = inspect.getsource(module)
    for right, wrong in replacements:
        assert source.count(right) == 1, f"the line to break is in {room}.py {source.count(right)} times"
        source = source.replace(right, wrong)
    broken = ModuleType(module.__name__)
    exec(compile(source, f"broken {room}.py", "exec"), broken.__dict__)
    if room == "kv_cache":
        monkeypatch.setattr(scheduler_module, "KVCacheManager", broken.KVCacheManager)
    else:
        monkeypatch.setattr(kv_cache_module, "StateGroup", broken.StateGroup)
    for options in ({"stages": False}, {"stages": True}):
        if caught(400, simulation_type=StateSimulation, drafts=mutation in DRAFTING, **options):
            return
    pytest.fail("nothing noticed")


@pytest.mark.parametrize("drafts", [False, True])
def test_oracle_sees_a_device_that_folds_what_may_be_taken_back(drafts: bool) -> None:
    assert "ahead of its tokens" in caught(200, simulation_type=StateSimulation, device=EagerDevice, drafts=drafts)
