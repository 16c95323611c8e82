"""What the engine has to know of a model of transformers: read of its config, and of a probe."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from ..describe.model_config import Foreign, ModelConfig
from ..errors import ModelError
from .build import build
from .probe import Probe

logger = logging.getLogger(__name__)
_STRETCHED = ("linear", "dynamic", "yarn")


def read(foreign: Foreign, dtype: torch.dtype) -> ModelConfig:
    """Raises ModelError for what cannot be served."""
    model = build(foreign, dtype, torch.device("meta"), 1)
    probe = Probe(model)
    config, head = model.config, model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(f"architecture {foreign.architecture} is not served: its head is no matrix; use another model")
    eos = config.eos_token_id
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    path = next(path for path, module in model.named_modules() if module is head)
    return ModelConfig(
        architecture=foreign.architecture,
        vocab_size=head.out_features,
        hidden_size=probe.hidden_size,
        layers=probe.layers(),
        norm_eps=0.0,
        tie_word_embeddings=f"{path}.weight" in tied,
        max_position_embeddings=_longest(config),
        longest=probe.longest(),
        dtype=dtype,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        foreign=dataclasses.replace(foreign, layout=probe.layout()),
    )


def _longest(config: Any) -> int:
    """Positions that the model knows, stretched as its rotary parameters say."""
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelError(
            f"config.json: max_position_embeddings is {length!r}, a whole number above 0 belongs there: correct the "
            "file"
        )
    ropes = getattr(config, "rope_parameters", None) or {}
    found = [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    for rope in found:
        if rope.get("rope_type") in _STRETCHED and rope.get("factor"):
            original = rope.get("original_max_position_embeddings") or length
            length = max(length, int(original * rope["factor"]))
    return length
