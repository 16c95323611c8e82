"""One rule of the scheduler a test. Plans and outputs are looked at directly; no device, no model."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections import deque
from typing import Any

import msgspec
import pytest

from vserve.engine.link.messages import RequestOutput, unpack_tokens
from vserve.engine.link.plan import BlockWrite, StepPlan, StepResult, TokenLogprobs
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.planning.step_sizes import large_mixed_tokens
from vserve.engine.schedule.planner import FEW_DECODES
from vserve.engine.schedule.request import FinishReason, Request, Status
from vserve.engine.schedule.roster import FairQueue
from vserve.engine.schedule.scheduler import Scheduler


class Engine:
    """A scheduler and the plans in flight; every sample is `token` unless told otherwise."""

    def __init__(self, **options) -> None:
        settings = {
            "max_model_len": 100, "max_num_batched_tokens": 32, "max_num_seqs": 8, "block_size": 4, "num_blocks": 101,
        }  # fmt: skip
        self.scheduler = Scheduler(SchedulerConfig(**{**settings, **options}))
        self.in_flight: deque[StepPlan] = deque()

    def add(self, id: int, prompt, *, priority: int = 0, arrival: float = 0.0, salt: str | None = None, **sampling):
        params = SamplingParams(**{"max_tokens": 50, **sampling})
        request = Request(id, list(prompt), params, priority=priority, arrival=arrival, cache_salt=salt)
        self.scheduler.add(request)
        return request

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.in_flight.append(plan)
        self.scheduler.check_invariants(thorough=True)
        return plan

    def update(self, *tokens: int, **result) -> list[RequestOutput]:
        """Tokens of the oldest step, in the order of its samples; the last one repeats, 7 if there is none."""
        plan = self.in_flight.popleft()
        count = len(plan.sampled)
        samples = (list(tokens) + [tokens[-1] if tokens else 7] * count)[:count]
        outputs = self.scheduler.update(StepResult(plan.step, samples, **result))
        self.scheduler.check_invariants(thorough=True)
        return outputs

    def fail(self, plan: StepPlan) -> list[RequestOutput]:
        self.in_flight.remove(plan)
        outputs = self.scheduler.fail(plan.step, "boom")
        self.scheduler.check_invariants(thorough=True)
        return outputs

    def step(self, *tokens: int) -> list[RequestOutput]:
        plan = self.schedule()
        assert plan is not None
        return self.update(*tokens)


def by_id(plan: StepPlan | None, *requests: Request) -> dict[int, int]:
    """Query length by request id."""
    assert plan is not None
    rows = {request.row: request.id for request in requests if request.row is not None}
    return {rows[row]: count for row, count in zip(plan.rows, plan.num_tokens, strict=True)}


# ---- building a step ----
def test_decodes_then_prefills_then_the_queue_within_the_budget() -> None:
    engine = Engine(max_num_batched_tokens=10)
    a = engine.add(1, range(3))
    engine.step()
    b = engine.add(2, range(100, 115))
    assert by_id(engine.schedule(), a, b) == {1: 1, 2: 9}
    engine.update()
    c = engine.add(3, range(200, 208))
    plan = engine.schedule()
    assert by_id(plan, a, b, c) == {1: 1, 2: 6, 3: 3}
    assert plan.total_tokens == 10 and plan.num_computed == [4, 9, 0]
    assert plan.sampled == [0, 1], "the third has not reached its last token"
    engine.update()
    assert by_id(engine.schedule(), a, b, c) == {1: 1, 2: 1, 3: 5}


def test_prompts_take_smaller_chunks_beside_decodes() -> None:
    engine = Engine(max_num_batched_tokens=32, max_mixed_tokens=6)
    a = engine.add(1, range(30))
    b = engine.add(2, range(100, 120))
    assert by_id(engine.schedule(), a, b) == {1: 30, 2: 2}, "nobody decodes yet"
    engine.update()
    assert by_id(engine.schedule(), a, b) == {1: 1, 2: 6}
    engine.update()
    engine.scheduler.abort([1])
    assert by_id(engine.schedule(), b) == {2: 12}, "nobody decodes any more"


@pytest.mark.parametrize(("steps", "expected"), [(200, 6), (150, 12), (60, 24), (4, 24)])
def test_a_long_queue_gets_larger_chunks(steps: int, expected: int) -> None:
    """In `backlog_steps` it should be worked off, as far as the sizes of chunks go."""
    engine = Engine(
        max_num_batched_tokens=64, max_mixed_tokens=5, large_mixed_tokens=(12, 24), backlog_steps=steps,
        max_model_len=200, num_blocks=1001,
    )  # fmt: skip
    a = engine.add(1, range(4))
    engine.step()
    others = [engine.add(2 + i, range(100 * i, 100 * i + 100)) for i in range(20)]
    plan = by_id(engine.schedule(), a, *others)
    assert sum(plan.values()) == expected and plan[1] == 1


def test_waiting_tokens_are_counted_not_added_up() -> None:
    """A mixed step looks at the queue: of 100,000 requests it must not read one."""

    class Queue(FairQueue):
        def in_turn(self):
            pytest.fail("the queue was walked")
            yield

    engine = Engine(max_num_seqs=2, max_mixed_tokens=5, large_mixed_tokens=(12, 24), num_blocks=30)
    running = [engine.add(1, range(4)), engine.add(2, range(50, 54))]
    engine.step()
    waiting = [engine.add(3 + i, range(20)) for i in range(4)]
    roster = engine.scheduler.roster
    assert roster.num_waiting_tokens == 80
    roster.waiting.__class__ = Queue
    assert engine.scheduler.schedule() is not None
    roster.waiting.__class__ = FairQueue
    engine.scheduler.abort([waiting[1].id])
    assert roster.num_waiting_tokens == 60
    engine.scheduler.abort([running[0].id])
    engine.scheduler.update(StepResult(engine.scheduler.in_flight[0].index, [7, 7]))
    engine.schedule()
    assert roster.num_waiting_tokens == 40, "one was admitted"


def test_waiting_tokens_of_who_was_preempted() -> None:
    """It grows by the samples in flight while it waits, and is taken off as it was put on."""
    engine = Engine(max_num_batched_tokens=64, num_blocks=9, max_model_len=32, depth=2)
    requests = [engine.add(1, range(15)), engine.add(2, range(50, 63))]
    while not engine.scheduler.planner.num_preemptions:
        engine.schedule()
        if len(engine.in_flight) == 2:
            engine.update()
    while engine.in_flight:
        engine.update()
    assert engine.scheduler.roster.num_waiting_tokens > 0
    engine.scheduler.abort([request.id for request in requests])
    assert engine.scheduler.roster.num_waiting_tokens == 0
    engine.scheduler.check_invariants(thorough=True)


@pytest.mark.parametrize(
    ("mixed", "tokens", "expected"),
    [(1000, 8000, (2000, 4100)), (1000, 4050, (2000, 4000)), (1000, 3999, (2000,)), (1000, 1000, ()), (0, 8000, ())],
)
def test_sizes_of_large_chunks(mixed: int, tokens: int, expected: tuple[int, ...]) -> None:
    """What suits the device is taken where it is within a step's limit."""
    assert large_mixed_tokens(mixed, tokens, {2000: 2000, 4000: 4100}.__getitem__) == expected


