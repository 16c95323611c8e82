"""What the weights of who drafts will take in memory: known from headers, before any are read."""

from __future__ import annotations

from math import prod

import torch

from ..describe.model_config import ModelConfig
from ..quant.format import FLOATS, TensorInfo
from ..quant.online import OnlineScheme
from ..speculation.loading import Draft
from ..weights.loader import count_parameters
from .weight_size import weight_size

_WHOLE = ("embed_tokens.weight", "fc.weight", "eh_proj.weight")  # of a head, on every rank


def draft_bytes(
    draft: Draft, target: ModelConfig, dtype: torch.dtype, num_ranks: int, expert_parallel: bool, on_card: bool
) -> int:
    """Of one of the target's ranks, about."""
    size = 1 if draft.settings.num_ranks == 1 else num_ranks
    stored = sum(info.num_bytes for info in draft.tensors.values())
    described = draft.described
    if isinstance(described, ModelConfig):
        parameters = count_parameters(described, size, expert_parallel)
        share = parameters / count_parameters(described)
        return weight_size(described, parameters, dtype, int(stored * share), on_card)
    scheme = (target if described is None else described.config).quantization
    each = scheme.bytes_each if isinstance(scheme, OnlineScheme) else dtype.itemsize
    found = 0.0
    for name, info in draft.tensors.items():
        taken = _bytes(info, dtype.itemsize if name.endswith(_WHOLE[0]) else each)
        found += taken if name.endswith(_WHOLE) else taken / size
    return int(found)


def _bytes(info: TensorInfo, each: float) -> float:
    """Codes stay codes."""
    return prod(info.shape) * each if info.dtype in FLOATS else info.num_bytes
