"""Over how many ranks models can be divided, by config.json alone; and how much of one a rank has."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vserve.engine.describe.divide import check_divides, more_ranks, more_stages, whole_experts
from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import parse_model_config, read_folder
from vserve.engine.errors import ModelError
from vserve.engine.options.config import EngineConfig
from vserve.engine.parallel.group import SingleGroup
from vserve.engine.planning.memory import _ranks, weight_bytes
from vserve.engine.quant.weights import Placement, vocab_share
from vserve.engine.weights.loader import count_parameters, load_model, make_model

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 2,
    "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 2,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "torch_dtype": "bfloat16",
}  # fmt: skip


def config(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config({**raw, **changes})


@pytest.mark.parametrize(
    ("raw", "sizes"),
    [(QWEN_7B, [1, 2, 4]), (LLAMA_70B, [1, 2, 4, 8, 16, 32, 64]), (QWEN_30B_A3B, [1, 2, 4, 8, 16, 32])],
)
def test_sizes(raw: dict[str, Any], sizes: list[int]) -> None:
    """Query heads divide, key heads too, or some ranks have the same ones."""
    found = []
    for size in range(1, 65):
        try:
            check_divides(config(raw), size)
            found.append(size)
        except ModelError as error:
            assert str(error).startswith(f"--tensor-parallel-size {size}: ") and "\n" not in str(error)
            assert f"take one of {', '.join(map(str, sizes))}, or --data-parallel-size {size}" in str(error)
    assert found == sizes


@pytest.mark.parametrize(
    ("raw", "changes", "size", "said"),
    [
        (
            QWEN_7B,
            {},
            7,
            "28 attention heads over 4 of keys and values cannot be divided over 7 ranks: take one of 1,",
        ),
        (LLAMA_70B, {"intermediate_size": 28673}, 2, "an MLP of 28673 cannot be divided over 2 ranks: leave it out"),
        (QWEN_30B_A3B, {"num_experts": 127, "moe_intermediate_size": 767}, 2, "127 experts of 767 cannot be divided"),
        (LLAMA_70B, {"vocab_size": 11}, 4, "a vocabulary of 11 cannot be divided over 4 ranks: take one of 1, 2, or"),
    ],
)
def test_what_does_not_divide_is_named(raw: dict[str, Any], changes: dict[str, Any], size: int, said: str) -> None:
    with pytest.raises(ModelError) as error:
        check_divides(config(raw, **changes), size)
    assert said in str(error.value)


def test_whole_experts_that_do_not_divide() -> None:
    odd = config(QWEN_30B_A3B, num_experts=127)
    check_divides(odd, 2)
    with pytest.raises(ModelError, match=r"127 whole experts \(--enable-expert-parallel\) cannot be divided over 2"):
        check_divides(odd, 2, expert_parallel=True)


def test_what_reads_both_ways_is_refused() -> None:
    both_ways = replace(config(LLAMA_70B), causal=False)
    check_divides(both_ways, 1)
    with pytest.raises(ModelError, match="LlamaForCausalLM reads texts both ways, which is not divided over ranks"):
        check_divides(both_ways, 2)


def test_the_folder_tells_without_torch(tmp_path: Path) -> None:
    """So that it is said before weights are read, and before seconds of imports."""
    script = (
        "import sys; from pathlib import Path; from vserve.engine.errors import ModelError\n"
        "from vserve.engine.describe.reading import check_model\n"
        "try: check_model(Path(sys.argv[1]), size=int(sys.argv[2]))\n"
        "except ModelError as error: print(error)\n"
        "assert 'torch' not in sys.modules"
    )

    def said(raw: dict[str, Any], size: int) -> str:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        command = [sys.executable, "-c", script, str(tmp_path), str(size)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert said(LLAMA_70B, 8) == ""
    assert "64 attention heads over 8 of keys and values cannot be divided over 6 ranks" in said(LLAMA_70B, 6)
    foreign = LLAMA_70B | {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"}
    assert said(foreign, 6) == "", "only transformers can tell"


# Model type → ranks, and what is said
FOREIGN: dict[str, tuple[int, dict[str, int], str]] = {
    "stablelm": (2, {}, "StableLmForCausalLM is computed by transformers' code, and transformers has no plan to"),
    "mimo_v2_flash": (2, {}, "transformers' plan divides model.layers.1.self_attn.sinks, which is no product"),
    "starcoder2": (4, {"intermediate_size": 98}, "98 rows of model.layers.0.mlp.c_fc cannot be divided over 4 ranks"),
    "granite": (
        8,
        {},
        "4 attention heads over 2 of keys and values cannot be divided over 8 ranks: take one of 1, 2, ",
    ),
}


@pytest.mark.parametrize("model_type", FOREIGN)
def test_what_transformers_does_not_divide_is_named(foreign_model: Callable[..., Path], model_type: str) -> None:
    size, changes, said = FOREIGN[model_type]
    described = read_folder(foreign_model(model_type, **changes), implementation="transformers")
    check_divides(described, 1)
    with pytest.raises(ModelError, match=f"--tensor-parallel-size {size}: .*{said}"):
        check_divides(described, size)


def test_code_that_does_not_go_along_with_its_plan(foreign_model: Callable[..., Path]) -> None:
    """Norms of each head's own, of which a rank has all, and too few heads for them."""
    described = read_folder(foreign_model("cohere"), implementation="transformers")
    check_divides(described, 2)
    with pytest.raises(ModelError, match="CohereForCausalLM, which transformers has, does not go along with its own"):
        make_model(described, Placement(torch.float32, torch.device("meta"), SingleGroup(0, 2)), 64)