@pytest.mark.parametrize("few", [True, False])
def test_a_few_decodes_do_not_cut_a_prompt_short(few: bool) -> None:
    """Its rest would share a step with the next prompt, and wait for that."""
    decodes = FEW_DECODES + (not few)
    engine = Engine(max_num_batched_tokens=128, max_mixed_tokens=32, max_num_seqs=40, num_blocks=200)
    others = [engine.add(i, [i]) for i in range(decodes)]
    engine.step()
    prompts = [engine.add(100, range(32)), engine.add(101, range(32, 64))]
    plan = by_id(engine.schedule(), *others, *prompts)
    assert sum(plan[i] for i in range(decodes)) == decodes
    assert plan[100] == (32 if few else 32 - decodes) and 101 not in plan


def test_a_quarter_of_a_mixed_step_is_left_to_prompts() -> None:
    engine = Engine(max_num_batched_tokens=64, max_mixed_tokens=16, max_num_seqs=30)
    others = [engine.add(i, [i]) for i in range(20)]
    engine.step()
    late = engine.add(99, range(100, 130))
    assert by_id(engine.schedule(), *others, late) == {**{i: 1 for i in range(20)}, 99: 4}


def test_tiny_mixed_steps_leave_a_token_to_prompts() -> None:
    engine = Engine(max_num_batched_tokens=64, max_mixed_tokens=2, max_num_seqs=30)
    others = [engine.add(i, [i]) for i in range(20)]
    engine.step()
    late = engine.add(99, range(100, 130))
    assert by_id(engine.schedule(), *others, late) == {**{i: 1 for i in range(20)}, 99: 1}


def test_rows_of_one_token_come_first() -> None:
    engine = Engine(max_num_batched_tokens=9)
    a, b = engine.add(1, range(4)), engine.add(2, range(100, 112))
    engine.step()  # 4 + 5
    c = engine.add(3, [60])
    plan = engine.schedule()
    assert by_id(plan, a, b, c) == {1: 1, 2: 7, 3: 1}
    assert plan.rows == [a.row, c.row, b.row] and plan.num_tokens == [1, 1, 7] and plan.num_decodes == 2
    assert plan.sampled == [0, 1, 2]


def test_counters_advance_when_the_step_is_scheduled() -> None:
    engine = Engine(depth=2)
    a = engine.add(1, range(5))
    engine.schedule()
    assert (a.num_computed_tokens, a.num_in_flight_tokens, a.num_in_flight_steps, a.target) == (5, 1, 1, 6)
    engine.schedule()
    assert (a.num_computed_tokens, a.num_in_flight_tokens, a.num_in_flight_steps, a.target) == (6, 2, 2, 7)
    assert len(engine.scheduler.in_flight) == 2
    assert engine.schedule() is None, "as deep as it may get"
    engine.update(8)
    assert a.token_ids.tolist() == [0, 1, 2, 3, 4, 8] and (a.num_in_flight_tokens, a.num_in_flight_steps) == (1, 1)


