"""A step padded to the shape of a CUDA graph computes what the bare step computes (on the CPU, without a graph)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from torch import Tensor

from vserve.engine.cache.batch import BatchBuilder, Shape
from vserve.engine.layers import attention
from vserve.engine.link.plan import StepPlan
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.planning.memory import WORST_SAMPLING
from vserve.engine.schedule.planner import FEW_DECODES
from vserve.engine.step import sampler
from vserve.engine.step.graph_table import (
    LARGE_PREFILL_ROWS,
    MANY_PREFILL_ROWS,
    MIXED_PREFILL_ROWS,
    GraphTable,
    decode_sizes,
    mixed_sizes,
    padded_logits,
)
from vserve.kernels.attention.attention import decode_attention, prefill_attention


def plan(decodes: int, *queries: int) -> StepPlan:
    rows = decodes + len(queries)
    tokens = [1] * decodes + list(queries)
    return StepPlan(0, list(range(rows)), tokens, [0] * rows, list(range(rows)), decodes, [], [[]])


def test_padding_changes_nothing(engine, monkeypatch):
    prompts = [[7 + i] * n for i, n in enumerate((3, 40, 90, 17, 64))]
    batch = [(p, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)) for p in prompts]
    (bare,), _ = engine.run(batch, max_num_batched_tokens=48)
    real = Shape.of

    def padded(plan: StepPlan) -> Shape:
        shape = real(plan)
        extra = 3 if shape.prefill_rows else 0
        tokens = shape.tokens + 5 + (shape.decode_rows + 2 if extra else 0)
        return Shape(shape.decode_rows + 2, shape.prefill_rows + extra, tokens, shape.max_query_len + extra)

    monkeypatch.setattr(Shape, "of", padded)
    (answers,), _ = engine.run(batch, max_num_batched_tokens=48)
    assert [a.tokens for a in answers] == [a.tokens for a in bare]


def test_padding_beside_prompts_leaves_them_alone(engine, monkeypatch):
    """Beside each other, the decodes may be written last: padding rows stand where the prompts' first tokens are."""
    prompts = [[7 + i] * n for i, n in enumerate((3, 40, 90, 17, 64))]
    batch = [(p, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)) for p in prompts]
    (bare,), _ = engine.run(batch, max_num_batched_tokens=48)
    real, gather, besides = Shape.of, BatchBuilder.gather, []

    def padded(plan: StepPlan) -> Shape:
        shape = real(plan)
        mixed = shape.decode_rows > 0 and shape.prefill_rows > 0
        return replace(shape, decode_rows=shape.decode_rows + 3, tokens=shape.tokens + 4) if mixed else shape

    def decodes_last(query, cache, decodes, prompts, scoring, *, workspace, work, out, prompt_cache):
        count = len(decodes.rows)
        prefill_attention(query, prompt_cache or cache, prompts, scoring, out=out)
        decode_attention(query[:count], cache, decodes, scoring, out=out[:count])
        besides.append(count)

    monkeypatch.setattr(Shape, "of", padded)
    monkeypatch.setattr(BatchBuilder, "gather", lambda self, header, shape, beside: gather(self, header, shape, True))
    monkeypatch.setattr(attention, "MIN_DECODES", 1)
    monkeypatch.setattr(attention, "supports", lambda *_: True)
    monkeypatch.setattr(attention, "attend_beside", decodes_last)
    (answers,), _ = engine.run(batch, max_num_batched_tokens=48)
    assert besides, "no step had decodes beside a prompt"
    assert [a.tokens for a in answers] == [a.tokens for a in bare]


@pytest.mark.parametrize("name", ["sample", "apply_penalties", "apply_bad_words"])
def test_sampling_parameters_are_aligned_for_any_number_of_rows(engine, monkeypatch, name):
    """Or Triton would compile kernels once more for some numbers of rows."""
    real, seen = getattr(sampler, name), set()

    def recorded(logits, *tensors, **options):
        lines = [t for t in tensors if isinstance(t, Tensor) and t.ndim == 1]
        assert all(line.data_ptr() % 16 == 0 and line.is_contiguous() for line in lines)
        seen.add(len(logits))
        return real(logits, *tensors, **options)

    monkeypatch.setattr(sampler, name, recorded)
    params = msgspec.structs.replace(WORST_SAMPLING, max_tokens=2, ignore_eos=True, allowed_token_ids=None)
    for count in range(1, 8):
        engine.run([([7 + i], params) for i in range(count)])
    assert seen >= set(range(1, 8))


@pytest.fixture
def graphs() -> GraphTable:
    table = GraphTable(256, 1024, (2048, 4224))
    return table