def test_experts_of_transformers_are_slices(foreign_model: Callable[..., Path]) -> None:
    described = read_folder(foreign_model("qwen3_moe"), implementation="transformers")
    whole, half = (count_parameters(described, size) for size in (1, 2))
    assert 0.5 < half / whole < 0.6, "the embedding, norms and routers are whole on each"
    with pytest.raises(ModelError, match="--enable-expert-parallel: the experts of Qwen3MoeForCausalLM, which"):
        check_divides(described, 2, expert_parallel=True)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("vocab", [301, 32000, 50257, 128256, 151936])
def test_shares_of_a_vocabulary(vocab: int, size: int) -> None:
    place = [Placement(torch.float32, torch.device("meta"), SingleGroup(rank, size)) for rank in range(size)]
    spans = [one.vocab_span(vocab) for one in place]
    assert [row for start, count in spans for row in range(start, start + count)] == list(range(vocab))
    assert all(count > 0 for _, count in spans) and all(count == vocab_share(vocab, size) for _, count in spans[:-1])
    assert vocab < 32000 or spans[0][1] % 64 == 0


@pytest.mark.parametrize(
    ("experts", "inner", "size", "quantised", "wanted", "whole"),
    [
        (128, 768, 2, False, False, False),
        (128, 768, 2, True, False, False),  # 3 blocks of 128
        (128, 768, 4, False, False, True),  # 192 would be thin
        (128, 768, 2, False, True, True),
        (8, 14336, 8, True, False, False),
        (32, 2880, 2, True, False, True),  # 11.25 blocks
        (32, 2880, 2, False, False, False),
        (60, 1408, 8, False, False, False),  # 60 do not divide
        (128, 768, 1, False, True, False),
    ],
)  # fmt: skip
def test_slices_or_whole_experts(
    experts: int, inner: int, size: int, quantised: bool, wanted: bool, whole: bool
) -> None:
    assert whole_experts(experts, inner, size, quantised, wanted) is whole


@pytest.mark.parametrize("raw", [QWEN_7B, LLAMA_70B, QWEN_30B_A3B])
@pytest.mark.parametrize("tied", [False, True])
def test_what_a_rank_has(raw: dict[str, Any], tied: bool) -> None:
    """All of the embedding, of norms and routers, its part of the rest; keys of a head that it shares."""
    model = config(raw, tie_word_embeddings=tied)
    whole, table = count_parameters(model), raw["vocab_size"] * raw["hidden_size"]
    head = 0 if tied else table
    small = 1 << 20  # norms, routers, and a vocabulary's last rows
    for size in (2, 4):
        part = count_parameters(model, size)
        assert abs(part - (table + head / size + (whole - table - head) / size)) < small
    assert count_parameters(model, 4, whole_experts=True) == count_parameters(model, 4)


def test_the_cache_of_a_rank() -> None:
    """It has the heads of its queries; where there are fewer than ranks, two ranks keep the same one."""
    for size, heads in ((1, 8), (2, 4), (8, 1), (16, 1)):
        place = Placement(torch.bfloat16, torch.device("meta"), SingleGroup(0, size))
        assert {spec.num_kv_heads for spec in make_model(config(LLAMA_70B), place, 1).kv_specs()} == {heads}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(("family", "keys"), [("llama", {"tie_word_embeddings": True}), ("gpt_oss", {}), ("olmo2", {})])
