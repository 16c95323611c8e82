"""Slots and snapshots of recurrent state, case by case. Grains of 8 tokens, and of 64 where it says so."""

from __future__ import annotations

import random

import pytest

from vserve.engine.errors import ConfigError, InvariantError
from vserve.engine.link.plan import StepPlan, StepResult
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule.request import Request
from vserve.engine.schedule.scheduler import Scheduler
from vserve.engine.schedule.state_group import StateGroup

from .test_scheduler import Engine, by_id


def make(num_slots: int = 6, **options) -> Engine:
    """With so many slots that can be given out."""
    settings = {
        "max_model_len": 400, "max_num_batched_tokens": 128, "num_blocks": 401, "num_state_slots": 1 + num_slots,
        "state_snapshot_tokens": 8,
    }  # fmt: skip
    return Engine(**(settings | options))


def state_of(engine: Engine) -> StateGroup:
    state = engine.scheduler.kv.state
    assert state is not None
    return state


def planned(engine: Engine) -> StepPlan:
    plan = engine.schedule()
    assert plan is not None
    return plan


def leave(engine: Engine, id: int, prompt, **options) -> list[tuple[int, int]]:
    """A request that ends with its first token. Returns the boundaries and slots of the snapshots it leaves."""
    request, left = engine.add(id, prompt, max_tokens=1, **options), []
    while not request.finished:
        left += [(export.boundary, export.slot) for export in planned(engine).exports]
        engine.update()
    return left


def hit_of(engine: Engine, id: int, prompt, **options) -> int:
    """Tokens that a request does not compute. It ends with its first token."""
    request = engine.add(id, prompt, max_tokens=1, **options)
    (new,) = planned(engine).new_rows
    engine.update()
    while not request.finished:
        engine.step()
    return new.num_computed_tokens


# ---- hits ----
def test_a_prompt_that_came_before_is_hit_up_to_its_last_token() -> None:
    engine = make()
    ((boundary, slot),) = leave(engine, 1, range(41))
    assert boundary == 40
    again = engine.add(2, range(41))
    plan = planned(engine)
    (new,) = plan.new_rows
    assert new.num_computed_tokens == 40 and new.restored_from == slot != new.state_slot
    assert by_id(plan, again) == {2: 1} and plan.sampled == [0] and plan.exports == []


def test_a_prompt_as_long_as_a_snapshot_is_hit_before_it() -> None:
    """Its last token has to be computed, and no state can be had from a later one."""
    engine = make()
    assert [boundary for boundary, _ in leave(engine, 1, range(41))] == [40]
    assert hit_of(engine, 2, range(40)) == 0, "attention alone would hit 36"
    assert hit_of(engine, 3, range(40)) == 32, "which the last one has left"
    assert hit_of(engine, 4, range(41)) == 40


def test_a_junction_is_paid_by_the_second_and_hit_by_the_third() -> None:
    engine = make()
    assert [boundary for boundary, _ in leave(engine, 1, [*range(42), *range(100, 120)])] == [56]
    second = engine.add(2, [*range(42), *range(200, 220)], max_tokens=1)
    plan = planned(engine)
    assert plan.num_tokens == [40] and [export.boundary for export in plan.exports] == [40], "cut: one export a step"
    engine.update()
    plan = planned(engine)
    assert plan.num_tokens == [22] and [export.boundary for export in plan.exports] == [56]
    engine.update()
    assert second.finished
    assert hit_of(engine, 3, [*range(42), *range(300, 320)]) == 40
    assert hit_of(engine, 4, [*range(42), *range(200, 220)]) == 56


def test_without_chunks_a_junction_takes_precedence() -> None:
    engine = make(enable_chunked_prefill=False)
    leave(engine, 1, [*range(42), *range(100, 120)])
    assert [boundary for boundary, _ in leave(engine, 2, [*range(42), *range(200, 220)])] == [40]