@pytest.mark.parametrize("limit", [{"max_tokens": 3}, {"max_model_len": 8}])
def test_nothing_is_scheduled_past_a_sure_end(limit: dict[str, int]) -> None:
    engine = Engine(depth=5, max_model_len=limit.get("max_model_len", 100))
    engine.add(1, range(5), max_tokens=limit.get("max_tokens", 50))
    plans = [engine.schedule() for _ in range(4)]
    assert [plan and plan.num_tokens for plan in plans] == [[5], [1], [1], None]
    outputs = [engine.update()[0] for _ in range(3)]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]


def test_new_rows_and_block_writes_tell_the_device_what_changed() -> None:
    engine = Engine(windows=(0, 0))
    a = engine.add(1, range(6), temperature=0.5)
    plan = engine.schedule()
    tables = engine.scheduler.kv.tables
    (new,) = plan.new_rows
    assert (new.row, new.request_id, unpack_tokens(new.token_ids).tolist()) == (0, 1, [0, 1, 2, 3, 4, 5])
    assert (new.num_prompt_tokens, new.num_computed_tokens, new.sampling) == (6, 0, a.sampling)
    assert plan.new_blocks == [[BlockWrite(0, 0, tables[1].groups[group])] for group in (0, 1)]
    a.token_ids.append(1)
    assert unpack_tokens(new.token_ids).tolist() == [0, 1, 2, 3, 4, 5], "a plan shares nothing with the scheduler"
    a.token_ids.pop()
    engine.update()
    plan = engine.schedule()
    assert plan.new_rows == [] and plan.new_blocks == [[], []]
    engine.update()
    engine.step()
    assert engine.schedule().new_blocks == [[BlockWrite(0, 2, tables[1].groups[group][2:])] for group in (0, 1)]
    b = engine.add(2, range(6))
    engine.update()
    plan = engine.schedule()
    assert plan.new_rows[0].num_computed_tokens == 4
    assert plan.new_blocks[1] == [BlockWrite(b.row, 0, tables[2].groups[1])], "hit blocks included"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan, "a plan can travel"


def test_rows_are_used_again_at_once() -> None:
    engine = Engine(max_num_seqs=2, depth=2)
    a, b, c = (engine.add(id, [id] * 3, max_tokens=id) for id in (1, 2, 3))
    engine.schedule()
    assert (a.row, b.row, c.row) == (0, 1, None)
    engine.schedule()
    engine.update()
    assert a.finished and a.row is None
    plan = engine.schedule()
    assert c.row == 0 and plan.new_rows[0].row == 0, "although a step in flight still uses row 0 for another"
    engine.update()
    assert b.finished


# ---- admission ----
def test_queue_is_strictly_in_order() -> None:
    engine = Engine(num_blocks=6)  # 20 tokens
    a, b, c = engine.add(1, range(8)), engine.add(2, range(100, 116)), engine.add(3, range(200, 204))
    assert by_id(engine.schedule(), a, b, c) == {1: 8}, "the second does not fit, so the third has to wait as well"
    assert engine.scheduler.stats().num_waiting == 2


def test_whole_prompt_has_to_fit_although_a_chunk_is_computed() -> None:
    engine = Engine(num_blocks=6, max_num_batched_tokens=8)
    a = engine.add(1, range(8))
    engine.step()
    b = engine.add(2, range(100, 116))  # 4 blocks, 3 are free; its first chunk would fit
    assert by_id(engine.schedule(), a, b) == {1: 1}
    engine.update()
    engine.scheduler.abort([1])
    assert by_id(engine.schedule(), b) == {2: 8}


def test_prefills_never_promise_the_same_blocks_twice() -> None:
    engine = Engine(num_blocks=11, max_num_batched_tokens=8)  # 40 tokens
    a, b = engine.add(1, range(24)), engine.add(2, range(100, 124))
    for _ in range(3):
        assert by_id(engine.schedule(), a, b) == {1: 8}
        engine.update()
    assert by_id(engine.schedule(), a, b) == {1: 1}, "the second would overcommit: it stays in the queue"
    assert engine.scheduler.planner.num_preemptions == 0


def test_without_chunked_prefill_a_prompt_is_not_cut() -> None:
    engine = Engine(enable_chunked_prefill=False, max_num_batched_tokens=10)
    a, b, c = engine.add(1, range(6)), engine.add(2, range(100, 105)), engine.add(3, range(200, 202))
    assert by_id(engine.schedule(), a, b, c) == {1: 6}, "5 do not fit into the 4 left, and nobody overtakes"
    engine.update()
    assert by_id(engine.schedule(), a, b, c) == {1: 1, 2: 5, 3: 2}
    with pytest.raises(AssertionError, match="longer than a step"):
        engine.add(4, range(11))


