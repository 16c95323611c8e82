"""The scales of a checkpoint for keys and values in a cache of 8 bits, under all the names that they have had."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ModelError

# compressed-tensors: self_attn.k_scale; vLLM: self_attn.attn.k_scale; ModelOpt: k_proj.k_scale; the first FP8
# checkpoints: k_proj.output_scale, and one kv_scale for both; fused: qkv_proj.k_scale.
_NAMES = (
    (re.compile(r"\.(k_scale|k_proj\.output_scale)$"), "k"),
    (re.compile(r"\.(v_scale|v_proj\.output_scale)$"), "v"),
    (re.compile(r"\.kv_scale$"), "kv"),
)
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class Checkpoint(Protocol):
    @property
    def headers(self) -> Mapping[str, object]: ...

    def read(self, name: str) -> Tensor: ...


def read_cache_scales(checkpoint: Checkpoint, heads: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Of each layer that has some: fp32 [KV] of keys and of values; `heads`: KV of each layer, of all ranks together.

    One of both stands for the other where that is missing. Raises ModelError for what cannot be a scale.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for name in checkpoint.headers:
        kind = next((kind for pattern, kind in _NAMES if pattern.search(name)), None)
        layer = _LAYER.search(name)
        if kind is None or layer is None or int(layer[1]) >= len(heads):
            continue
        found.setdefault(int(layer[1]), {})[kind] = _checked(name, checkpoint.read(name), heads[int(layer[1])])
    return {layer: _pair(scales) for layer, scales in found.items()}


def _pair(scales: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    both = scales.get("kv")
    keys, values = scales.get("k", both), scales.get("v", both)
    return (values if keys is None else keys), (keys if values is None else values)  # type: ignore[return-value]


def _checked(name: str, stored: Tensor, heads: int) -> Tensor:
    scales = stored.float().flatten()
    if len(scales) not in (1, heads):
        raise ModelError(
            f"{name} has shape {list(stored.shape)}: a scale of the cache is one number, or one for each of {heads} "
            "heads; download the checkpoint again"
        )
    wrong = next((value for value in scales.tolist() if not (math.isfinite(value) and value > 0)), None)
    if wrong is not None:
        raise ModelError(
            f"{name} is {wrong}: a scale of the cache is a number above 0; leave --kv-cache-dtype out, or correct the "
            "checkpoint"
        )
    return scales.expand(heads).to(torch.float32).contiguous()