def test_choices_of_one_prompt_wait_for_its_snapshot() -> None:
    engine = make()
    choices = [engine.add(id, range(41)) for id in range(5)]
    assert by_id(planned(engine), *choices) == {0: 41}
    engine.update()
    plan = planned(engine)
    assert by_id(plan, *choices) == dict.fromkeys(range(5), 1)
    assert [new.num_computed_tokens for new in plan.new_rows] == [40] * 4
    assert (
        len({new.state_slot for new in plan.new_rows}) == 4 and len({new.restored_from for new in plan.new_rows}) == 1
    )


def test_salts_and_adapters_have_states_of_their_own() -> None:
    engine = make(num_slots=9)
    leave(engine, 1, range(41), salt="a")
    assert hit_of(engine, 2, range(41), salt="b") == hit_of(engine, 3, range(41)) == 0
    assert hit_of(engine, 4, range(41), adapter=7) == hit_of(engine, 5, range(41), adapter=8) == 0
    assert hit_of(engine, 6, range(41), salt="a") == hit_of(engine, 7, range(41), adapter=7) == 40


def test_without_a_cache_nothing_is_exported() -> None:
    engine = make(enable_prefix_caching=False)
    assert leave(engine, 1, range(41)) == [] and hit_of(engine, 2, range(41)) == 0
    assert engine.scheduler.stats().num_skipped_state_exports == 0


# ---- room ----
def test_who_finds_no_slot_waits_and_gets_on() -> None:
    engine = make(num_slots=1)
    requests = [engine.add(id, range(100 * id, 100 * id + 20), max_tokens=3) for id in range(3)]
    for _ in range(9):
        assert len(planned(engine).rows) == 1
        engine.update()
    assert all(request.num_output_tokens == 3 for request in requests)
    stats = engine.scheduler.stats()
    assert stats.num_state_slots == 1 and stats.num_state_slots_used == 0
    assert stats.num_skipped_state_exports == 3 and stats.num_state_exports == 0


def test_a_snapshot_may_be_gone_when_its_turn_comes() -> None:
    engine = make(num_slots=2)
    leave(engine, 1, range(41))
    running = [engine.add(id, range(100 * id, 100 * id + 20)) for id in (2, 3)]
    waiting = engine.add(4, range(41))
    assert set(by_id(planned(engine), *running, waiting)) == {2, 3}
    engine.update()
    engine.scheduler.abort([2])
    plan = planned(engine)
    (new,) = plan.new_rows
    assert new.request_id == 4 and new.num_computed_tokens == 0 and new.restored_from == -1


def test_the_last_free_slot_is_the_snapshot_s_own() -> None:
    engine = make(num_slots=2)
    ((_, slot),) = leave(engine, 1, range(41))
    engine.add(2, range(100, 105))
    engine.step()
    engine.add(3, range(41))
    (new,) = planned(engine).new_rows
    assert new.num_computed_tokens == 40 and new.state_slot == new.restored_from == slot
    engine.update()
    engine.scheduler.abort([2])
    assert hit_of(engine, 4, range(41)) == 0, "it is folded into"


def test_the_last_free_slot_is_left_to_who_waits() -> None:
    engine = make(num_slots=2)
    first, second = engine.add(1, range(41)), engine.add(2, range(100, 141))
    plan = planned(engine)
    assert set(by_id(plan, first, second)) == {1, 2} and plan.exports == []
    assert engine.scheduler.stats().num_skipped_state_exports == 2


@pytest.mark.parametrize("options", [
    {"max_mixed_tokens": 2}, {"max_num_partial_prefills": 64}, {"long_prefill_token_threshold": 3},
    {"pipeline_parallel_size": 2, "context_cost": 9.0},
])  # fmt: skip
def test_limits_leave_room_for_a_grain(options: dict[str, float]) -> None:
    engine = make(max_num_batched_tokens=20, **options)
    engine.add(1, range(3))
    engine.step()
    prompt = engine.add(2, range(100, 160), max_tokens=1)
    for _ in range(30):
        if not prompt.finished:
            plan = planned(engine)
            chunks = [pair for pair in zip(plan.num_computed, plan.num_tokens, strict=True) if pair[1] > 1]
            assert all((start + new) % 8 == 0 or start + new == 60 for start, new in chunks)
            engine.update()
    assert prompt.finished