def test_resumed_request_that_outgrew_a_step_is_cut_even_without_chunked_prefill() -> None:
    engine = Engine(enable_chunked_prefill=False, max_num_batched_tokens=8, enable_prefix_caching=False, num_blocks=9)
    a, b = engine.add(1, range(4)), engine.add(2, range(100, 104))
    while not b.num_preemptions:
        engine.step()
    assert b.num_tokens > 8
    engine.scheduler.abort([1])
    assert by_id(engine.schedule(), b) == {2: 8}
    engine.update()
    assert sum(by_id(engine.schedule(), b).values()) <= 8
    assert a.finished and not b.finished


def test_request_that_cannot_be_hashed_is_not_queued() -> None:
    engine = Engine()
    with pytest.raises(OverflowError):
        engine.add(1, [1 << 40] * 5, prompt_logprobs=1)
    assert not engine.scheduler.has_unfinished() and not engine.scheduler.prompt_results
    assert engine.schedule() is None


# ---- preemption ----
def full_engine(**options) -> tuple[Engine, Request, Request]:
    """Two requests of 8 tokens in a cache of 5 blocks: the next token of both needs a block, and one is left."""
    engine = Engine(**{"num_blocks": 6, "depth": 1, **options})
    a, b = engine.add(1, range(8), priority=1), engine.add(2, range(100, 108))
    engine.step(50)
    return engine, a, b


def test_last_admitted_is_preempted_and_resumes_from_the_cache() -> None:
    engine, a, b = full_engine()
    assert by_id(engine.schedule(), a, b) == {1: 1}
    assert (b.status, b.row, b.num_computed_tokens, b.num_preemptions) == (Status.WAITING, None, 0, 1)
    assert engine.scheduler.stats().num_preemptions == 1
    engine.update()
    engine.scheduler.abort([1])
    plan = engine.schedule()
    assert by_id(plan, b) == {2: 1}, "both of its blocks were still there"
    assert unpack_tokens(plan.new_rows[0].token_ids).tolist() == [*range(100, 108), 50]
    assert (plan.new_rows[0].num_computed_tokens, plan.new_rows[0].num_prompt_tokens) == (8, 8)
    assert b.num_cached_tokens == 0, "of its first admission"


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    engine, a, b = full_engine()
    c = engine.add(3, [1])
    assert by_id(engine.schedule(), a, b, c) == {1: 1}
    assert [entry[3].id for entry in engine.scheduler.roster.waiting] == [2, 3], "to the front of the queue"


def test_sample_in_flight_of_a_preempted_request_is_kept() -> None:
    engine = Engine(num_blocks=6, depth=2, max_num_batched_tokens=16)
    a, b = engine.add(1, range(8)), engine.add(2, range(100, 107))
    engine.schedule()
    engine.schedule()  # the second takes the last slot of its second block; the first gets the fifth block
    assert (a.num_computed_tokens, b.num_computed_tokens) == (9, 8)
    engine.update(50, 60)
    plan = engine.schedule()
    assert by_id(plan, a, b) == {1: 1} and b.status is Status.WAITING and b.num_in_flight_tokens == 1
    c = engine.add(3, [1])
    outputs = engine.update(51, 61)
    assert b.token_ids[-2:].tolist() == [60, 61] and [output.token_ids for output in outputs] == [[51], [61]]
    assert b.num_in_flight_steps == 0 and c.status is Status.WAITING
    engine.update(52)
    engine.scheduler.abort([1])
    assert unpack_tokens(engine.schedule().new_rows[0].token_ids).tolist() == [*range(100, 107), 60, 61]


def test_preempted_request_waits_for_its_steps_and_nobody_overtakes() -> None:
    engine = Engine(num_blocks=6, depth=3, max_num_batched_tokens=16)
    a, b = engine.add(1, range(8), max_tokens=2), engine.add(2, range(100, 107))
    engine.schedule()
    engine.schedule()
    engine.update()
    assert engine.schedule() is None, "a has its last sample in flight, b no room"
    assert b.status is Status.WAITING and b.num_in_flight_steps == 1
    engine.add(3, [1])
    assert engine.schedule() is None, "the head of the queue has a step in flight"
    engine.update()
    assert a.finished
    assert by_id(engine.schedule(), b, engine.scheduler.roster.entries[3][3]) == {2: 1, 3: 1}


def test_preempted_request_may_end_while_it_waits() -> None:
    engine = Engine(num_blocks=6, depth=2, max_num_batched_tokens=16)
    engine.add(1, range(8))
    b = engine.add(2, range(100, 107), eos_token_ids=(9,))
    engine.schedule()
    engine.schedule()
    engine.update(50)
    engine.schedule()
    assert b.status is Status.WAITING
    assert [(output.id, output.finish_reason) for output in engine.update(50, 9)] == [(1, None), (2, "stop")]
    assert not engine.scheduler.roster.waiting


