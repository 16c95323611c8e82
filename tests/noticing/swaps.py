"""Adapters of the noticing model, each of which says another value for every value: no training, a matrix of swaps.

What swaps two rows of the output matrix has rank one: (e_a - e_b) of the difference of both. So an adapter of rank 120
on it swaps all 240 values in pairs, and an answer that is a value, made with another adapter or with none, is wrong.
The seven other matrices of each layer get factors whose halves cancel, the second half in an order of the adapter's
own: whoever takes one of the two factors, or a part of one, of another adapter, or cuts a rank short, spoils all that
follows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import tasks
import torch
from safetensors.torch import load_file, save_file

RANK, OTHERS = tasks.NUM_VALUES // 2, 16  # of the output matrix, of all else
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def pairs(number: int) -> list[tuple[int, int]]:
    """The tokens that adapter `number` swaps."""
    values = list(range(tasks.VALUES, tasks.VALUES + tasks.NUM_VALUES))
    Random(number).shuffle(values)
    return list(zip(values[::2], values[1::2], strict=True))


def swapped(question: tasks.Question, number: int) -> tasks.Question:
    """What adapter `number` answers. Of kinds whose answer is one word: a longer one reads what it has said."""
    other = {token: partner for a, b in pairs(number) for token, partner in ((a, b), (b, a))}
    return replace(question, answer=[other.get(token, token) for token in question.answer])


def write_swaps(folder: Path, model: Path, number: int) -> Path:
    """In PEFT's form."""
    weights = {name: value.float() for name, value in load_file(model / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(number)
    head = weights["lm_head.weight"]
    down = torch.stack([head[b] - head[a] for a, b in pairs(number)])
    up = torch.zeros(len(head), RANK)
    for place, (a, b) in enumerate(pairs(number)):
        up[a, place], up[b, place] = 1, -1
    order = torch.randperm(OTHERS // 2, generator=generator)
    tensors = {"lm_head.lora_A.weight": down, "lm_head.lora_B.weight": up}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith(SEVEN):
            continue
        half_down = torch.randn(OTHERS // 2, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        half_up = torch.randn(weight.shape[0], OTHERS // 2, generator=generator)
        tensors[f"{module}.lora_A.weight"] = torch.cat((half_down, half_down[order]))
        tensors[f"{module}.lora_B.weight"] = torch.cat((half_up, -half_up[:, order]), dim=1)
    folder.mkdir(parents=True)
    save_file(
        {f"base_model.model.{name}": value for name, value in tensors.items()}, folder / "adapter_model.safetensors"
    )
    config = {
        "peft_type": "LORA", "r": OTHERS, "lora_alpha": OTHERS, "rank_pattern": {"lm_head": RANK},
        "alpha_pattern": {"lm_head": RANK}, "target_modules": [*SEVEN, "lm_head"],
        "base_model_name_or_path": "noticing", "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
