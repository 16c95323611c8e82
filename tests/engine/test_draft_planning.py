"""Who gets drafts in a step, and how many: the scheduler's part. No device, no model."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from vserve.engine.cache.rows import RowTables, Upload
from vserve.engine.link.plan import NewRow, StepPlan, StepResult
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.options.speculation import Speculation, read_speculation
from vserve.engine.schedule.request import Request, Status
from vserve.engine.schedule.scheduler import Scheduler
from vserve.engine.schedule.sharing import Depth
from vserve.engine.step.graph_table import GraphTable


def scheduler_of(num_blocks: int, drafts: int = 3) -> Scheduler:
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4, block_size=4, num_blocks=num_blocks,
            max_drafts=drafts, draft_depths=((4, drafts),),
        )
    )  # fmt: skip
    assert scheduler.planner.drafting is not None
    scheduler.planner.drafting.depth = lambda num_running: drafts  # type: ignore[method-assign]
    return scheduler


def step(scheduler: Scheduler, *counts: int) -> StepPlan:
    """Of each row that samples so many tokens are kept, one where nothing is said."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check_invariants(thorough=True)
    kept = [*counts, *[1] * len(plan.sampled)][: len(plan.sampled)]
    result = StepResult(plan.step, [7] * sum(kept), counts=kept if plan.num_drafts else [])
    scheduler.update(result)
    scheduler.check_invariants(thorough=True)
    return plan


def add(scheduler: Scheduler, id: int, length: int, max_tokens: int = 40) -> Request:
    request = Request(id, [id] * length, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    scheduler.add(request)
    return request


def test_nobody_is_preempted_for_drafts() -> None:
    scheduler = scheduler_of(1 + 4)
    requests = [add(scheduler, 1, 5), add(scheduler, 2, 5)]  # two blocks each: every one is taken
    step(scheduler)
    plan = step(scheduler)
    assert plan.num_drafts == 0 and plan.num_tokens == [1, 1], "six tokens, the drafts need a ninth place"
    assert scheduler.planner.num_preemptions == 0 and all(request.status is Status.RUNNING for request in requests)


def test_who_has_room_drafts_and_who_has_none_goes_on_without() -> None:
    scheduler = scheduler_of(1 + 4)
    short, long = add(scheduler, 1, 4), add(scheduler, 2, 6)  # in the next step: tokens 5 and 7, one block is free
    step(scheduler)
    plan = step(scheduler)
    rows = dict(zip(plan.rows, plan.num_tokens, strict=True))
    assert (rows[short.row], rows[long.row]) == (4, 1), "eight places hold five tokens and drafts, not seven and drafts"
    assert scheduler.planner.num_preemptions == 0


def test_a_sure_token_comes_before_the_drafts_of_others() -> None:
    scheduler = scheduler_of(1 + 5)
    first, second = add(scheduler, 1, 6), add(scheduler, 2, 8)  # the last block is for the second one's ninth token
    step(scheduler)
    plan = step(scheduler)
    rows = dict(zip(plan.rows, plan.num_tokens, strict=True))
    assert scheduler.planner.num_preemptions == 0 and rows[first.row] == 1 and rows[second.row] == 4


# ---- tables of depths ----
def settings_of(table: list[list[int]], drafts: int = 7) -> Speculation:
    asked = {"method": "ngram", "num_speculative_tokens": drafts, "num_speculative_tokens_per_batch_size": table}
    found = read_speculation(json.dumps(asked))
    assert found is not None
    return found


def depth_of(speculation: Speculation) -> Depth:
    """While every running request has drafts that hold."""
    depth = Depth(speculation.depths)
    depth._num_proposed = 1 << 20
    depth._tried = depth._held = 1e9
    return depth


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([[1, 8, 7], [9, 64, 0], [65, 128, 1]], {1: 7, 8: 7, 9: 0, 64: 0, 65: 1, 128: 1, 129: 0}),
        ([[1, 8, 0], [9, 64, 4]], {1: 0, 8: 0, 9: 4, 64: 4, 65: 0}),
        ([[1, 8, 1], [9, 64, 7]], {1: 1, 8: 1, 9: 7, 64: 7, 65: 0}),
        ([[3, 8, 7], [9, 64, 0]], {3: 7, 8: 7, 9: 0, 64: 0}),
    ],
)
def test_a_table_means_what_it_says(table: list[list[int]], expected: dict[int, int]) -> None:
    depth = depth_of(settings_of(table).within(256, 8192))
    assert {running: depth.depth(running) for running in expected} == expected


def test_a_table_cut_to_what_runs_and_to_what_a_step_holds() -> None:
    assert settings_of([[1, 2, 1], [3, 64, 7]]).within(2, 8192).depths == ((2, 1),), "the first row is theirs"
    # 64 tokens: eight requests with seven drafts, sixteen with the next smaller number of the table.
    assert settings_of([[1, 32, 7], [33, 64, 3]]).within(64, 64).depths == ((8, 7), (16, 3))
    assert settings_of([[1, 2, 0], [3, 64, 7]]).within(64, 32).depths == ((2, 0), (4, 7))
    assert settings_of([[1, 64, 0]]).within(64, 8192).depths == ()
    for tokens in range(4, 80):  # never more than a step holds
        for most, drafts in settings_of([[1, 4, 2], [5, 9, 7], [10, 64, 3]]).within(64, tokens).depths:
            assert most * (1 + drafts) <= tokens
    rows = read_speculation('{"method": "ngram", "disable_by_batch_size": 20}')
    assert rows is not None and rows.depths == ((8, 7), (19, 3))


@pytest.mark.parametrize(
    "table", [[[1, 8, 1], [9, 64, 7]], [[1, 4, 3], [5, 16, 1], [17, 64, 5]], [[1, 8, 7], [9, 64, 1]]]
)
def test_only_depths_that_have_graphs_are_chosen(table: list[list[int]]) -> None:
    speculation = settings_of(table).within(64, 8192)
    drafts = {count: most for most, count in speculation.depths if count}
    graphs = GraphTable(64, 0, (), drafts)
    depth = depth_of(speculation)
    for rate in (1.0, 0.6, 0.3, 0.05):
        depth._held = rate * depth._tried
        for running in range(1, 65):
            count = depth.depth(running)
            plan = StepPlan(0, [0] * running, [1 + count] * running, [], [], running, [], [], num_drafts=count)
            assert graphs.expects(plan), f"{count} drafts of {running} requests, at a rate of {rate}"


def test_a_row_has_no_proposals_of_its_former_request() -> None:
    tables = RowTables(2, 16, 4, 1, torch.device("cpu"))
    tables.num_proposed[:] = 5
    new = NewRow(1, 9, bytes(4 * 3), 3, 0, SamplingParams(max_tokens=4))
    plan = StepPlan(0, [1], [3], [0], [0], 0, [new], [[]])
    upload = Upload()
    writes = tables.stage(plan, upload)
    tables.apply(writes, upload.send(tables.device))
    assert tables.num_proposed.tolist() == [5, 0, 5] and tables.num_computed.tolist() == [0, 0, 0]


def test_speculation_without_room_is_none() -> None:
    assert not dataclasses.replace(settings_of([[1, 8, 3]]), depths=((8, 3),)).within(4, 2).depths