def test_worst_priority_is_the_victim_even_when_scheduled_in_this_very_step() -> None:
    engine, a, b = full_engine(scheduling_policy="priority")
    plan = engine.schedule()
    assert list(engine.scheduler.roster.running) == [2] and by_id(plan, a, b) == {2: 1}
    assert a.status is Status.WAITING and a.num_preemptions == 1
    engine.update()

    engine = Engine(scheduling_policy="priority", num_blocks=6, max_num_batched_tokens=12)
    a, b = engine.add(1, range(7), priority=1), engine.add(2, range(100, 112), priority=1, arrival=-1.0)
    assert by_id(engine.schedule(), a, b) == {2: 12}, "the queue is in order of priority, then arrival"
    engine.update()
    assert by_id(engine.schedule(), a, b) == {2: 1}, "4 of 5 blocks are taken: the other has to wait"
    engine.update()


def test_victim_scheduled_earlier_in_the_step_hands_back_its_budget_and_blocks() -> None:
    engine = Engine(scheduling_policy="priority", num_blocks=6, max_num_batched_tokens=3, max_num_seqs=3)  # 20 tokens
    a = engine.add(1, range(4), priority=5)
    engine.step()
    engine.step()
    b = engine.add(2, range(100, 112), priority=0)
    for _ in range(4):
        assert by_id(engine.schedule(), a, b) == {1: 1, 2: 2}
        engine.update()
    plan = engine.schedule()  # a, first to be planned, takes the last block, which b needs for its prompt
    assert a.status is Status.WAITING and by_id(plan, b) == {2: 2} and plan.rows == [b.row]
    assert a.num_in_flight_steps == 0 and a.num_in_flight_tokens == 0 and plan.sampled == []
    assert [write.row for write in plan.new_blocks[0]] == [b.row]
    engine.update()
    assert engine.scheduler.stats().step_tokens == 2


def test_more_important_requests_are_never_preempted() -> None:
    engine = Engine(scheduling_policy="priority", num_blocks=6)
    a, b = engine.add(1, range(8), priority=0), engine.add(2, range(100, 108), priority=3)
    engine.step()
    c = engine.add(3, [1], priority=-5)
    assert by_id(engine.schedule(), a, b, c) == {1: 1}, "the one that is refused gives way itself"
    assert b.num_preemptions == 1 and a.num_preemptions == 0
    engine.update()
    engine.scheduler.abort([1])
    assert list(by_id(engine.schedule(), b, c)) == [3, 2], "and the queue is by priority"


def test_request_that_outgrows_the_cache_alone_ends_with_an_error() -> None:
    engine = Engine(num_blocks=3, depth=2)  # 8 tokens
    a = engine.add(1, range(6))
    for _ in range(2):
        engine.schedule()
    assert engine.update()[0].finish_reason is None
    engine.schedule()
    assert engine.update()[0].finish_reason is None
    assert engine.schedule() is None, "no slot, but the sample in flight may be its last"
    (output,) = engine.update()
    assert output.finish_reason == "error" and output.token_ids == [7]
    assert "9 tokens do not fit the KV cache, which holds 8" in output.error and "--kv-cache" in output.error
    assert a.num_preemptions == 0 and not engine.scheduler.has_unfinished()


def test_request_that_ends_with_the_last_slot_of_the_cache_ends_well() -> None:
    engine = Engine(num_blocks=3)
    engine.add(1, range(6), max_tokens=3)
    assert [engine.step()[0].finish_reason for _ in range(3)] == [None, None, "length"]


def test_prompt_that_the_cache_can_never_hold_ends_with_an_error() -> None:
    engine = Engine(num_blocks=3)
    engine.add(1, range(9))
    assert engine.scheduler.has_unfinished() and engine.scheduler.stats().num_waiting == 0
    plan = engine.schedule()
    assert plan.rows == [] and plan.total_tokens == 0 and plan.new_blocks == [[]]
    (output,) = engine.update()
    assert (output.id, output.finish_reason) == (1, "error") and "holds 8" in output.error
    assert not engine.scheduler.has_unfinished() and engine.schedule() is None
    engine.add(2, range(9))
    engine.add(3, range(2))
    assert {output.id for output in engine.step()} == {2, 3}


# ---- results ----
@pytest.mark.parametrize(
    "token, sampling, reason, stop_reason",
    [
        (9, {"eos_token_ids": (9,)}, "stop", None),
        (9, {"eos_token_ids": (9,), "stop_token_ids": (9,)}, "stop", None),
        (9, {"eos_token_ids": (9,), "ignore_eos": True}, None, None),
        (9, {"eos_token_ids": (9,), "stop_token_ids": (9,), "ignore_eos": True}, "stop", 9),
        (8, {"eos_token_ids": (9,), "stop_token_ids": (7, 8)}, "stop", 8),
        (9, {"eos_token_ids": (9,), "min_tokens": 2}, None, None),
        (8, {"stop_token_ids": (8,), "min_tokens": 2}, None, None),
        (9, {"eos_token_ids": (9,), "min_tokens": 1}, "stop", None),
        (9, {"eos_token_ids": (9,), "max_tokens": 1}, "stop", None),
        (9, {"eos_token_ids": (9,), "max_tokens": 1, "min_tokens": 2}, "length", None),
        (5, {"eos_token_ids": (9,), "max_tokens": 1}, "length", None),
        (5, {}, None, None),
    ],
)
def test_stop_checks(token: int, sampling: dict, reason: str | None, stop_reason: int | None) -> None:
    engine = Engine()
    request = engine.add(1, range(3), **sampling)
    (output,) = engine.step(token)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([token], reason, stop_reason)
    assert request.finished == (reason is not None) and request.finish_reason == reason
    assert type(output.finish_reason) in (str, type(None))
    if reason:
        assert not engine.scheduler.has_unfinished() and engine.scheduler.kv.num_free_blocks == 100