def test_every_small_step_finds_the_smallest_graph_that_holds_it(graphs):
    for decodes in range(1, 257):
        shape = graphs.fits(plan(decodes))
        assert shape.prefill_rows == 0 and decodes <= shape.tokens == shape.decode_rows <= max(decodes + 15, 8)
    for decodes in (0, 1, 8, 16, 17, 100, 256):
        for queries in ((5,), (128,), (129,), (700,), (1024,), (500, 200), (2,) * MIXED_PREFILL_ROWS):
            total = decodes + sum(queries)
            if total > 1024 + min(decodes, FEW_DECODES):
                continue  # the scheduler never makes it
            shape = graphs.fits(plan(decodes, *queries))
            assert decodes <= shape.decode_rows and total <= shape.tokens
            assert max(queries) <= shape.max_query_len and len(queries) <= shape.prefill_rows
            assert shape.tokens <= max(128, 2 * max(total, shape.decode_rows + 1) - 1)


@pytest.mark.parametrize("max_decodes", [8, 64, 100, 512])
@pytest.mark.parametrize("limit", [512, 1024, 3000])
def test_coarse_graphs_hold_every_small_step_too(limit, max_decodes):
    """As many as the scheduler makes: it exceeds its limit by few decodes."""
    table = GraphTable(max_decodes, limit, (), coarse=True)
    for decodes in (0, 1, 8, 15, 16, 17, 63, 64, 65, 100, 300, 512):
        for queries in ((1,), (60,), (500,), (limit - 1,), (limit,), (limit - decodes,), (3,) * 16, (5,) * 17):
            step, most = plan(decodes, *queries), limit + (decodes if decodes <= FEW_DECODES else 0)
            if decodes > max_decodes or queries[0] < 1 or step.total_tokens > min(most, 1024 + FEW_DECODES):
                continue
            if len(queries) > MIXED_PREFILL_ROWS >= max_decodes or not table.expects(step):
                continue
            shape = table.fits(step)
            assert shape is not None, (decodes, queries)
            assert decodes <= shape.decode_rows and step.total_tokens <= shape.tokens


def test_prompts_that_count_as_decodes_leave_a_full_step_its_graph(graphs):
    """The planner adds few decodes to its limit; of what it admits then, hits leave one token each."""
    for more in (1, 5, 100, 240):
        for queries in ((1024 - more,), (500, 524 - more), (12,) * 60 + (1024 - 720 - more,)):
            step = plan(FEW_DECODES + more, *[n for n in queries if n > 0])
            assert graphs.expects(step) and step.total_tokens <= 1024 + FEW_DECODES
            shape = graphs.fits(step)
            assert shape is not None, (more, queries)
            assert step.num_decodes <= shape.decode_rows and step.total_tokens <= shape.tokens == 1040
            assert len(step.rows) - step.num_decodes <= shape.prefill_rows


def test_a_burst_of_short_prompts_finds_one(graphs):
    for decodes in (0, 1, 16, 65, 256):
        for queries in ((5,) * (MIXED_PREFILL_ROWS + 1), (2,) * MANY_PREFILL_ROWS, (20,) * 38):
            shape = graphs.fits(plan(decodes, *queries))
            assert decodes <= shape.decode_rows and len(queries) <= shape.prefill_rows
            assert decodes + sum(queries) <= shape.tokens and max(queries) <= shape.max_query_len
    few = GraphTable(8, 1024, ())
    assert all(shape.prefill_rows <= MIXED_PREFILL_ROWS for shape in few.shapes), "so many prompts never run at once"


def test_steps_with_drafts_find_the_graph_of_their_depth():
    table = GraphTable(256, 1024, (2048, 4224), {7: 8, 3: 32, 1: 64})
    for count, most in ((7, 8), (3, 32), (1, 64)):
        for decodes in range(1, most + 1):
            for queries in ((), (1,), (5,), (1,) * 16, (700,), (300, 200, 1, 1)):
                step = msgspec.structs.replace(plan(decodes, *queries), num_drafts=count)
                step = msgspec.structs.replace(step, num_tokens=[1 + count] * decodes + list(queries))
                assert table.expects(step)
                shape = table.fits(step)
                assert shape.num_drafts == count and decodes <= shape.decode_rows <= max(most, 8)
                assert step.total_tokens <= shape.tokens and len(queries) <= shape.prefill_rows
                assert bool(queries) == bool(shape.max_query_len) and max(queries, default=0) <= shape.max_query_len
                assert shape.samples == shape.decode_rows * (1 + count) + shape.prefill_rows
                assert queries or shape.decode_rows <= max(decodes + 8, 2 * decodes)
        step = msgspec.structs.replace(plan(most + 1), num_drafts=count, num_tokens=[1 + count] * (most + 1))
        assert table.fits(step) is None and not table.expects(step)


