"""Who is next: against a plain list of all that wait, walked from end to end; then in the scheduler, in steps."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count, pairwise

import pytest

from vserve.engine.link.messages import RequestOutput
from vserve.engine.link.plan import StepResult
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule.fair_queue import Entry, FairQueue
from vserve.engine.schedule.request import LIKELY_ANSWER, Request
from vserve.engine.schedule.scheduler import Scheduler


class Plain:
    """The same, of lists that are searched through."""

    def __init__(self) -> None:
        self.waiting: list[Entry[Request]] = []
        self.served: dict[int, float] = {}
        self.clock = 0.0

    def add(self, entry: Entry[Request]) -> None:
        tenant = entry[3].tenant
        if all(other[3].tenant != tenant for other in self.waiting):
            heads = {other[3].tenant: other for other in sorted(self.waiting, reverse=True)}.values()
            alike = [(e[3].first_scheduled is None, self.served[e[3].tenant]) for e in heads if e[0] == entry[0]]
            clock = min(self.clock, max(alike)[1]) if alike else self.clock
            self.served[tenant] = max(clock, self.served.get(tenant, 0))
        self.waiting.append(entry)

    def remove(self, entry: Entry[Request]) -> None:
        self.waiting.remove(entry)
        if not self.waiting:
            self.served, self.clock = {}, 0.0

    def start(self, entry: Entry[Request]) -> None:
        tenant, cost = entry[3].tenant, self.cost(entry)
        if cost:
            num_tenants = len({other[3].tenant for other in self.waiting})
            self.clock = max(self.clock, self.served[tenant]) + cost / (num_tenants + 1)
            self.served[tenant] += cost
        self.remove(entry)

    def settle(self, request: Request) -> None:
        if request.first_scheduled is not None and request.tenant in self.served:
            self.served[request.tenant] += request.num_output_tokens - min(LIKELY_ANSWER, request.sampling.max_tokens)

    def cost(self, entry: Entry[Request]) -> int:
        request = entry[3]
        new = request.first_scheduled is None
        return new * (request.num_prompt_tokens + min(LIKELY_ANSWER, request.sampling.max_tokens))

    def order(self) -> list[Entry[Request]]:
        left, served, order = sorted(self.waiting), dict(self.served), []
        while left:
            heads = {entry[3].tenant: entry for entry in reversed(left)}.values()
            entry = min(heads, key=lambda e: (e[0], e[3].first_scheduled is None, served[e[3].tenant], e[2]))
            left.remove(entry)
            served[entry[3].tenant] += self.cost(entry)
            order.append(entry)
        return order


def test_who_joins_pays_nothing_for_others_of_another_priority() -> None:
    """They start first, and those who wait beside the newcomer have been served nothing meanwhile."""
    queue: FairQueue[Request] = FairQueue()
    numbers = count()

    def add(tenant: int, priority: int) -> None:
        number = next(numbers)
        request = Request(number, [1] * 100, SamplingParams(max_tokens=1), tenant=tenant, priority=priority)
        queue.add((priority, float(number), number, request))

    for _ in range(100):
        add(1, 10)
        add(2, 0)
    for _ in range(100):
        first = next(queue.in_turn())
        assert first[3].tenant == 2
        queue.start(first)
    add(3, 10)
    assert [entry[3].tenant for entry in queue.in_turn()][:3].count(3) == 1


@pytest.mark.parametrize("by_priority", [False, True])
def test_the_order_is_that_of_a_plain_list(by_priority: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        rng = random.Random(seed)
        queue: FairQueue[Request] = FairQueue()
        plain, running = Plain(), []
        num_tenants = rng.choice([1, 2, 3, 10])
        for number in range(120):
            if rng.random() < 0.6:
                sampling = SamplingParams(max_tokens=rng.choice([1, 20, 1000]))
                request = Request(number, [1] * rng.choice([1, 5, 400]), sampling, tenant=rng.randrange(num_tenants))
                rank = (rng.choice([0, 0, -1]), rng.random()) if by_priority else (0, 0.0)
                queue.add(entry := (*rank, number, request))
                plain.add(entry)
            elif running and rng.random() < 0.3:
                entry = running.pop(rng.randrange(len(running)))
                if rng.random() < 0.5:
                    queue.add(entry)
                    plain.add(entry)
                    seen["preempted"] += 1
                else:
                    entry[3].token_ids.extend([1] * rng.choice([1, 20, 900]))
                    queue.settle(entry[3])
                    plain.settle(entry[3])
            elif len(queue) and rng.random() < 0.2:
                entry = rng.choice(plain.waiting)
                queue.remove(entry)
                plain.remove(entry)
                queue.settle(entry[3])
                plain.settle(entry[3])
                seen["aborted"] += 1
            else:  # a pass: most start, and some are passed over
                order, waits = queue.in_turn(), []
                for _ in range(rng.randint(1, 4)):
                    expected = [entry for entry in plain.order() if entry not in waits]
                    entry = next(order, None)
                    assert entry == next(iter(expected), None) or waits, "the first one"
                    if entry is None:
                        break
                    if rng.random() < 0.3:
                        waits.append(entry)
                        seen["passed over"] += 1
                        continue
                    queue.start(entry)
                    plain.start(entry)
                    entry[3].first_scheduled = 1.0
                    running.append(entry)
            assert list(queue) == plain.order()
            assert len(queue) == len(plain.waiting) and bool(queue) == bool(plain.waiting)
            queue.check()
            seen["tenants beside each other"] += len({entry[3].tenant for entry in plain.waiting}) > 2
    assert all(seen[event] > 100 for event in ("preempted", "aborted", "passed over", "tenants beside each other")), (
        seen
    )


@pytest.mark.parametrize("by_priority", [False, True])
def test_of_one_tenant_all_come_in_the_order_of_their_rank(by_priority: bool) -> None:
    queue: FairQueue[Request] = FairQueue()
    rng, entries = random.Random(1), []
    for number in range(300):
        request = Request(number, [1] * rng.randint(1, 50), SamplingParams(max_tokens=rng.randint(1, 50)), tenant=7)
        rank = (rng.choice([0, 0, -1]), rng.random()) if by_priority else (0, 0.0)
        entries.append((*rank, number, request))
        queue.add(entries[-1])
        if rng.random() < 0.4:
            queue.start(entry := next(queue.in_turn()))
            entry[3].first_scheduled = 1.0
            entries.remove(entry)
            assert entry <= min(entries, default=entry)
        assert list(queue) == sorted(entries)


class Engine:
    """Notes in which order requests start."""

    def __init__(self, num_seqs: int = 4, num_blocks: int = 20_000, policy: str = "fcfs") -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=4096, max_num_batched_tokens=8192, max_num_seqs=num_seqs, block_size=16,
                num_blocks=num_blocks, depth=1, scheduling_policy=policy,
            )
        )  # fmt: skip
        self.num_requests = 0
        self.served: Counter[int] = Counter()  # tokens, by tenant
        self.started: list[int] = []  # ids
        self.tenants: dict[int, int] = {}  # by id

    def add(self, tenant: int, length: int = 10, max_tokens: int = 5, **options: int) -> int:
        self.num_requests = id = self.num_requests + 1
        self.tenants[id] = tenant
        sampling = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(Request(id, [id % 1000] * length, sampling, tenant=tenant, **options))
        return id

    def step(self) -> list[RequestOutput]:
        before = set(self.scheduler.roster.running)
        plan = self.scheduler.schedule()
        assert plan is not None
        new = [id for id in self.scheduler.roster.running if id not in before]
        self.started += new
        for id in new:
            self.served[self.tenants[id]] += self.scheduler.roster.entries[id][3].num_prompt_tokens
        outputs = self.scheduler.update(StepResult(plan.step, [7] * len(plan.sampled)))
        for output in outputs:
            self.served[self.tenants[output.id]] += len(output.token_ids)
        return outputs


def test_one_request_beside_a_thousand_is_next() -> None:
    engine = Engine()
    for _ in range(1000):
        engine.add(tenant=1)
    for _ in range(30):
        engine.step()
    began = len(engine.started)
    alone = engine.add(tenant=2)
    while alone not in engine.started:
        engine.step()
    assert engine.started[began] == alone
    rest = [id for id in engine.started if id != alone]
    assert rest == sorted(rest), "a tenant's own come in their order"


def test_whoever_waits_gets_a_share_however_many_new_tenants_come() -> None:
    """Strangers with one request each keep the queue full: who has just been served is not behind all to come."""
    engine = Engine()
    for tenant in range(100, 140):
        engine.add(tenant=tenant)
    own = [engine.add(tenant=1) for _ in range(20)]
    while len(engine.started) < 400:
        while len(engine.scheduler.roster.waiting) < 60:
            engine.add(tenant=1000 + engine.num_requests)
        engine.step()
    turns = [engine.started.index(id) for id in own if id in engine.started]
    assert turns[0] == 40, "behind those that were there"
    assert len(turns) >= 5 and max(late - early for early, late in pairwise(turns)) < 120, turns


def test_tenants_are_served_the_same_number_of_tokens() -> None:
    """Long questions with short answers beside short ones with answers beyond what is likely."""
    engine = Engine(num_seqs=8)
    kinds = {1: (400, 10), 2: (10, 600), 3: (50, 50)}
    for _ in range(300):
        for tenant, (length, max_tokens) in kinds.items():
            engine.add(tenant, length, max_tokens)
    for _ in range(2500):
        engine.step()
    assert all(any(engine.tenants[e[3].id] == tenant for e in engine.scheduler.roster.waiting) for tenant in kinds)
    least, most = min(engine.served.values()), max(engine.served.values())
    assert most < 1.25 * least, engine.served


def test_priorities_come_before_shares() -> None:
    engine = Engine(num_seqs=1, policy="priority")
    urgent = [engine.add(tenant=1, priority=-1) for _ in range(3)]
    other = engine.add(tenant=2)
    for _ in range(30):
        engine.step()
        if len(engine.started) == 4:
            break
    assert engine.started == [*urgent, other]


def test_who_was_preempted_goes_on_before_another_tenants_newcomer() -> None:
    engine = Engine(num_seqs=2, num_blocks=12)
    engine.add(tenant=1, length=60, max_tokens=60)
    second = engine.add(tenant=1, length=60, max_tokens=60)
    while not engine.scheduler.planner.num_preemptions:
        engine.step()
    engine.add(tenant=2, length=60)
    assert next(iter(engine.scheduler.roster.waiting))[3].id == second
