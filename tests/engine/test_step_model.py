"""The step model against what was measured on an H200: rows of tests/gpu/RESULTS.md, of which few informed it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.engine.cache.kv_format import NUMBERS
from vserve.engine.describe.divide import stage_layers
from vserve.engine.describe.reading import parse_model_config, read_model_config
from vserve.engine.options.config import EngineConfig
from vserve.engine.parallel.pipeline import Stage
from vserve.engine.planning.card import CARDS, NETWORK, NVLINK4, PCIE4
from vserve.engine.planning.load import FRONT, steady
from vserve.engine.planning.setup import Setup, set_up
from vserve.engine.planning.shape import kept_weights, shape_of
from vserve.engine.planning.simulation import Answer, Ask, Simulation
from vserve.engine.planning.step_model import StepModel
from vserve.engine.weights.loader import count_parameters

from ..tiny_models import FAMILIES, tiny_config

GB = 1_000_000_000
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    },
    "Qwen3": {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "torch_dtype": "bfloat16",
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "torch_dtype": "bfloat16",
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ]},
    },
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def set_up_as(folder: Path, shape: str, card: str = "h200", **options: Any) -> Setup:
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    config = EngineConfig(str(folder), **({"max_model_len": 8192} | options))
    return set_up(0, read_model_config(folder, config), config, CARDS[card])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return set_up_as(tmp_path_factory.mktemp("model"), "8B")


def closed(setup: Setup, asks: list[Ask], concurrency: int) -> tuple[list[Answer], float]:
    """→ (answers, seconds in all) of a load of which so many run at once."""
    answers = Simulation(setup.scheduler, setup.stages).run(asks, concurrency)
    return answers, max(answer.last for answer in answers)


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


class TestDense:
    """The model on whose rows its costs were fitted. Throughput within 10 %, times to first token within 25 %."""

    def test_one_stream(self, dense: Setup) -> None:
        (answer,), _ = closed(dense, [Ask(0, 128, 256)], 1)
        assert answer.tpot * 1e3 == pytest.approx(4.19, rel=0.02)
        assert (answer.ttft + FRONT) * 1e3 == pytest.approx(8.6, rel=0.05)
        (answer,), _ = closed(dense, [Ask(0, 8000, 64)], 1)
        assert (answer.ttft + FRONT) * 1e3 == pytest.approx(194.8, rel=0.1)

    @pytest.mark.parametrize(
        ("count", "at_once", "size", "of", "measured"),
        [
            (512, 512, (1024, 128), "total", 38_535),
            (768, 256, (128, 256), "output", 20_821),
            (256, 64, (1024, 128), "total", 33_765),
            (512, 64, (2048, 64, 1920), "total", 213_464),
        ],
    )
    def test_throughput(
        self, dense: Setup, count: int, at_once: int, size: tuple[int, ...], of: str, measured: float
    ) -> None:
        answers, seconds = closed(dense, [Ask(0, *size)] * count, at_once)
        tokens = count * (size[1] if of == "output" else size[0] + size[1])
        print(f"{of} {tokens / seconds:.0f} tok/s, measured {measured}")
        assert tokens / seconds == pytest.approx(measured, rel=0.1)
        if (count, at_once) == (256, 64):
            ttft = (middle([answer.ttft for answer in answers]) + FRONT) * 1e3
            print(f"TTFT {ttft:.1f} ms, measured 78")
            assert ttft == pytest.approx(78, rel=0.25)

    def test_poisson(self, dense: Setup) -> None:
        found = steady(dense, 8.0, 1024, 128, seconds=50)
        print(f"TTFT {found.ttft(0.5) * 1e3:.1f}, {found.ttft(0.99) * 1e3:.1f} ms, TPOT {found.tpot(0.5) * 1e3:.2f} ms")
        assert found.ttft(0.5) * 1e3 == pytest.approx(29.7, rel=0.25)
        assert found.ttft(0.99) * 1e3 == pytest.approx(61.9, rel=0.25)
        assert found.tpot(0.5) * 1e3 == pytest.approx(5.3, rel=0.1)


# Of each: options, the cache among them; ms a token of one stream, output tokens a second of 256 at a time with
# 128/256, tokens a second of 512 at once with 1024/128. None: not measured.
Measured = tuple[float | None, float | None, float | None]
OTHERS = [
    ("Qwen3", {}, (2.85, 12_785, 52_593)),  # its norms are no kernels of their own since: 2.64, see planning.md
    ("gpt-oss", {}, (1.85, None, None)),
    ("8B", {"card": "h100"}, (5.528, 18_733, 34_862)),
    ("8B", {"card": "h100", "tensor_parallel_size": 2}, (3.343, 29_299, 61_681)),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("8B", {"quantization": "fp8"}, (3.007, 29_294, 56_303)),
            ("8B", {"quantization": "int4"}, (2.24, 18_366, 36_023)),
            ("Qwen3", {"quantization": "fp8", "kv_cache_memory_bytes": 29 * GB}, (2.78, 16_535, 46_419)),
        )
    ),
]


@pytest.mark.parametrize(("shape", "options", "measured"), OTHERS)
def test_other_models(tmp_path: Path, shape: str, options: dict[str, Any], measured: Measured) -> None:
    """Whose rows informed no constant, but for what docs/running/planning.md says of experts' products."""
    setup = set_up_as(tmp_path, shape, **options)
    (answer,), _ = closed(setup, [Ask(0, 128, 256)], 1)
    found, loads = [answer.tpot * 1e3], ((768, 256, (128, 256)), (512, 512, (1024, 128)))
    for expected, (count, at_once, size) in zip(measured[1:], loads, strict=True):
        if expected is not None:
            _, seconds = closed(setup, [Ask(0, *size)] * count, at_once)
            found.append(count * (size[1] if at_once == 256 else sum(size)) / seconds)
    wanted = [number for number in measured if number is not None]
    for one, other in zip(found, wanted, strict=True):
        print(f"{shape} {options}: {one:.4g} of {other:g}, {one / other - 1:+.1%}")
    assert found == [pytest.approx(number, rel=0.1) for number in wanted]