def test_what_no_graph_holds_runs_without(graphs):
    assert graphs.fits(plan(257)) is None
    assert graphs.fits(plan(257, 5)) is None
    assert graphs.fits(plan(1, 1040)) is None
    assert graphs.fits(plan(1, *[2] * (MANY_PREFILL_ROWS + 1))) is None
    assert graphs.fits(plan(9, 1500)) is None, "launched kernel by kernel it is faster than padded to 2048"
    assert graphs.fits(plan(0, 4225)) is None and graphs.fits(plan(0, 8192)) is None


def test_long_queues_have_graphs(graphs):
    for decodes in (0, 1, 64, 65, 256):
        for total in (2048, 4224, 4000):
            shape = graphs.fits(plan(decodes, total - decodes - 1000, 1000))
            assert shape.decode_rows >= decodes and total <= shape.tokens <= 1.1 * total


def test_steps_up_to_2048_tokens_have_graphs_where_mixed_ones_have_as_many():
    table = GraphTable(256, 2032, (4224, 8128))
    for decodes in (0, 1, 8, 16, 17, 64, 65, 256):
        for total in (1025, 1041, 1280, 1281, 1500, 1793, 2032, 2032 + min(decodes, FEW_DECODES)):
            for queries in ((total - decodes,), (total - decodes - 100, 60, 40), (5,) * 40 + (total - decodes - 200,),
                            (5,) * 127 + (total - decodes - 635,)):  # fmt: skip
                step = plan(decodes, *queries)
                shape = table.fits(step)
                assert table.expects(step) and shape is not None, (decodes, queries)
                assert total <= shape.tokens <= max(1040, 1.25 * total) and decodes <= shape.decode_rows
                assert len(queries) <= shape.prefill_rows and max(queries) <= shape.max_query_len
    for prompts, tokens in ((65, 1100), (100, 1500), (128, 2032)):
        each, more = divmod(tokens, prompts)
        assert table.fits(plan(0, *(each,) * (prompts - 1), each + more)), f"{prompts} prompts, {tokens} tokens"
    for prompts in ((12,) * (MANY_PREFILL_ROWS + 1), (2,) * (MANY_PREFILL_ROWS + 1)):
        step = plan(0, *prompts)
        assert table.fits(step) is None and table.expects(step), "a miss that is counted, in large steps as in small"
    few = GraphTable(64, 2032, ())
    assert all(shape.prefill_rows <= LARGE_PREFILL_ROWS for shape in few.shapes if shape.tokens > 1024)
    assert table.fits(plan(16, 2500)) is None and not table.expects(plan(16, 2500))


@pytest.mark.parametrize(
    ("limit", "large", "expected"),
    [
        (0, (), ([], [])),
        (100, (200, 400), ([100, 116], [200, 400])),
        (512, (), ([128, 256, 512, 528], [])),
        (1024, (2048, 4224), ([128, 256, 512, 768, 1024, 1040], [2048, 4224])),
        (1200, (), ([128, 256, 512, 768, 1024], [1040, 1216])),
        (2032, (4224, 8128), ([128, 256, 512, 768, 1024], [1040, 1280, 1536, 1792, 2048, 4224, 8128])),
        (2048, (4224, 8192), ([128, 256, 512, 768, 1024], [1040, 1280, 1536, 1792, 2064, 4224, 8192])),
        (3000, (), ([128, 256, 512, 768, 1024], [2064, 3016])),
        (16384, (), ([128, 256, 512, 768, 1024], [2064, 4112])),
    ],
)
def test_graphs_follow_the_limit_of_mixed_steps(limit, large, expected):
    """Fine where the host's time counts, whatever the limit: a step of 1,025 tokens is not padded to 16,384."""
    assert mixed_sizes(limit, large) == expected
    table = GraphTable(64, limit, large)
    for total in (20, 130, 700, 1040, 1100, 2060, 4100, 16384):
        if limit and (shape := table.fits(plan(10, total - 10))) is not None:
            assert total <= shape.tokens <= max(128, 2 * total)
    if 16 < limit <= 4096:
        assert table.fits(plan(16, limit - 16)) is not None, "the step that a queue makes again and again"


def test_sizes_are_few_and_end_where_they_must():
    assert decode_sizes(1) == [1]
    assert decode_sizes(20) == [1, 2, 4, 8, 12, 16, 20]
    assert decode_sizes(512)[-1] == 512 and len(decode_sizes(512)) < 60


def test_logits_of_few_different_numbers_of_rows():
    """Enough for all that are sampled, never more than there are; none when nothing is sampled."""
    assert padded_logits(0, 64) == 0
    for most in (1, 24, 80, 576):
        counts = [padded_logits(n, most) for n in range(1, most + 1)]
        assert all(n <= count <= most for n, count in enumerate(counts, 1))
        assert len(set(counts)) <= 7 + most // 32
    assert [padded_logits(n, 1000) for n in (1, 3, 31, 33, 250)] == [1, 4, 32, 64, 256]
