"""Numbers that every rank must know of every other, told through their group."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError
from ..parallel.group import Group, gather

if TYPE_CHECKING:
    from ..planning.settings import Settings

# What decides how many steps, collectives and graphs there are, and how large.
DECISIVE = (
    "dtype", "max_model_len", "block_size", "max_num_batched_tokens", "max_num_seqs", "max_mixed_tokens",
    "large_mixed_tokens", "enforce_eager", "max_cudagraph_capture_size", "pipeline_parallel_size",
    "pipeline_layer_partition",
)  # fmt: skip


def union(group: Group, device: torch.device, numbers: Collection[int]) -> list[int]:
    """What any rank has given, in order; numbers: from 0 on. Every rank has to call it."""
    if group.size == 1:
        return sorted(set(numbers))
    if not (most := max(count for (count,) in gather(group, device, [len(numbers)]))):
        return []
    padded = gather(group, device, [*numbers, *[-1] * (most - len(numbers))])
    return sorted({number for found in padded for number in found if number >= 0})


def check_equal(group: Group, settings: Settings) -> None:
    """Raises ConfigError where another rank has resolved the options otherwise: it would wait for steps that never
    come. Cards of different sizes do."""
    values = {**vars(settings.config), **vars(settings)}
    lines = [*(f"{name} {values[name]}" for name in DECISIVE), version("torch"), version("triton")]
    mine = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
    found = [numbers[0] for numbers in gather(group, settings.device, [mine])]
    if others := [rank for rank, number in enumerate(found) if number != found[0]]:
        raise ConfigError(
            f"rank {others[0]} has come to other limits than rank 0, as cards of different sizes make it: name "
            "--max-model-len, --max-num-batched-tokens and --max-num-seqs, or use cards of one kind"
        )