def test_quantised_weights_are_known_from_config_json_alone(tmp_path: Path) -> None:
    """Codes with their scales; on cards without kernels for them they become 16-bit numbers."""
    numbers, codes = set_up_as(tmp_path, "8B"), set_up_as(tmp_path, "8B", quantization="int4")
    assert numbers.weights == pytest.approx(16.06e9, rel=0.01)
    assert codes.weights == pytest.approx((6.98e9 * 0.57 + 2 * 2 * 128256 * 4096), rel=0.02)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["8B"] | {"quantization_config": AWQ}))
    config = EngineConfig(str(tmp_path), max_model_len=8192)
    awq = set_up(0, read_model_config(tmp_path, config), config, CARDS["h200"]).stages[0].shape.weights
    assert awq.layers.is_converted and awq.layers.item == pytest.approx((4 + 16 / 32 + 4 / 32) / 8, rel=0.001)
    mixture = set_up_as(tmp_path, "gpt-oss")
    kept = mixture.stages[0].shape.weights
    assert (kept.layers.item, kept.experts.item) == (2, 17 / 32), "of MXFP4, 4 bits and a byte for 32 of them"
    assert mixture.weights == pytest.approx(13.8e9, rel=0.05)
    older = set_up(0, read_model_config(tmp_path, config), config, CARDS["a100"])
    assert older.weights > 2.9 * mixture.weights


def test_ranks_divide_what_is_read_and_pay_for_sums(tmp_path: Path, dense: Setup) -> None:
    """Half of the layers and of the output matrix, and every rank's own embedding; two sums a layer."""
    half = set_up_as(tmp_path, "8B", tensor_parallel_size=2)
    (whole,), (part,) = dense.stages, half.stages
    assert 2 * part.shape.dense == pytest.approx(whole.shape.dense, rel=0.001)
    assert 2 * part.shape.head == whole.shape.head and part.shape.beside == whole.shape.beside
    assert 2 * part.shape.kv_bytes == whole.shape.kv_bytes and 2 * part.shape.pair_flops == whole.shape.pair_flops
    assert part.shape.num_sums == 64 and whole.sum_seconds(1, 1) == 0
    assert half.cache_tokens > 2.1 * dense.cache_tokens
    assert (
        part.sum_seconds(1, 0) == pytest.approx(64 * NVLINK4.sum_seconds(8192, 2)) == pytest.approx(64 * 2e-6, rel=0.02)
    )
    assert part.sum_seconds(4096, 0) == pytest.approx(64 * (2e-6 + 4096 * 8192 / (0.8 * 450e9)))
    assert NVLINK4.sum_seconds(8192, 4) > 9e-6 and PCIE4.sum_seconds(8192, 2) > 20e-6, "NCCL's"
    assert 0.6 < half.seconds_alone() / dense.seconds_alone() < 0.9
    hosts = StepModel(part.shape, part.card, cards=16)
    assert hosts.sum_seconds(64, 1) == part.sum_seconds(64, 1), "ranks of a stage are in one host"
    assert hosts.handing_seconds(64) == NETWORK.send_seconds(64 * 8192) > part.handing_seconds(64)
    slow = StepModel(part.shape, dataclasses.replace(part.card, link=PCIE4))
    assert (
        slow.product_seconds(4096, 1) == part.product_seconds(4096, 1) and slow.seconds_alone() > part.seconds_alone()
    )


