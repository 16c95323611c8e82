"""Who gets a slot, against a device that knows what lies in each: no tensors, many random loads."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from vserve.engine.adapters.book import PATIENCE, AdapterBook
from vserve.engine.adapters.loading import AdapterLoading
from vserve.engine.link.messages import LoadAdapter, RequestOutput
from vserve.engine.link.plan import StepPlan, StepResult
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule.request import Request
from vserve.engine.schedule.scheduler import Scheduler
from vserve.engine.schedule.sharing import Sharing


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


def add(
    scheduler: Scheduler, device: Device, id: int, adapter: int, length: int = 5, num_tokens: int = 4, tenant: int = 0
) -> None:
    if adapter:
        book_of(scheduler).paths.setdefault(adapter, f"path {adapter}")
    device.adapters[id] = adapter
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, adapter=adapter)
    scheduler.add(Request(id, [id % 50 + 1] * length, sampling, arrival=float(id), tenant=tenant))


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


def test_nobody_waits_for_ever_while_all_rows_are_taken() -> None:
    """Most passes do not come to who waits: no row is free."""
    scheduler, device = make(max_loras=1, max_cpu_loras=1, max_num_seqs=2)
    book = book_of(scheduler)
    book.paths[11] = "path 11"
    book.arrived(11)
    done: Counter[int] = Counter()
    add(scheduler, device, 1, 11, num_tokens=4)  # from then on there is always one that runs
    add(scheduler, device, 2, 12)  # which the host has no room for either
    for id in range(3, 2000):
        if len(scheduler.roster.waiting) < 4:
            add(scheduler, device, id, 11, num_tokens=6)
        for output in step(scheduler, device):
            done[device.adapters[output.id]] += output.finish_reason is not None
        if 12 in book.wanted:
            arrive(book, 12)
        if done[12]:
            break
    assert done[12] == 1 and PATIENCE <= done[11] <= 2 * PATIENCE


def test_nobody_waits_for_ever_among_tenants_that_take_turns() -> None:
    """In each pass another one may be the first to wait for the slot: each is passed by so many at most."""
    scheduler, device = make(max_loras=1, max_cpu_loras=3)
    book = book_of(scheduler)
    for adapter in (11, 12, 13):
        book.paths[adapter] = f"path {adapter}"
        book.arrived(adapter)
    add(scheduler, device, 1, 11)
    add(scheduler, device, 2, 12, tenant=2)
    add(scheduler, device, 3, 13, tenant=3)
    done: Counter[int] = Counter()
    for id in range(4, 600):
        add(scheduler, device, id, 11, num_tokens=3, tenant=2 + id % 2)
        for output in step(scheduler, device):
            done[device.adapters[output.id]] += output.finish_reason is not None
        if done[12] and done[13]:
            break
    assert done[12] == done[13] == 1 and done[11] <= 3 * PATIENCE


def test_the_patience_of_one_is_not_spent_on_another() -> None:
    """Who has just come is passed, also when one who has waited long is further back in the queue."""
    book, numbers = AdapterBook(1, 3), iter(range(1000, 2000))
    for adapter in (11, 12, 13):
        book.paths[adapter] = f"path {adapter}"
        book.arrived(adapter)
    book.start(11, 1)

    def passes(*waiting: tuple[int, int]) -> bool:
        """Whether a request for the adapter that runs starts behind these (adapter, request)."""
        book.begin_pass()
        assert not any(book.may_start(*one) for one in waiting)
        request = next(numbers)
        may = book.may_start(11, request)
        if may:
            book.start(11, request)
            book.stop(11)
        return may

    assert [passes((12, 100)) for _ in range(PATIENCE + 1)] == [True] * PATIENCE + [False]
    assert passes((13, 200)) and passes((13, 200), (12, 100))
    assert not passes((12, 100), (13, 200))
    book.leave(12, 100)
    assert [passes((13, 200)) for _ in range(PATIENCE)].count(True) == PATIENCE - 2


def test_who_is_gone_is_waited_for_no_longer() -> None:
    scheduler, device = make(max_loras=1, max_cpu_loras=2)
    book = book_of(scheduler)
    for adapter in (11, 12):
        book.paths[adapter] = f"path {adapter}"
        book.arrived(adapter)
    add(scheduler, device, 1, 11, num_tokens=50)
    add(scheduler, device, 2, 12)
    for id in range(3, 200):
        add(scheduler, device, id, 11, num_tokens=1)
    while len(scheduler.roster.waiting) > 197 - PATIENCE:
        step(scheduler, device)
    before = len(scheduler.roster.waiting)
    step(scheduler, device)
    assert len(scheduler.roster.waiting) == before, "its turn has come"
    scheduler.abort([2])
    step(scheduler, device)
    assert len(scheduler.roster.waiting) < before - 1


class SlowStore:
    """Reads from a disk that is slow."""

    def __init__(self) -> None:
        self.packed: dict[int, Any] = {}
        self.read_paths: list[str] = []

    def read(self, path: str, check: Any) -> Any:
        time.sleep(0.001)
        self.read_paths.append(path)
        adapter = SimpleNamespace(stamp=(1,), version="1", config=SimpleNamespace(base="base"))
        check(adapter)
        return SimpleNamespace(has_head=False, rank=4), adapter


def test_the_host_keeps_no_more_than_it_may_while_many_wait() -> None:
    """Sixty adapters at once where four fit, in two slots: each is read once as it is named, and once for who waits."""
    scheduler, device = make(max_loras=2, max_cpu_loras=4, num_blocks=400)
    book, store, ended = book_of(scheduler), SlowStore(), set()

    async def main() -> None:
        loading = AdapterLoading(store, book, lambda answer: None, lambda id: None, lambda: None)  # type: ignore[arg-type]
        for adapter in range(101, 161):
            loading.load(LoadAdapter(adapter, f"path {adapter}"))
        for id, adapter in enumerate(2 * list(range(101, 161)), 1):
            add(scheduler, device, id, adapter)
        until = time.monotonic() + 60
        while scheduler.has_unfinished():
            assert time.monotonic() < until, "somebody waits for ever"
            ended.update(output.id for output in step(scheduler, device) if output.finish_reason)
            loading.fetch()
            await asyncio.sleep(0.0005)
            assert len(store.packed) <= 4 and store.packed.keys() == book.on_host.keys()
            scheduler.check_invariants()
        loading.close()

    asyncio.run(main())
    assert ended == set(range(1, 121)) and len(store.read_paths) <= 60 + 120


def test_who_is_read_serves_all_that_wait_for_it() -> None:
    """However long the queue is, and however many had to be passed: 400 requests for 20 adapters in two slots."""
    rng = random.Random(3)
    scheduler, device = make(max_loras=2, max_cpu_loras=4, max_num_seqs=64, max_num_batched_tokens=256, num_blocks=400)
    book, ended, reads, reading = book_of(scheduler), 0, [], False
    for id in range(1, 401):
        add(scheduler, device, id, rng.randrange(101, 121), num_tokens=1)
    while scheduler.has_unfinished():
        ended += sum(output.finish_reason is not None for output in step(scheduler, device))
        if reading:
            book.arrived(reads[-1])
            reading = False
        elif book.wanted and book.make_room() is not None:
            reads.append(next(iter(book.wanted)))
            book.coming.add(reads[-1])
            reading = True
    assert ended == 400 and len(reads) < 60


def test_a_long_queue_is_looked_at_once() -> None:
    """With limits on prompts in progress: who has to wait is passed over once a step, not once for each that begins."""
    scheduler, device = make(
        max_num_seqs=64, max_num_batched_tokens=256, max_num_partial_prefills=64, max_long_partial_prefills=1,
        long_prefill_token_threshold=8, num_blocks=2000,
    )  # fmt: skip
    for id in range(1, 1001):
        add(scheduler, device, id, 0, length=30 if id < 900 else 4)
    looked = 0
    is_long = Sharing._is_long

    def count(sharing: Sharing, request: Request) -> bool:
        nonlocal looked
        looked += 1
        return is_long(sharing, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sharing, "_is_long", count)
        plan = scheduler.schedule()
    assert plan is not None and len(plan.rows) == 64, "short ones pass the long ones"
    assert looked < 3 * 1000


def test_what_was_used_last_stays() -> None:
    book = AdapterBook(2, 2)
    for id in (1, 2, 3):
        book.paths[id] = f"path {id}"
    for id in (1, 2):
        assert arrive(book, id)
        slot, copy = book.start(id, id)
        assert copy is not None and copy.slot == slot
    assert not book.may_start(3, 3) and book.make_room() is None, "both run"
    book.stop(1)
    assert book.start(1, 4)[1] is None, "it was still there"
    book.stop(1)
    book.stop(2)
    assert not book.may_start(3, 3) and list(book.wanted) == [3]
    assert book.make_room() == [2], "1 was asked for after it"
    book.arrived(3)
    assert book.may_start(3, 3) and book.may_start(2, 5), "it is still in its slot"
    slot, copy = book.start(3, 3)
    assert copy is not None and 2 not in book.slots and 1 in book.slots