def test_total_length_reaches_max_model_len_and_no_more() -> None:
    engine = Engine(max_model_len=6, depth=3)
    request = engine.add(1, range(4))
    while engine.schedule():
        pass
    assert engine.update()[0].finish_reason is None
    assert engine.update()[0].finish_reason == "length" and request.num_tokens == 6
    assert len(engine.scheduler.in_flight) == 0
    with pytest.raises(AssertionError, match="no room"):
        engine.add(2, range(6))


def test_first_output_tells_of_queue_and_cache() -> None:
    engine = Engine(max_num_batched_tokens=8)
    before = time.monotonic()
    engine.add(1, range(9))
    assert engine.step() == [], "a chunk that samples nothing has no output"
    (first,) = engine.step()
    (second,) = engine.step()
    assert before <= first.first_scheduled <= time.monotonic() and first.num_cached_tokens == 0
    assert second.first_scheduled is None and second.num_cached_tokens is None
    engine.add(2, range(9))
    assert engine.step()[1].num_cached_tokens == 8


def test_logprobs_pass_through() -> None:
    engine = Engine()
    engine.add(1, range(3), max_tokens=2)
    engine.add(2, range(3), max_tokens=2)
    for reason in (None, "length"):
        engine.schedule()
        logprob = TokenLogprobs(-0.5, 1, [7, 8], [-0.5, -1.0])
        first, second = engine.update(logprobs=[None, logprob])
        assert (first.logprobs, second.logprobs) == (None, [logprob])
        assert first.finish_reason == second.finish_reason == reason


def test_worthless_sample_ends_its_request_only_and_its_cache_is_not_trusted() -> None:
    engine = Engine()
    a, b = engine.add(1, range(9)), engine.add(2, range(100, 109))
    engine.schedule()
    first, second = engine.update(errors={0: "NaN"})
    assert (first.id, first.token_ids, first.finish_reason, first.error) == (1, [], "error", "NaN")
    assert second.finish_reason is None and a.finished and not b.finished
    engine.add(3, range(9))
    engine.add(4, range(100, 109))
    engine.schedule()
    assert {output.id: output.num_cached_tokens for output in engine.update()} == {2: None, 3: 0, 4: 8}


def test_cache_of_a_worthless_sample_is_not_trusted_though_its_request_was_preempted() -> None:
    engine = Engine(num_blocks=6, depth=2, max_num_batched_tokens=16)
    engine.add(1, range(8))
    b = engine.add(2, range(100, 107))
    engine.schedule()
    engine.schedule()
    engine.update(50, 60)
    engine.schedule()
    assert b.status is Status.WAITING and b.num_in_flight_tokens == 1
    assert [output.error for output in engine.update(51, 61, errors={1: "NaN"})] == [None, "NaN"]
    engine.scheduler.abort([1])
    c = engine.add(3, range(100, 107))
    engine.schedule()
    assert c.num_cached_tokens == 0


def test_results_of_finished_requests_are_dropped() -> None:
    engine = Engine(depth=2)
    request = engine.add(1, range(3), eos_token_ids=(9,))
    engine.schedule()
    engine.schedule()
    assert engine.update(9)[0].finish_reason == "stop"
    assert not engine.scheduler.has_unfinished() and len(engine.scheduler.in_flight) == 1
    assert engine.scheduler.kv.num_free_blocks == 100, "freed at once: the device works in order"
    assert engine.update(9) == [] and request.token_ids.tolist() == [0, 1, 2, 9]


# ---- abort ----
def test_abort_ends_waiting_running_and_in_flight_requests_once() -> None:
    engine = Engine(max_num_seqs=2, depth=2)
    a, b, c = (engine.add(id, range(4)) for id in (1, 2, 3))
    engine.schedule()
    outputs = engine.scheduler.abort([1, 3, 1, 77])
    assert [(output.id, output.token_ids, output.finish_reason) for output in outputs] == [
        (1, [], "abort"), (3, [], "abort"),
    ]  # fmt: skip
    assert engine.scheduler.abort([1, 3]) == [] and a.finish_reason is FinishReason.ABORT and c.finished
    engine.scheduler.check_invariants(thorough=True)
    plan = engine.schedule()
    assert by_id(plan, b) == {2: 1}, "no step scheduled after the abort contains it"
    assert [output.id for output in engine.update()] == [2]
    assert engine.scheduler.abort(iter([2]))[0].finish_reason == "abort"
    assert engine.update() == [] and not engine.scheduler.has_unfinished()


