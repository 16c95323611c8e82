"""Options that were left open, filled in by model, machine and memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from vserve.engine.cache.kv_layout import KVLayout
from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ConfigError
from vserve.engine.families.layer_spec import KVSpec
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.planning.machine import Machine
from vserve.engine.planning.memory import MemoryPlan
from vserve.engine.planning.settings import Settings, resolve, step_limits
from vserve.engine.start.rank import most_tokens
from vserve.engine.step.graph_table import GraphTable
from vserve.kernels.linear import linear_hopper

CPU = Machine(torch.device("cpu"), "cpu", 0, 3)
CARD = Machine(torch.device("cuda"), "H100", 80_000_000_000, 8, codes=True)
LAYOUT = KVLayout.of([KVSpec(1, 8, 8)], 16, 1000)
SMALL_CARD = dataclasses.replace(CARD, card_bytes=24_000_000_000)


@pytest.fixture
def model(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setattr(linear_hopper, "num_processors", lambda device: 132)
    config: ModelConfig = read_folder(tiny_model("llama"))
    return config


def plan(**changed: Any) -> MemoryPlan:
    sizes = {"total": 80, "budget": 72, "weights": 16, "activations": 2, "graphs": 1, "other": 3, "cache": 50}
    return MemoryPlan(**(sizes | {"num_blocks": 101, "max_model_len": 1000, "layout": LAYOUT} | changed))


def test_a_mixture_reads_its_prompts_in_larger_steps(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, and where nobody named another size."""
    monkeypatch.setattr(linear_hopper, "num_processors", lambda device: 132)
    model = read_folder(tiny_model("mixtral"))
    for machine, options, expected in (
        (CARD, {}, (8192, 4096)),
        (SMALL_CARD, {}, (4096, 4096)),
        (CARD, {"max_mixed_tokens": 512}, (8192, 512)),
        (SMALL_CARD, {"max_num_batched_tokens": 1024}, (1024, 0)),
        (CPU, {}, (512, 0)),
    ):
        found = resolve(EngineConfig("m", load_format="dummy", **options), model, machine)
        assert (found.max_num_batched_tokens, found.max_mixed_tokens) == expected
        assert found.backlog_steps == 16, "and in large ones for longer"