def test_steps_without_room_for_a_grain_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"14 leaves no room for 8 tokens .* raise it to 15, or lower --max-num-seqs"):
        make(max_num_batched_tokens=14)
    make(max_num_batched_tokens=15)


def test_beside_everybody_s_drafts_there_is_room_for_a_grain() -> None:
    drafts = {"max_num_seqs": 4, "max_drafts": 3, "draft_depths": ((2, 3), (4, 1))}
    with pytest.raises(ConfigError, match=r"15 leaves no room for 8 tokens .* beside 8 tokens .* raise it to 16, or"):
        make(max_num_batched_tokens=15, **drafts)
    make(max_num_batched_tokens=16, **drafts)


def test_less_than_a_grain_is_no_chunk() -> None:
    engine = make(max_num_batched_tokens=20)
    first, second = engine.add(1, range(14)), engine.add(2, range(100, 120))
    assert by_id(planned(engine), first, second) == {1: 14}, "of 20 tokens, 6 are left"
    engine.update()
    assert by_id(planned(engine), first, second) == {1: 1, 2: 16}


# ---- snapshots ----
def test_while_it_decodes_a_request_keeps_its_newest_snapshot() -> None:
    engine = make()
    request, boundaries = engine.add(1, range(9), max_tokens=100), []
    while not request.finished:
        boundaries += [export.boundary for export in planned(engine).exports]
        engine.update()
    assert boundaries == [8, 32, 64, 96]
    engine.schedule()
    found = [index for index, key in enumerate(request.block_hashes) if state_of(engine).pool.find(key)]
    assert [4 * (index + 1) for index in found] == [8, 96]
    assert hit_of(engine, 2, [*request.token_ids, 1]) == 96


def test_a_snapshot_is_found_when_its_tokens_are_known() -> None:
    """With three steps in flight it is written before the host knows them."""
    engine = make(depth=3)
    request, state = engine.add(1, range(30)), state_of(engine)
    engine.step()
    plans = [planned(engine) for _ in range(3)]
    assert [[export.boundary for export in plan.exports] for plan in plans] == [[], [], [32]]
    state.settle()
    assert len(state.pending) == 1 and state.pool.num_free == 4 and len(request.block_hashes) == 7
    engine.update()
    planned(engine)
    assert state.pending == [] and state.pool.find(request.block_hashes[7])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_behind_drafts_a_snapshot_is_borne_until_it_is_written_and_found_no_sooner(kept: int, depth: int) -> None:
    engine = make(max_drafts=3, draft_depths=((8, 3),), depth=depth)
    engine.scheduler.planner.drafting.depth = lambda num_running: 3
    request, state = engine.add(1, range(9), max_tokens=200), state_of(engine)
    engine.step()
    computed, folded, written = 9, 8, [8]  # as the device has it
    while request.num_output_tokens < 180:
        while (plan := engine.schedule()) is not None:
            known = {4 * (i + 1) for i, key in enumerate(request.block_hashes) if state.pool.find(key) is not None}
            assert known <= set(written)
            written += [export.boundary for export in plan.exports if folded < export.boundary <= computed]
            folded, computed = computed, computed + kept
        plan = engine.in_flight.popleft()
        assert plan.num_drafts == 3
        engine.scheduler.update(StepResult(plan.step, [7] * kept, counts=[kept]))
        engine.scheduler.check_invariants(thorough=True)
    assert written[:6] == [8, 32, 64, 96, 128, 160] and known in ({8, 160}, {8, 192})
    engine.scheduler.abort([1])
    assert state.pool.num_free == 6


def test_a_request_that_ends_first_leaves_no_snapshot() -> None:
    engine = make(depth=3)
    engine.add(1, range(30))
    engine.step()
    for _ in range(3):
        planned(engine)
    engine.scheduler.abort([1])
    for _ in range(3):
        engine.update()
    engine.add(2, range(100, 104))
    planned(engine)
    state = state_of(engine)
    assert state.pending == [] and state.pool.num_free == 5 and len(state.pool.by_key) == 1


def test_a_step_that_is_taken_back_exports_once() -> None:
    engine = make()
    request = engine.add(1, range(31))
    for _ in range(2):
        engine.step()
    assert [export.boundary for export in planned(engine).exports] == [32]
    engine.scheduler.postpone([request])
    engine.update(-1)
    plan = planned(engine)
    assert plan.num_computed == [32] and plan.exports == []