# ---- prefix cache ----
def test_equal_prompts_prefill_once_within_a_step() -> None:
    engine = Engine(max_num_batched_tokens=64)
    requests = [engine.add(id, range(17)) for id in range(8)]
    plan = engine.schedule()
    assert sorted(by_id(plan, *requests).values()) == [1] * 7 + [17] and plan.rows[-1] == requests[0].row
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (8 * 17, 7 * 16)
    engine.update()
    assert engine.scheduler.stats().prompt_tokens_computed == 17 + 7


def test_chunks_of_running_prefills_can_be_hit_within_the_step() -> None:
    engine = Engine(max_num_batched_tokens=12)
    a = engine.add(1, range(17))
    engine.step()
    b = engine.add(2, range(16))
    assert by_id(engine.schedule(), a, b) == {1: 5, 2: 4}, "12 from the step before; the last block is computed again"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_generated_tokens_are_cached_for_the_next_turn(depth: int) -> None:
    engine = Engine(depth=depth)
    a = engine.add(1, range(6), max_tokens=11)
    token = 20
    while engine.scheduler.has_unfinished():
        while engine.schedule():
            pass
        engine.update(token := token + 1)
    while engine.in_flight:
        engine.update()
    assert a.num_tokens == 17
    b = engine.add(2, [*a.token_ids, 1, 2, 3])
    engine.schedule()
    assert b.num_cached_tokens == 16, "all blocks but the one that was never filled"


def test_block_is_registered_only_when_its_values_are_known() -> None:
    engine = Engine(depth=2)
    engine.add(1, range(3))
    engine.schedule()
    engine.schedule()  # computes the fourth token, whose value is still on the device
    assert not engine.scheduler.kv.pool.by_key
    engine.update(3)
    assert len(engine.scheduler.kv.pool.by_key) == 1
    b = engine.add(2, range(5))
    engine.schedule()
    assert b.num_cached_tokens == 4


def test_salts_keep_requests_apart() -> None:
    engine = Engine()
    requests = [engine.add(id, range(9), salt=salt) for id, salt in enumerate([None, "a", "b", "a"])]
    engine.schedule()
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 8]


# ---- failed steps ----
def test_failed_step_ends_its_requests_and_its_blocks_are_forgotten() -> None:
    engine = Engine()
    a = engine.add(1, range(9))
    plan = engine.schedule()
    (output,) = engine.fail(plan)
    assert (output.id, output.finish_reason, output.error) == (1, "error", "boom") and a.finished
    assert not engine.scheduler.has_unfinished() and not engine.scheduler.kv.pool.by_key
    b = engine.add(2, range(9))
    assert engine.schedule().num_tokens == [9] and b.num_cached_tokens == 0


def test_blocks_computed_before_the_failed_step_stay_cached() -> None:
    engine = Engine()
    engine.add(1, range(9))
    engine.step()
    engine.fail(engine.schedule())
    b = engine.add(2, range(9))
    engine.schedule()
    assert b.num_cached_tokens == 8


def test_plans_after_the_failed_one_are_drained() -> None:
    engine = Engine(depth=3)
    engine.add(1, range(9))
    first = engine.schedule()
    b = engine.add(2, range(100, 103))
    engine.schedule()
    assert [output.id for output in engine.fail(first)] == [1]
    assert [output.id for output in engine.update(5, 6)] == [2] and b.token_ids[-1] == 6


def test_requests_built_on_a_failed_step_start_over() -> None:
    engine = Engine(depth=3)
    engine.add(1, range(9))
    first = engine.schedule()
    b = engine.add(2, range(9))  # hits blocks that the first step is believed to write
    engine.schedule()
    assert b.num_cached_tokens == 8
    engine.schedule()
    assert [output.id for output in engine.fail(first)] == [1]
    assert b.status is Status.WAITING and b.num_in_flight_tokens == 0 and b.num_in_flight_steps == 2
    assert engine.schedule() is None, "not before its steps are back"
    assert engine.update(66) == [] and engine.update(67) == [] and b.num_output_tokens == 0
    assert engine.schedule().num_tokens == [9] and b.num_cached_tokens == 0
    assert engine.update(5)[0].token_ids == [5]


def test_look_up_of_a_request_that_starts_over_counts_once() -> None:
    engine = Engine(depth=2)
    engine.add(1, range(9))
    first = engine.schedule()
    b = engine.add(2, range(9))
    engine.schedule()
    engine.fail(first)
    engine.update()
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (2 * 9, 8) and b.num_cached_tokens == 0


def test_launch_that_fails_leaves_the_steps_before_it_alone() -> None:
    engine = Engine(depth=2, max_num_batched_tokens=8)
    a, b = engine.add(1, range(6)), engine.add(2, range(100, 106))
    engine.schedule()
    second = engine.schedule()
    assert {output.id for output in engine.fail(second)} == {1, 2}
    assert engine.update() == [] and a.num_output_tokens == 0 and b.finished
    assert not engine.scheduler.has_unfinished()


# ---- numbers ----
def test_who_came_since_the_last_plan_has_not_been_left_waiting() -> None:
    """The server takes the number for a queue that is full: of eight at once, with room for ten, it refused one."""
    engine = Engine(max_num_seqs=4, depth=2)
    engine.add(0, range(5), max_tokens=9)
    engine.schedule()
    for id in range(1, 7):
        engine.add(id, [id] * 5)
    engine.update()
    assert engine.scheduler.stats().num_waiting == 0
    engine.schedule()
    assert engine.scheduler.stats().num_waiting == 3
    engine.scheduler.abort([5, 6])
    assert engine.scheduler.stats().num_waiting == 1


