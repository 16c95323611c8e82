"""Memory on a GPU, planned with made-up numbers: no GPU is needed to add and subtract. And on the CPU."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vserve.engine.planning.memory as cpu_memory
import vserve.engine.planning.memory as memory_module
import vserve.engine.step.runner as runner_module
from vserve.engine.cache.kv_layout import KVLayout
from vserve.engine.cache.rows import RowTables
from vserve.engine.describe.reading import parse_model_config
from vserve.engine.errors import ConfigError
from vserve.engine.families.layer_spec import KVSpec
from vserve.engine.options.config import EngineConfig
from vserve.engine.planning.memory import MemoryPlan, plan_memory
from vserve.engine.planning.state_slots import StateSlots
from vserve.engine.quant.weights import Placement
from vserve.engine.start.engine import Engine
from vserve.engine.step.device_cache import DeviceCache

GIB = 1 << 30
BLOCK = 16 * 128 * 1024  # bytes: 16 tokens of an 8B model
TOKENS = 16 * 4  # bytes beside a block


class Card:
    """80 GiB, of which the context's row tables and 20 GiB are taken."""

    block_size, max_num_seqs, draft_depths = 16, 1024, ()
    device = SimpleNamespace(type="cuda")
    model = SimpleNamespace(
        parameters=list, place=Placement(torch.bfloat16, torch.device("cuda")),
        config=parse_model_config({"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8}),
    )  # fmt: skip
    adapters = model_drafter = states = None
    seeing: Any = None
    is_last = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.layout = KVLayout.of([KVSpec(8, 128, 128)] * 32, 16, max_model_len)
        assert self.layout.block_bytes(2) == BLOCK
        free = 60 * GIB - self.row_bytes(max_model_len)
        for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2 * GIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * GIB))

    @property
    def cache(self) -> Card:
        return self

    def scratch_bytes(self, item: int) -> int:
        return 0

    def prompt_page_bytes(self, item: int) -> int:
        return 0

    def row_bytes(self, max_model_len: int) -> int:
        return DeviceCache.row_bytes(self, max_model_len)  # type: ignore[arg-type]

    def dummy_step(self, *_: object, **__: object) -> None: ...


def planned(card: Card, **options):
    config = EngineConfig("model", gpu_memory_utilization=0.9, **options)
    return plan_memory(card, config, torch.bfloat16, 8192)  # type: ignore[arg-type]


def test_features_of_pictures_have_room_beside_the_cache(monkeypatch) -> None:
    """And the largest one is looked at while the step is measured."""
    card, calls = Card(monkeypatch, 8192), []
    without = planned(card)
    card.seeing = SimpleNamespace(cache_bytes=3 * GIB, warm_up=lambda: calls.append(1))
    plan = planned(card)
    assert calls == [1] and plan.pictures == 3 * GIB
    assert without.cache - plan.cache == pytest.approx(3 * GIB, abs=2 * BLOCK)
    assert "encoder cache" in plan.table() and "encoder cache" not in without.table()
    assert plan.needed + plan.cache <= plan.budget


def test_a_context_that_is_cut_gives_back_its_rows(monkeypatch) -> None:
    """What the cache has, and the narrower tables, fill the card: not a block more would fit, and none is wasted."""
    card = Card(monkeypatch, 1 << 20)
    plan = planned(card)
    room = int(80 * GIB * 0.9) - 2 * GIB - 20 * GIB
    assert plan.max_model_len == (plan.num_blocks - 1) * 16 < 1 << 20
    needed = plan.num_blocks * (BLOCK + TOKENS) + card.row_bytes(plan.max_model_len)
    assert needed <= room < needed + BLOCK + TOKENS + card.row_bytes(16)
    assert plan.num_blocks * BLOCK + plan.needed == needed + 22 * GIB, "the table of the plan adds up"
    fixed = (room - card.row_bytes(1 << 20)) // (BLOCK + TOKENS)
    assert plan.num_blocks > fixed + 50, "MiB of it"
    with pytest.raises(ConfigError, match=f"set --max-model-len {plan.max_model_len} or less"):
        planned(card, max_model_len=1 << 20)


@pytest.mark.parametrize("context", [8192, 100_000])
def test_a_context_that_fits_is_left_as_it_is(monkeypatch, context) -> None:
    card = Card(monkeypatch, context)
    plan = planned(card)
    assert plan.max_model_len == context and not plan.notices
    room = int(80 * GIB * 0.9) - 2 * GIB - 20 * GIB - card.row_bytes(context)
    assert plan.num_blocks == room // (BLOCK + TOKENS)


