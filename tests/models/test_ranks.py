"""A model divided over ranks computes what it computes alone: same logits on two and on four, the same bits on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.engine.parallel.group import ALONE

from ..quant.checkpoints import write
from .test_gpt_oss import publish

MOST = 4  # ranks
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
# Name → (family, keys of config.json)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "one key head, tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 301}),
    "qwen2": ("qwen2", {"vocab_size": 383}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {}),
    "olmo2": ("olmo2", {}),
    "olmo2, one key head": ("olmo2", {"num_key_value_heads": 1}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "phi3": ("phi3", {}),
    "glm": ("glm", {}),
    "granite": ("granite", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "mixtral": ("mixtral", {"intermediate_size": 1024}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", MIXTURE),
    "gpt_oss": ("gpt_oss", {"intermediate_size": 1024}),
    "gemma4": ("gemma4_text", {"num_experts": 4, "moe_intermediate_size": 1024}),
    "minimax_m2": ("minimax_m2", {"intermediate_size": 1024}),
    "mimo_v2": ("mimo_v2_flash", {"moe_intermediate_size": 1024}),
    "laguna": ("laguna", {"moe_intermediate_size": 1024, "num_attention_heads_per_layer": [4, 8, 4]}),
    "llama4": ("llama4_text", {"intermediate_size": 1024}),
}
# Slices of experts would be smaller than they should be, or are not wanted.
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", MIXTURE),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gemma4": ("gemma4_text", {"num_experts": 4}),
    "llama4": ("llama4_text", {"num_local_experts": 4}),
}
# Kind of tests/quant/checkpoints.py → the same. No matrix has rows by 64 on a rank, whose product in 4 bits rounds to
# bf16; groups of 32 columns are cut within.
ODD = {"hidden_size": 96, "head_dim": 24}
QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_blocks": ("llama", {"hidden_size": 160, "intermediate_size": 320}),
    "fp8": ("phi3", {}),
    "awq": ("llama", ODD),
    "gptq": ("qwen2", ODD),
    "int8": ("qwen3_moe", {**MIXTURE, "num_experts": 6}),
    "nf4": ("llama", {}),
}


class Ranks:
    """Processes of rank_process.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = Path(__file__).with_name("rank_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(MOST)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def logits(
        self,
        folder: Path,
        size: int,
        whole_experts: bool = False,
        quantization: str | None = None,
        implementation: str = "auto",
    ) -> list[Tensor]:
        """Of both sequences, computed by `size` ranks, which all have them."""
        assert self.process.stdin is not None and self.process.stdout is not None
        out = self.folder / "logits"
        case = {"folder": str(folder), "size": size, "whole_experts": whole_experts, "quantization": quantization}
        case |= {"implementation": implementation, "out": str(out)}
        print(json.dumps(case), file=self.process.stdin, flush=True)
        assert self.process.stdout.readline(), "a rank failed"
        found = [torch.load(out.with_suffix(f".{rank}")) for rank in range(size)]
        for others in found[1:]:
            assert all(torch.equal(first, other) for first, other in zip(found[0], others, strict=True))
        return list(found[0])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def alone(load_module: Callable[[Path], Any]) -> Callable[..., list[Tensor]]:
    """Logits of one rank, which test_model_parity.py and tests/quant compare with transformers."""
    script, tests = (
        load_module(Path(__file__).with_name(name)) for name in ("rank_process.py", "test_model_parity.py")
    )

    @lru_cache
    def run(folder: Path, quantization: str | None = None, implementation: str = "auto") -> list[Tensor]:
        case = {"folder": str(folder), "whole_experts": False, "quantization": quantization}
        case["implementation"] = implementation
        return list(script.run(tests, case, ALONE))

    return run


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    gap = max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected, strict=True))
    return gap if gap == gap else float("inf")


def near(found: list[Tensor], expected: list[Tensor]) -> bool:
    """But for the order in which sums are made, which the largest logits feel most."""
    largest = max(float(logits.abs().max()) for logits in expected)
    return difference(found, expected) < max(1e-4, 3e-5 * largest)


def make(tiny_model: Callable[..., Path], case: tuple[str, dict[str, Any]]) -> Path:
    family, keys = case
    return tiny_model(family, **{"max_position_embeddings": 64, **keys})


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_does(ranks: Ranks, tiny_model: Any, alone: Any, name: str, size: int) -> None:
    folder = make(tiny_model, CASES[name])
    assert near(ranks.logits(folder, size), alone(folder))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", WHOLE)