def test_what_a_rank_takes_is_what_was_counted(
    tiny_model: Callable[..., Path], family: str, keys: dict[str, Any], load_format: str
) -> None:
    folder = tiny_model(family, **keys)
    told, found = read_folder(folder), []
    for rank in range(2):
        model = load_model(
            folder, told, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64, load_format=load_format,
            group=SingleGroup(rank, 2), admit=lambda parameters, stored: found.append((parameters, stored)),
        )  # fmt: skip
        if rank == 0:
            assert weight_bytes(model) == 4 * found[0][0] == pytest.approx(found[0][1] or 4 * found[0][0], rel=1e-3)
    assert found[0] == found[1] and found[0][0] < count_parameters(told)


def test_random_weights_of_ranks_differ_where_they_are_divided(tiny_model: Callable[..., Path]) -> None:
    """And are the same where every rank has them."""
    folder = tiny_model("qwen3_moe", num_experts=4)
    ranks = [
        load_model(
            folder, read_folder(folder), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64,
            load_format="dummy", group=SingleGroup(rank, 2),
        )
        for rank in range(2)
    ]  # fmt: skip
    for name, weight in ranks[0].named_parameters():
        other = ranks[1].get_parameter(name)
        alike = "norm" in name or "router" in name or name.startswith("embedding")
        assert (weight.shape == other.shape and torch.equal(weight, other)) == alike, name


def test_what_more_ranks_bring() -> None:
    """Half of the weights leave room, and a token takes half; unless keys are fewer than ranks, or whole on each."""
    llama, latent = config(LLAMA_70B), parse_model_config(DEEPSEEK)
    assert more_ranks(llama, 1, 140, 20, False) == (2, 9.0, 90)
    assert more_ranks(llama, 8, 20, 20, False) == (16, 1.5, 30), "eight heads of keys"
    assert more_ranks(config(QWEN_7B), 4, 100, 10, False) == (0, 0.0, 0), "no more than four"
    assert more_ranks(config(QWEN_7B), 2, 100, -10, False) == (4, 0.0, 40), "a cache that has no room yet"
    assert more_ranks(config(QWEN_7B), 2, 100, -60, False) == (0, 0.0, 0), "nor then"
    assert more_ranks(latent, 1, 100, 50, False) == (2, 2.0, 100), "latent keys"


def test_what_more_stages_bring() -> None:
    """Each has its share of the layers, and of every token's cache."""
    qwen = config(QWEN_7B, num_hidden_layers=28)
    assert more_stages(qwen, 1, 100, 10) == (2, 12.0, 60)
    assert more_stages(qwen, 2, 60, 20) == (3, 3.0, 40)
    assert more_stages(qwen, 1, 100, -60) == (3, 0.0, 7), "two would have no room yet"
    assert more_stages(qwen, 28, 100, 10) == (0, 0.0, 0), "no more than there are layers"
    assert more_stages(replace(qwen, causal=False), 1, 100, 10) == (0, 0.0, 0)


def test_memory_that_is_not_enough_names_more_stages_where_it_cannot_be_divided() -> None:
    runner: Any = SimpleNamespace(model=SimpleNamespace(config=config(QWEN_7B)))
    gib, asked = 1 << 30, EngineConfig("m", tensor_parallel_size=4)
    assert _ranks(runner, asked, 10 * gib, 5 * gib) == (
        ", or set --pipeline-parallel-size 2 (the cache then holds about 4.0 times as much)"
    )
    drafts = '{"model": "d", "num_speculative_tokens": 1}'
    drafting = EngineConfig("m", tensor_parallel_size=4, speculative_config=drafts)
    assert _ranks(runner, drafting, 10 * gib, 5 * gib) == "", "who drafts beside a whole model only"


def test_memory_that_is_not_enough_names_more_ranks() -> None:
    runner: Any = SimpleNamespace(model=SimpleNamespace(config=config(LLAMA_70B)))
    gib, asked = 1 << 30, EngineConfig("m", tensor_parallel_size=2)
    assert _ranks(runner, asked, 70 * gib, -5 * gib) == (
        ", or set --tensor-parallel-size 4 (30.00 GiB a card for the cache)"
    )
    assert _ranks(runner, asked, 70 * gib, 5 * gib) == (
        ", or set --tensor-parallel-size 4 (the cache then holds about 16.0 times as much)"
    )