def test_what_is_named_is_taken_at_its_word(monkeypatch) -> None:
    card = Card(monkeypatch, 1 << 20)
    assert planned(card, num_gpu_blocks_override=100).num_blocks == 101
    assert planned(card, kv_cache_memory_bytes=GIB).num_blocks == GIB // BLOCK


def test_old_rows_are_gone_before_new_ones_are_made(tiny_model, monkeypatch) -> None:
    engine = Engine(
        EngineConfig(
            str(tiny_model("llama")), device="cpu", cpu_threads=1, max_model_len=256, num_gpu_blocks_override=32
        ),
        lambda _: None,
    )
    runner, made = engine.rank.runner, []
    graphs = runner.plan_graphs(8, 16, ())
    old = [weakref.ref(runner.tables), weakref.ref(runner.tables.block_tables[0])]

    def make(*args) -> RowTables:
        made.append([gone() for gone in old] == [None, None])
        return RowTables(*args)

    monkeypatch.setattr(runner_module, "RowTables", make)
    runner.make_rows(64)
    assert made == [True] and graphs.shapes()
    assert sum(t.numel() * t.element_size() for t in runner.tables.block_tables) == runner.cache.row_bytes(64)


def on_cpu(folder, **options) -> Engine:
    return Engine(EngineConfig(str(folder), device="cpu", cpu_threads=1, **options), lambda _: None)