def test_what_the_device_has_folded_is_not_exported() -> None:
    """There was no slot when a chunk ended there. Now there is one, but the step folds nothing that ends there."""
    engine = make(num_slots=2, max_num_batched_tokens=33)
    other = engine.add(1, range(300, 303))
    engine.step()
    request = engine.add(2, range(33), max_tokens=9)
    plan = planned(engine)
    assert by_id(plan, other, request) == {1: 1, 2: 32} and plan.exports == []
    engine.update()
    engine.scheduler.abort([1])
    plan = planned(engine)
    assert plan.num_computed == [32] and plan.num_tokens == [1] and plan.exports == []


# ---- what is worthless ----
@pytest.mark.parametrize("known", [False, True])
def test_a_failed_step_leaves_no_snapshot(known: bool) -> None:
    """Whether or not the next plan has been made, with which it could be found."""
    engine = make(depth=2)
    engine.add(1, range(41))
    plan = planned(engine)
    assert len(plan.exports) == 1
    if known:
        planned(engine)
        assert len(state_of(engine).pool.by_key) == 1
    engine.fail(plan)
    assert state_of(engine).pool.by_key == {} and state_of(engine).pending == []


def test_who_was_restored_from_what_a_failed_step_wrote_starts_over() -> None:
    engine = make(depth=2)
    engine.add(1, range(41))
    failing = planned(engine)
    request = engine.add(2, range(41))
    later = planned(engine)
    assert [new.num_computed_tokens for new in later.new_rows] == [40]
    engine.fail(failing)
    engine.update()
    (new,) = planned(engine).new_rows
    assert new.request_id == request.id and new.num_computed_tokens == 0


def test_not_a_number_is_not_kept() -> None:
    engine = make(depth=2)
    engine.add(1, range(41))
    engine.step()
    engine.schedule()
    assert len(state_of(engine).pool.by_key) == 1
    engine.update(errors={0: "NaN"})
    assert state_of(engine).pool.by_key == {} and state_of(engine).pending == []
    assert hit_of(engine, 2, range(41)) == 0


def test_books_that_do_not_balance_are_named() -> None:
    engine = make()
    engine.add(1, range(9))
    engine.step()
    state = state_of(engine)
    (slot,) = state.pool.take_many(1)
    with pytest.raises(InvariantError, match="slots held and written"):
        engine.scheduler.check_invariants(thorough=True)
    state.pool.release([slot])
    del state.held[1]
    with pytest.raises(InvariantError, match="slots of requests that do not run"):
        engine.scheduler.check_invariants(thorough=True)


# ---- a chat ----
@pytest.mark.parametrize("seed", range(3))
def test_a_turn_of_a_chat_computes_at_most_320_tokens_again(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(
        SchedulerConfig(20_000, 2048, 4, num_blocks=1251, num_state_slots=7, depth=2, max_mixed_tokens=512)
    )
    chat = [rng.randrange(1000) for _ in range(1500)]
    computed: list[int] = []  # of the turn before
    again = []
    for turn in range(12):
        request = Request(turn, chat, SamplingParams(max_tokens=rng.choice([20, 255, 256, 257, 400])))
        scheduler.add(request)
        results: list[StepPlan] = []
        while not request.finished:
            while (plan := scheduler.schedule()) is not None:
                results.append(plan)
            plan = results.pop(0)
            scheduler.update(StepResult(plan.step, [rng.randrange(1000) for _ in plan.sampled]))
        while scheduler.in_flight:
            plan = results.pop(0)
            scheduler.update(StepResult(plan.step, [0 for _ in plan.sampled]))
        again.append(len(computed) - (request.num_cached_tokens or 0))
        computed = list(request.token_ids[:-1])
        chat = [*computed, request.token_ids[-1], *(rng.randrange(1000) for _ in range(rng.choice([5, 60, 700])))]
        scheduler.check_invariants(thorough=True)
    assert max(again) <= 320 and scheduler.stats().num_state_restores == 11, again