def test_stats() -> None:
    engine = Engine(max_num_seqs=2)
    for id in range(3):
        engine.add(id, [id] * 5, max_tokens=2)
    engine.schedule()
    stats = engine.scheduler.stats(device_seconds=1.5, host_seconds=0.5)
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_free_blocks) == (2, 1, 100, 96)
    assert (stats.num_steps, stats.step_tokens, stats.device_seconds, stats.host_seconds) == (0, 0, 1.5, 0.5)
    engine.update()
    stats = engine.scheduler.stats()
    assert (stats.num_steps, stats.step_tokens, stats.prompt_tokens_computed, stats.prefix_queries) == (1, 10, 10, 10)


def test_no_torch() -> None:
    script = (
        "import sys; import vserve.engine.schedule.scheduler; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_no_transformers_in_an_engine() -> None:
    """It takes longer to import than all else an engine needs, torch included: only models of its code may."""
    script = (
        "import sys; import vserve.engine.start.process, vserve.engine.start.rank; "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def decode_seconds(num_seqs: int, depth: int = 2) -> float:
    """The fastest of many schedule + update of that many decodes."""
    engine = Engine(
        max_model_len=4096, max_num_batched_tokens=8192, max_num_seqs=num_seqs, block_size=16,
        num_blocks=num_seqs * 20, depth=depth,
    )  # fmt: skip
    scheduler = engine.scheduler
    for id in range(num_seqs):
        engine.add(id, [id] * 40 + [id] * (id % 16), max_tokens=4000, eos_token_ids=(1, 2))
    results: deque[StepResult] = deque()
    spent = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(120):
            started = time.perf_counter()
            plan = scheduler.schedule()
            results.append(StepResult(plan.step, [7] * len(plan.sampled)))
            if len(results) == depth:
                scheduler.update(results.popleft())
            spent.append(time.perf_counter() - started)
    finally:
        gc.enable()
    return min(spent[20:])


@pytest.mark.slow
def test_cost_of_a_step_grows_no_faster_than_the_batch(costs_at_most: Any) -> None:
    assert costs_at_most(6, lambda: decode_seconds(512), lambda: decode_seconds(128) + 0.03e-3)


# ---- prompts that share steps ----
def test_prompts_share_a_step_evenly_and_no_more_of_them_than_asked_for() -> None:
    engine = Engine(max_num_partial_prefills=2)
    a, b, c = engine.add(1, range(60)), engine.add(2, range(100, 160)), engine.add(3, range(200, 203))
    assert by_id(engine.schedule(), a, b, c) == {1: 16, 2: 16}, "the third waits for one of them to end"
    for _ in range(3):
        engine.update()
        plan = engine.schedule()
    assert by_id(plan, a, b, c) == {1: 12, 2: 12, 3: 3}, "what they no longer need is left to others"


def test_alone_a_prompt_gets_the_whole_step() -> None:
    engine = Engine(max_num_partial_prefills=4)
    a = engine.add(1, range(60))
    assert by_id(engine.schedule(), a) == {1: 32}


def test_of_a_long_prompt_a_step_computes_so_many_tokens_at_most() -> None:
    engine = Engine(long_prefill_token_threshold=10)
    a, b, c = engine.add(1, range(30)), engine.add(2, range(100, 110)), engine.add(3, range(200, 230))
    assert by_id(engine.schedule(), a, b, c) == {1: 10, 2: 10, 3: 10}
    engine.update()
    assert by_id(engine.schedule(), a, b, c) == {1: 10, 2: 1, 3: 10}


def test_short_prompts_pass_long_ones_that_wait_for_another_to_end() -> None:
    engine = Engine(max_num_partial_prefills=3, max_long_partial_prefills=1, long_prefill_token_threshold=10)
    a, b = engine.add(1, range(20)), engine.add(2, range(100, 120))
    c, d = engine.add(3, range(200, 204)), engine.add(4, range(300, 304))
    assert by_id(engine.schedule(), a, b, c, d) == {1: 10, 3: 4, 4: 4}, "the second waits"
    engine.update()
    assert by_id(engine.schedule(), a, b, c, d) == {1: 10, 2: 10, 3: 1, 4: 1}, "the first is planned to its end"


def test_blocks_of_prompts_in_progress_are_not_promised_twice() -> None:
    engine = Engine(long_prefill_token_threshold=8, num_blocks=1 + 24, enable_prefix_caching=False)
    a = engine.add(1, range(64))  # 16 blocks, 2 of them at once
    b = engine.add(2, range(100, 140))  # 10 blocks, but 8 will be left
    assert by_id(engine.schedule(), a, b) == {1: 8}
    for _ in range(7):
        engine.update()
        assert by_id(engine.schedule(), a, b) == {1: 8}
    assert engine.scheduler.planner.num_preemptions == 0