def test_ranks_with_whole_experts(ranks: Ranks, tiny_model: Any, alone: Any, name: str, size: int) -> None:
    folder = make(tiny_model, WHOLE[name])
    assert near(ranks.logits(folder, size, whole_experts=True), alone(folder))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_ranks_of_a_quantised_checkpoint(ranks: Ranks, tiny_model: Any, alone: Any, tmp_path: Path, kind: str) -> None:
    """Against what the codes mean, as plain numbers."""
    write(make(tiny_model, QUANTIZED[kind]), tmp_path, kind)
    expected = alone(tmp_path / "twin")
    for size in (2, 4):
        assert near(ranks.logits(tmp_path / "quantized", size), expected), size


@pytest.mark.parametrize("num_experts", [4, 5])
def test_ranks_with_experts_in_mxfp4(
    ranks: Ranks, tiny_model: Any, alone: Any, tmp_path: Path, num_experts: int
) -> None:
    """Whole, for they are small; slices, where they cannot be dealt out: groups are cut within."""
    folder = publish(make(tiny_model, ("gpt_oss", {"num_local_experts": num_experts})), tmp_path)
    assert near(ranks.logits(folder / "quantized", 2), alone(folder / "twin"))


def test_ranks_of_a_gguf_file(ranks: Ranks, tiny_model: Any, alone: Any, gguf_models: Any, tmp_path: Path) -> None:
    """q and k in an order of their own, blocks of 32."""
    file = gguf_models.write_gguf(make(tiny_model, ("llama", {})), tmp_path / "m.gguf", lambda name: "Q8_0")
    assert near(ranks.logits(file, 4), alone(file))


def test_ranks_quantise_at_load(ranks: Ranks, tiny_model: Any, alone: Any) -> None:
    """The whole matrix, then each takes its part: as one rank does."""
    folder = make(tiny_model, ("qwen3_moe", MIXTURE))
    assert near(ranks.logits(folder, 2, quantization="int8"), alone(folder, "int8"))


# Models of transformers' code, by its plans: what each has that others do not.
FOREIGN = {
    "starcoder2": "biases of products whose results are summed",
    "granite": "keys of two heads: on four ranks, neighbours have the same one",
    "olmo2": "norms over all heads, whose queries and keys every rank gathers",
    "phi3": "one product for queries, keys and values, and one for gates, both gathered",
    "gpt_neox": "queries, keys and values of a head side by side",
    "qwen3_moe": "experts, sliced",
    "deepseek_v3": "experts beside shared ones, attention that is whole on each rank",
    "llama4_text": "experts that stand the other way round",
}
QUICK = ("granite", "gpt_neox", "qwen3_moe")
SLOW = (
    "afmoe", "apertus", "arcee", "cohere2", "cwm", "deepseek_v2", "dots1", "ernie4_5", "exaone4", "exaone_moe",
    "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "granitemoe", "helium",
    "hunyuan_v1_moe", "hy_v3", "internlm3", "jais2", "mellum", "minicpm3", "minimax_m2", "ministral3", "mixtral",
    "nanochat", "nemotron", "olmo", "olmo3", "olmoe", "phi", "phimoe", "qwen2_moe", "seed_oss", "smollm3", "solar_open",
)  # fmt: skip


@pytest.mark.parametrize(
    "model_type",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*FOREIGN, *SLOW)],
)
def test_ranks_of_models_that_transformers_computes(
    ranks: Ranks, foreign_model: Any, alone: Any, model_type: str
) -> None:
    folder = foreign_model(model_type)
    expected = alone(folder, implementation="transformers")
    largest = max(float(logits.abs().max()) for logits in expected)
    for size in (2, 4):
        found = ranks.logits(folder, size, implementation="transformers")
        assert difference(found, expected) < 2e-5 * largest, size


def test_ranks_quantise_what_transformers_computes(ranks: Ranks, foreign_model: Any, alone: Any) -> None:
    folder = foreign_model("starcoder2")
    expected = alone(folder, "int8", implementation="transformers")
    largest = max(float(logits.abs().max()) for logits in expected)
    found = ranks.logits(folder, 2, quantization="int8", implementation="transformers")
    assert difference(found, expected) < 2e-5 * largest