@pytest.mark.parametrize(
    "options, remedy",
    [
        (
            {"kv_cache_memory_bytes": 900 * 10**9},
            r"--kv-cache-memory-bytes 900000000000 does not fit: .* set it to \d+",
        ),
        ({"num_gpu_blocks_override": 10**8}, r"--num-gpu-blocks-override 100000000 does not fit: .* set it to \d+"),
        ({"max_num_seqs": 10**8}, r"100000000 running requests .* do not fit: .* set --max-num-seqs \d+ or less"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_cpu_refuses_what_its_memory_does_not_hold(tiny_model, options, remedy) -> None:
    with pytest.raises(ConfigError, match=remedy):
        on_cpu(tiny_model("llama"), **options)


def test_the_remedy_for_too_many_rows_fits(tiny_model, monkeypatch) -> None:
    """512 MiB, of which rows and steps would take more before the cache has any."""
    monkeypatch.setattr(cpu_memory, "machine_bytes", lambda: 512 << 20)
    with pytest.raises(ConfigError, match="--max-num-seqs") as refused:
        on_cpu(tiny_model("llama"), max_num_seqs=1_000_000)
    most = int(str(refused.value).split("set --max-num-seqs ")[1].split()[0])
    engine = on_cpu(tiny_model("llama"), max_num_seqs=most)
    assert 10_000 < most == engine.info.max_num_seqs


@pytest.mark.parametrize("option", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_the_remedy_for_too_large_a_cache_leaves_room_for_others(option, tiny_model, monkeypatch) -> None:
    for module in (cpu_memory, memory_module):
        monkeypatch.setattr(module, "machine_bytes", lambda: 512 << 20)
    with pytest.raises(ConfigError, match="does not fit") as refused:
        on_cpu(tiny_model("llama"), **{option: 10**10})
    most = int(str(refused.value).split("set it to ")[1].split()[0])
    taken = sum(on_cpu(tiny_model("llama"), **{option: most}).info.memory.values())
    assert 0.85 < taken / (512 << 20) <= 0.9


@pytest.mark.parametrize(
    ("weights", "remedy"),
    [(50, "set it to 39"), (92, "set it to 7"), (99, "lower --max-num-seqs or --max-num-batched-tokens")],
)
def test_what_is_left_beside_large_weights(weights: int, remedy: str) -> None:
    """A tenth for others where there is as much; and no advice of a cache that nobody's request fits."""
    layout = KVLayout.of([KVSpec(1, 8, 8)], 16, 32)
    page = layout.page_bytes
    each = 1000 - page  # bytes of a block, which are a thousand with its tokens
    plan = MemoryPlan(100_000, 100_000, weights * 1000, 0, 0, 20 * page, 20 * each, 20, 32, layout)
    said = memory_module._too_large(EngineConfig("m", num_gpu_blocks_override=19), plan, each)
    assert remedy in said, said  # one block is nobody's


def test_the_plan_on_the_cpu_counts_rows_and_steps(tiny_model) -> None:
    engine = on_cpu(tiny_model("llama"), max_num_seqs=5000, max_model_len=256, num_gpu_blocks_override=64)
    tables, memory = engine.rank.runner.tables, engine.info.memory
    history, counts = tables.history, [tables.num_computed, tables.num_proposed]
    made = [history.pages, history.recent, tables.params, *counts, *tables.block_tables]
    rows = sum(t.numel() * t.element_size() for t in made)
    assert rows <= memory["other"] <= rows * 1.05
    logits = 5000 * engine.rank.runner.model.config.vocab_size * 4
    assert logits < memory["activations"] < 10 * logits


WINDOWS = {
    "use_sliding_window": True, "sliding_window": 20, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip


def test_windows_make_room_for_longer_contexts(tiny_model, caplog) -> None:
    """Of the same bytes; and what is told is what was counted."""
    caplog.set_level("INFO", "vserve.engine.start.rank")
    options = {"kv_cache_memory_bytes": 400_000, "max_num_batched_tokens": 32}
    token = 2 * 2 * 16 * 4  # bytes of a layer
    every = on_cpu(tiny_model("qwen3", num_hidden_layers=6), **options)
    assert every.info.max_model_len == every.info.num_kv_tokens == (400_000 // (16 * 6 * token) - 1) * 16 == 240
    engine = on_cpu(tiny_model("qwen3", **WINDOWS), **options)
    info, layout = engine.info, engine.rank.runner.layout
    assert engine.settings.windows == layout.windows == (0, 20, 20)
    assert info.memory["kv_cache"] == (info.num_blocks + 1) * 16 * 2 * token <= 400_000
    assert info.max_model_len == 512, "all of it, in the bytes that held less than half"
    # 32 blocks of the full layers, and of each group with windows the 19 tokens before a token and that token: 3
    assert info.num_kv_tokens == info.num_blocks * 512 // 38
    assert "2 layers keep all tokens, 4 layers keep the last 20 tokens; " in caplog.text
    assert f"{info.num_blocks} blocks of 16 = {info.num_kv_tokens} tokens" in caplog.text
    caches = {layer.cache.keys.data_ptr() for layer in engine.rank.runner.model.attention_layers()}
    assert len(caches) == 2, "three layers share each"
    assert [layer.group for layer in engine.rank.runner.model.attention_layers()] == [1, 1, 0, 2, 2, 0]


def test_what_windows_need_while_a_prompt_is_read_is_counted(tiny_model) -> None:
    """A step's tokens are kept beside the window: with larger steps the same cache holds shorter requests."""
    folder, longest = tiny_model("qwen3", **WINDOWS), []
    for tokens in (32, 256):
        longest.append(on_cpu(folder, num_gpu_blocks_override=30, max_num_batched_tokens=tokens).info.max_model_len)
    assert longest == [(30 - 2 * 5) * 16, 30 // 3 * 16]
    with pytest.raises(ConfigError, match="--max-model-len 200 does not fit: the KV cache holds 160 tokens"):
        on_cpu(folder, num_gpu_blocks_override=30, max_num_batched_tokens=256, max_model_len=200)
    served = on_cpu(tiny_model("mistral", sliding_window=20), num_gpu_blocks_override=30, max_num_batched_tokens=64)
    assert served.info.max_model_len == 512 and served.info.num_kv_tokens > 30 * 16


def test_all_ranks_have_the_slots_that_the_fewest_have_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One scheduler hands them out. The numbers of the table are those of the rank with the least room."""
    mine = MemoryPlan(80, 72, 20, 5, 1, 2, 30, 100, 64, KVLayout.of([KVSpec(8, 128, 128)], 16, 64))
    mine = dataclasses.replace(mine, states=StateSlots(10, 8, 20))
    others = iter([[[90, 80, 72, 30, 5, 1, 2, 0, 20]], [[6, 30, 12]]])
    monkeypatch.setattr(memory_module, "gather", lambda world, device, numbers: [numbers, *next(others)])
    stage = SimpleNamespace(count=1)
    runner = SimpleNamespace(
        cache=SimpleNamespace(states=object()), device=torch.device("cpu"),
        model=SimpleNamespace(place=SimpleNamespace(stage=stage)),
    )  # fmt: skip
    plan = memory_module._tightest(runner, SimpleNamespace(size=2), mine)
    assert plan.states == StateSlots(12, 6, 20) and plan.num_blocks == 90 and plan.tightest.startswith("rank 1")
