"""How positions are rotated, as config.json says it in one of two spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .model_file import ModelError
from .raw_config import RawConfig, number

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the formulas are in layers/rope.py. Fields a type does not use keep their defaults."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_length: int = 0  # positions the model knew before it was stretched
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def stretches(self) -> bool:
        """Whether it serves `factor` times original_length, rather than what max_position_embeddings says."""
        return self.type in ("linear", "dynamic", "yarn")


def read_rope(raw: Mapping[str, Any], max_position: int, default_theta: float = 10_000.0) -> RopeConfig:
    """`rope_scaling` with `rope_theta` beside it (old), or `rope_parameters` with it inside (transformers 5)."""
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise ModelError("config.json: rope parameters that differ by layer are not supported: use another model")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"config.json: rope type {kind!r}, supported are {', '.join(ROPE_TYPES)}: use another model")
    if values.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported: use another model")
    theta = number(values, "rope_theta", number(raw, "rope_theta", default_theta))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, number(values, "factor"), original_length=max_position)
    # A top-level original_max_position_embeddings wins, as in transformers.
    lengths = {**values, **{key: raw[key] for key in ("original_max_position_embeddings",) if raw.get(key)}}
    original = RawConfig(lengths, {"original_max_position_embeddings": max_position}).count(
        "original_max_position_embeddings"
    )
    if kind == "llama3":
        return RopeConfig(
            kind,
            theta,
            number(values, "factor"),
            original,
            low_freq_factor=number(values, "low_freq_factor"),
            high_freq_factor=number(values, "high_freq_factor"),
        )
    return RopeConfig(
        kind,
        theta,
        number(values, "factor", max_position / original),
        original,
        attention_factor=values.get("attention_factor"),
        beta_fast=values.get("beta_fast") or 32.0,
        beta_slow=values.get("beta_slow") or 1.0,
        mscale=values.get("mscale"),
        mscale_all_dim=values.get("mscale_all_dim"),
        truncate=values.get("truncate", True),
    )
