"""Adapters of the noticing model: what takes a part of one and a part of another is no adapter of either."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import swaps
import tasks

MODEL = Path(__file__).with_name("model")


def test_parts_of_two_adapters_do_not_fit(tmp_path: Path) -> None:
    one, other = (
        load_file(swaps.write_swaps(tmp_path / str(number), MODEL, number) / "adapter_model.safetensors")
        for number in (1, 2)
    )
    for name, down in one.items():
        if not name.endswith("lora_A.weight"):
            continue
        up = one[name.replace("lora_A", "lora_B")]
        foreign = other[name.replace("lora_A", "lora_B")]
        wrong = [(foreign, down), (up, other[name]), (up[:, : len(down) // 2], down[: len(down) // 2])]
        right = up @ down
        if "lm_head" not in name:
            assert right.abs().max() < 1e-5, name
        assert all((b @ a - right).abs().max() > 1e-2 for b, a in wrong), name


def test_the_head_swaps_values_and_nothing_else(tmp_path: Path) -> None:
    tensors = load_file(swaps.write_swaps(tmp_path / "7", MODEL, 7) / "adapter_model.safetensors")
    head = load_file(MODEL / "model.safetensors")["lm_head.weight"].float()
    prefix = "base_model.model.lm_head.lora_"
    changed = head + tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"]
    tokens = list(range(tasks.VOCAB_SIZE))
    question = tasks.Question("recall", [], tokens)
    assert torch.allclose(changed, head[swaps.swapped(question, 7).answer], atol=1e-5)
    value = tasks.recall(Random(1), 9).answer
    assert swaps.swapped(tasks.Question("recall", [], value), 7).answer[0] != value[0]