@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_quantised_weights_read_prompts_in_larger_steps(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Twice those of 16 bit where they stay codes; but of a mixture its own, and where drafts are made none."""
    monkeypatch.setattr(linear_hopper, "num_processors", lambda device: 132)
    model = read_folder(tiny_model("llama"), quantization=method)
    numbers = dataclasses.replace(CARD, codes=False)
    for machine, options, expected in (
        (CARD, {}, (2032, (4224, 8128), 16)),
        (SMALL_CARD, {}, (2032, (), 16)),
        (CARD, {"max_mixed_tokens": 512}, (512, (1024, 2048), 16)),
        (CARD, {"dtype": "float32"}, (1024, (2048, 4224), 32)),
        (CARD, {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}, (1024, (2048, 4224), 32)),
        (numbers, {}, (1024, (2048, 4224), 32)),
        (CPU, {}, (0, (), 32)),
    ):
        found = resolve(EngineConfig("m", **{"load_format": "dummy", "dtype": "bfloat16"} | options), model, machine)
        assert (found.max_mixed_tokens, found.large_mixed_tokens, found.backlog_steps) == expected, options
    mixture = read_folder(tiny_model("mixtral"), quantization=method)
    assert resolve(EngineConfig("m", load_format="dummy"), mixture, CARD).max_mixed_tokens == 4096


def open_fields(resolved: Settings) -> list[str]:
    values = {spec.name: getattr(resolved, spec.name) for spec in dataclasses.fields(resolved)}
    return [name for name, value in values.items() if value is None or value == "auto"]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (CPU, (torch.float32, 512, 16, 0, ())),
        (SMALL_CARD, (torch.bfloat16, 2048, 256, 1024, (2048,))),
        (CARD, (torch.bfloat16, 8192, 1024, 1024, (2048, 4224))),
    ],
    ids=["cpu", "small card", "card"],
)
def test_what_is_left_open_follows_from_the_machine(
    model: ModelConfig, machine: Machine, expected: tuple[Any, ...]
) -> None:
    model = dataclasses.replace(model, dtype=torch.bfloat16)
    found = resolve(EngineConfig("m", load_format="dummy"), model, machine)
    tokens, seqs = found.max_num_batched_tokens, found.max_num_seqs
    assert (found.dtype, tokens, seqs, found.max_mixed_tokens, found.large_mixed_tokens) == expected
    assert found.max_model_len == model.max_model_len and found.backlog_steps == SchedulerConfig.backlog_steps
    assert not open_fields(found) and not found.reduced and not found.notices


def test_what_was_asked_for_is_what_counts(model: ModelConfig) -> None:
    asked = {
        "dtype": "float16", "max_model_len": 77, "max_num_batched_tokens": 300, "max_num_seqs": 20, "block_size": 32,
        "max_mixed_tokens": 100, "backlog_steps": 5, "max_logprobs": 3, "seed": 9, "scheduling_policy": "priority",
        "enable_prefix_caching": False, "max_cudagraph_capture_size": 7,
    }  # fmt: skip
    found = resolve(EngineConfig("m", **asked), model, CARD)
    for name, value in asked.items():
        assert getattr(found, name, getattr(found.config, name)) == (torch.float16 if name == "dtype" else value), name
    assert not resolve(EngineConfig("m", enforce_eager=True), model, CARD).uses_graphs and found.uses_graphs
    assert not resolve(EngineConfig("m"), model, CPU).uses_graphs


@pytest.mark.parametrize(("tokens", "seqs"), [(2048, 8), (1024, 4), (512, 256)])
def test_adapters_have_room_for_the_largest_graph(model: ModelConfig, tokens: int, seqs: int) -> None:
    config = EngineConfig("m", enable_lora=True, max_model_len=512, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    found = resolve(config, model, CARD)
    graphs = GraphTable(found.config.max_cudagraph_capture_size, found.mixed_step, (), coarse=True)
    assert graphs.shapes[0].tokens <= most_tokens(found)


def test_a_checkpoint_in_float32_is_served_in_bfloat16_on_a_card(model: ModelConfig) -> None:
    model = dataclasses.replace(model, dtype=torch.float32)
    assert resolve(EngineConfig("m"), model, CARD).dtype is torch.bfloat16
    assert resolve(EngineConfig("m", dtype="float32"), model, CARD).dtype is torch.float32


def test_experts_that_are_not_there_are_not_divided(model: ModelConfig, tiny_model: Any) -> None:
    config = EngineConfig("m", enable_expert_parallel=True)
    assert resolve(config, model, CPU).notices == (
        "--enable-expert-parallel changes nothing: this model has no experts",
    )
    assert not resolve(config, read_folder(tiny_model("mixtral")), CPU).notices


def test_without_chunked_prefill_a_step_takes_a_whole_prompt(model: ModelConfig) -> None:
    found = resolve(EngineConfig("m", enable_chunked_prefill=False, max_num_batched_tokens=500), model, CARD)
    assert (found.max_mixed_tokens, found.large_mixed_tokens) == (0, ())
    assert found.notices == ("max_num_seqs lowered to 500, the value of --max-num-batched-tokens",)
    assert found.fit(plan(max_model_len=500)).notices == (), "each is said once"


@pytest.mark.parametrize(
    ("options", "mixed", "large", "said"),
    [
        ({}, 1024, (2048, 4224), ""),
        ({"max_num_batched_tokens": 512}, 512, (), "at most 512 tokens, beside decodes as well"),
        ({"max_num_batched_tokens": 8192}, 8192, (), "at most 8192 tokens, beside decodes as well"),
        ({"max_num_batched_tokens": 16384}, 16384, (), "at most 16384 tokens, beside decodes as well"),
        ({"max_mixed_tokens": 256}, 256, (512, 1024), "at most 8192 tokens (--max-num-batched-tokens), 256 beside"),
        ({"max_mixed_tokens": 256}, 256, (512, 1024), "(--max-mixed-tokens), up to 1024 while many prompts wait"),
        ({"max_num_batched_tokens": 512, "max_mixed_tokens": 300}, 300, (), "512 tokens (--max-num-b"),
        (
            {"max_num_batched_tokens": 512, "max_mixed_tokens": 600},
            512,
            (),
            "at most 512 tokens, beside decodes as well",
        ),
    ],
    ids=str,
)
def test_tokens_of_a_step_that_were_named_hold_beside_decodes_too(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], mixed: int, large: tuple[int, ...],
    said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("vserve.engine.planning.settings.even_rows", lambda device, rows: {4096: 4224}.get(rows, rows))
    config = EngineConfig("m", **options)  # type: ignore[arg-type]
    found = resolve(config, model, CARD)
    assert (found.mixed_step, found.large_mixed_tokens) == (mixed, large)
    line = step_limits(config, found)
    assert (said in line) if said else line == ""
    expected = min(options.get("max_mixed_tokens", 1 << 20), options.get("max_num_batched_tokens", 512))
    assert resolve(config, model, CPU).mixed_step == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "raise the first to 9 or lower the second to 8"),
        ({"max_model_len": 10**9}, "--max-model-len 1000000000 is beyond the .* set it to"),
    ],
)
def test_contradictions(model: ModelConfig, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig("m", **options), model, CARD)  # type: ignore[arg-type]


def test_what_memory_decides(model: ModelConfig) -> None:
    model = dataclasses.replace(model, dtype=torch.bfloat16)
    asked = resolve(EngineConfig("m", load_format="dummy", max_num_seqs=9000), model, CARD)
    assert asked.max_model_len > 60
    fitted = asked.fit(plan(max_model_len=60, notices=("context cut",)))
    assert not open_fields(fitted) and fitted.notices == ("context cut",)
    expected = SchedulerConfig(
        max_model_len=60, max_num_batched_tokens=9000, max_num_seqs=9000, max_mixed_tokens=1024,
        large_mixed_tokens=asked.large_mixed_tokens, num_blocks=101, depth=2,
    )  # fmt: skip
    assert {name: getattr(fitted, name) for name in vars(expected)} == vars(expected), "as the scheduler reads them"
    info = fitted.info({"weights": 1.5}, {})
    assert info.fitted == ("max_model_len", "max_num_batched_tokens") and info.startup_seconds == {"weights": 1.5}
    assert (info.max_model_len, info.num_blocks, info.dtype, info.device) == (60, 100, "bfloat16", "H100")
    assert info.memory == {"weights": 16, "activations": 2, "graphs": 1, "other": 3, "kv_cache": 50}
    told = info.settings
    assert told["max_model_len"] == 60 and told["num_gpu_blocks_override"] == 100 and told["cpu_threads"] == 8
    assert told["dtype"] == "bfloat16" and told["kv_cache_memory_bytes"] == 50 and told["device"] == "H100"
    assert info.kv_cache["scales"] == "none" and told["seed"] == 0 and told["tensor_parallel_size"] == 1
    left = {spec for spec in dataclasses.fields(EngineConfig) if spec.name not in told}
    open_ones = {spec.name for spec in left if not spec.metadata["secret"]}
    assert len(left) > len(open_ones) and all(getattr(fitted.config, name) is None for name in open_ones), "and secrets"


def test_prompts_that_no_step_holds_are_said(model: ModelConfig) -> None:
    asked = resolve(EngineConfig("m", enable_chunked_prefill=False, max_num_batched_tokens=2000), model, CARD)
    assert not asked.fit(plan(max_model_len=2000)).notices
    (notice,) = asked.fit(plan(max_model_len=2001)).notices
    assert "prompts are limited to max_num_batched_tokens=2000; raise it to 2001" in notice


def test_the_seed_of_the_prefix_cache_reaches_the_scheduler_and_nobody_else(model: ModelConfig) -> None:
    model = dataclasses.replace(model, dtype=torch.bfloat16)
    fitted = resolve(EngineConfig("m", prefix_cache_seed="of the fleet"), model, CARD).fit(plan())
    assert fitted.prefix_cache_seed == "of the fleet"
    told = (
        fitted,
        fitted.info({}, {}),
        EngineConfig("m", prefix_cache_seed="of the fleet"),
    )
    assert "of the fleet" not in repr(told)
    assert resolve(EngineConfig("m"), model, CARD).prefix_cache_seed == ""
    with pytest.raises(ConfigError, match="--prefix-cache-seed: it is empty: give it a text, or leave it out"):
        EngineConfig("m", prefix_cache_seed="")