def test_more_ranks_than_heads_of_keys_keep_as_many_each(tmp_path: Path) -> None:
    sizes = (1, 2, 8)
    shapes = [set_up_as(tmp_path, "Qwen3", tensor_parallel_size=size).stages[0].shape for size in sizes]
    assert [shape.kv_bytes // shapes[2].kv_bytes for shape in shapes] == [4, 2, 1]
    assert [shape.num_experts for shape in shapes] == [128, 128, 16], "slices of 384 gates, but of 96 whole experts"
    for size, shape in zip(sizes, shapes, strict=True):
        each = 1 if shape.num_experts < 128 else size
        assert each * shape.expert == shapes[0].expert and shape.chosen * (size if each == 1 else 1) == 8
    whole = set_up_as(tmp_path, "Qwen3", tensor_parallel_size=2, enable_expert_parallel=True).stages[0].shape
    assert (whole.num_experts, whole.expert, whole.chosen) == (64, shapes[0].expert, 4)


def test_stages_share_layers_and_the_matrices_around_them(tmp_path: Path, dense: Setup) -> None:
    """The first has the embedding, the last the output matrix; all of them have as many blocks of the cache."""
    setup = set_up_as(tmp_path, "8B", pipeline_parallel_size=3)
    shapes, (whole,) = [stage.shape for stage in setup.stages], dense.stages
    assert [bool(shape.beside) for shape in shapes] == [True, False, False]
    assert [bool(shape.head) for shape in shapes] == [False, False, True]
    assert sum(shape.num_layers for shape in shapes) == 32 and sum(shape.dense for shape in shapes) == whole.shape.dense
    assert sum(shape.kv_bytes for shape in shapes) == whole.shape.kv_bytes
    scheduler = setup.scheduler
    assert (scheduler.pipeline_parallel_size, scheduler.depth, scheduler.max_num_batched_tokens) == (3, 4, 8192 // 3)
    assert scheduler.context_cost > 0 and setup.cache_tokens > 2.8 * dense.cache_tokens
    assert setup.seconds_alone() > dense.seconds_alone()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_every_family(family: str) -> None:
    """All that the loader counts but the last norm, of the whole and of two stages; ranks have a part of them. A pool
    of no more blocks than requests can have is made, however many fit."""
    of_tiles = {"linear_key_head_dim": 16, "mamba_d_state": 16, "ssm_state_size": 16}  # as a card has them
    known = vars(tiny_config(family))
    heads = {key: size for key, size in of_tiles.items() if key in known}
    model = parse_model_config(tiny_config(family, **heads).to_dict())
    weights, parameters = kept_weights(model, torch.bfloat16), count_parameters(model)
    assert shape_of(model, weights, NUMBERS).num_weights == parameters - model.hidden_size
    parts = [Stage(index, 2, layers) for index, layers in enumerate(stage_layers(model, 2))]
    divided = [shape_of(model, weights, NUMBERS, stage=stage).num_weights for stage in parts]
    twice = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    assert sum(divided) == parameters - model.hidden_size + twice, "a tied matrix is in both"
    size = 1 if model.has_state else 2  # states are not divided over ranks
    setup = set_up(0, model, EngineConfig("m", tensor_parallel_size=size), CARDS["h200"])
    assert setup.stages[0].shape.num_weights < parameters
    assert setup.scheduler.num_blocks < 2**21 and setup.cache_tokens > 2**24
