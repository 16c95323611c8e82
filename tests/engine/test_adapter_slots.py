"""Who gets a slot, against a device that knows what lies in each: no tensors, many random loads."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from vserve.engine.adapters.book import PATIENCE, AdapterBook
from vserve.engine.config import SchedulerConfig
from vserve.engine.messages import RequestOutput
from vserve.engine.plan import StepPlan, StepResult
from vserve.engine.request import Request, SamplingParams
from vserve.engine.scheduler import Scheduler


class Device:
    """Slots and rows as the plans have them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.slots: dict[int, int] = {}
        self.rows: dict[int, tuple[int, int]] = {}  # row → (request, slot)
        self.adapters: dict[int, int] = {}  # request → adapter
        self.scheduler = scheduler

    def run(self, plan: StepPlan) -> StepResult:
        for copy in plan.adapters:
            assert copy.path == f"path {copy.id}"
            self.slots[copy.slot] = copy.id
        for new in plan.new_rows:
            self.rows[new.row] = new.request_id, new.slot
        for row in plan.rows:
            request, slot = self.rows[row]
            expected = self.adapters[request]
            assert (self.slots[slot] if slot >= 0 else 0) == expected, "a row meets the matrices of another adapter"
        return StepResult(plan.step, [7] * len(plan.sampled))


def make(max_loras: int = 2, max_cpu_loras: int = 3, **options: int) -> tuple[Scheduler, Device]:
    sizes = {"max_model_len": 64, "max_num_batched_tokens": 32, "max_num_seqs": 6, "block_size": 4, "num_blocks": 40}
    config = SchedulerConfig(**(sizes | options), max_loras=max_loras, max_cpu_loras=max_cpu_loras)  # type: ignore[arg-type]
    scheduler = Scheduler(config)
    return scheduler, Device(scheduler)


def book_of(scheduler: Scheduler) -> AdapterBook:
    assert scheduler.adapters is not None
    return scheduler.adapters


def add(scheduler: Scheduler, device: Device, id: int, adapter: int, length: int = 5, num_tokens: int = 4) -> None:
    if adapter:
        book_of(scheduler).paths.setdefault(adapter, f"path {adapter}")
    device.adapters[id] = adapter
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, adapter=adapter)
    scheduler.add(Request(id, [id % 50 + 1] * length, sampling, arrival=float(id)))


def arrive(book: AdapterBook, id: int) -> bool:
    if book.make_room() is None:
        return False
    book.arrived(id)
    return True


def step(scheduler: Scheduler, device: Device) -> list[RequestOutput]:
    plan = scheduler.schedule()
    if plan is None:
        return []
    outputs = scheduler.update(device.run(plan))
    scheduler.check_invariants(thorough=True)
    return outputs


@pytest.mark.parametrize("seed", range(12))
def test_every_row_meets_its_own_adapter(seed: int) -> None:
    """Of six adapters in two or three slots, read late, with aborts, failing steps, preemptions and steps in flight."""
    rng = random.Random(seed)
    depth = 1 + seed % 2
    slots = rng.choice((1, 2, 3))
    scheduler, device = make(slots, slots + seed % 2, num_blocks=rng.choice((18, 60)), depth=depth)
    book, ended, flying = book_of(scheduler), set(), []
    for id in range(1, 61):
        add(scheduler, device, id, rng.choice((0, 11, 12, 13, 14, 15, 16)), rng.randrange(1, 30), rng.randrange(1, 9))
    for _ in range(4000):
        if not scheduler.has_unfinished():
            break
        while len(flying) < depth and (plan := scheduler.schedule()) is not None:
            flying.append((plan, device.run(plan)))
        if rng.random() < 0.7 and book.wanted:
            arrive(book, rng.choice(list(book.wanted)))
        if rng.random() < 0.03:
            outputs = scheduler.abort([rng.randrange(1, 61)])
        elif flying and rng.random() < 0.03:
            plan, _ = flying.pop(0)
            outputs = scheduler.fail(plan.step, "planted")
        elif flying:
            outputs = scheduler.update(flying.pop(0)[1])
        else:
            continue
        scheduler.check_invariants(thorough=True)
        assert len(book.on_host) <= slots + seed % 2
        ended |= {output.id for output in outputs if output.finish_reason is not None}
    assert ended == set(range(1, 61)), "everybody gets an answer"
    assert not book.running


def test_who_waits_for_a_slot_holds_up_nobody() -> None:
    scheduler, device = make(max_loras=1, max_cpu_loras=2)
    book = book_of(scheduler)
    for adapter in (11, 12):
        book.paths[adapter] = f"path {adapter}"
        book.arrived(adapter)
    add(scheduler, device, 1, 11, num_tokens=30)
    add(scheduler, device, 2, 12)
    add(scheduler, device, 3, 13)  # which nobody has read yet
    add(scheduler, device, 4, 0)
    add(scheduler, device, 5, 11)
    outputs = [output for _ in range(10) for output in step(scheduler, device)]
    assert {output.id for output in outputs if output.finish_reason} == {4, 5}
    assert list(book.wanted) == [13]


def test_nobody_waits_for_ever() -> None:
    """An adapter that is asked for again and again lets another have its slot in the end."""
    scheduler, device = make(max_loras=1, max_cpu_loras=2)
    book = book_of(scheduler)
    for adapter in (11, 12):
        book.paths[adapter] = f"path {adapter}"
        book.arrived(adapter)
    add(scheduler, device, 1, 11)
    add(scheduler, device, 2, 12)
    done: Counter[int] = Counter()
    for id in range(3, 400):
        add(scheduler, device, id, 11, num_tokens=3)
        for output in step(scheduler, device):
            done[device.adapters[output.id]] += output.finish_reason is not None
        if done[12]:
            break
    assert done[12] == 1 and PATIENCE <= done[11] <= 2 * PATIENCE


def test_what_was_used_last_stays() -> None:
    book = AdapterBook(2, 2)
    for id in (1, 2, 3):
        book.paths[id] = f"path {id}"
    for id in (1, 2):
        assert arrive(book, id)
        slot, copy = book.start(id)
        assert copy is not None and copy.slot == slot
    assert not book.may_start(3) and book.make_room() is None, "both run"
    book.stop(1)
    assert book.start(1)[1] is None, "it was still there"
    book.stop(1)
    book.stop(2)
    assert not book.may_start(3) and list(book.wanted) == [3]
    assert book.make_room() == [2], "1 was asked for after it"
    book.arrived(3)
    assert book.may_start(3) and book.may_start(2), "it is still in its slot"
    slot, copy = book.start(3)
    assert copy is not None and 2 not in book.slots and 1 in book.slots
