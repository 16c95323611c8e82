"""How positions are rotated, as config.json says it in one of two spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ModelError
from .raw_config import RawConfig, flag, number

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
# "mrope": positions of three axes, which are one and the same for text.
_ALIASES = {"su": "longrope", "mrope": "default"}
FULL, SLIDING = "full_attention", "sliding_attention"  # what transformers calls layers without and with a window


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
    share: float = 1.0  # of the pairs, the first ones: others have frequency 0 (proportional)
    # Queries at position p are multiplied by 1 + growth · ln(1 + ⌊p / original_length⌋).
    growth: float = 0.0
    # Of longrope, one for each pair of rotated elements: up to the original length, and beyond.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def stretches(self) -> bool:
        """Whether it serves `factor` times original_length, rather than what max_position_embeddings says."""
        return self.type in ("linear", "dynamic", "yarn")


def read_rope(
    raw: Mapping[str, Any], max_position: int, default_theta: float = 10_000.0, aliases: Mapping[str, str] = {}
) -> RopeConfig:
    """`rope_scaling` with `rope_theta` beside it (old), or `rope_parameters` with it inside (transformers 5).

    default_theta: where neither names one. aliases: names that a family's files have for a type.
    """
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise ModelError("config.json: rope parameters that differ by layer are not supported: use another model")
    return _rope(values, raw, max_position, number(raw, "rope_theta", default_theta), aliases)


def read_ropes(
    raw: Mapping[str, Any], max_position: int, default_theta: float, sliding_theta: float | None = None
) -> tuple[RopeConfig, RopeConfig]:
    """Of layers without a window, and with one: `rope_parameters` with an object for each, or what the file says of
    the former beside the latter's default type.

    default_theta: the base where none is named; sliding_theta: of layers with a window, None: the same. max_position
    is what stretched layers reach, so linear factors do not stretch it further.
    """
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(values, dict):
        raise ModelError(f"config.json: rope parameters are {values!r:.60}, an object belongs there: correct the file")
    base = number(raw, "rope_theta", default_theta)
    by_type = FULL in values or SLIDING in values
    full, sliding = (values.get(FULL) or {}, values.get(SLIDING) or {}) if by_type else (values, {})
    for part in (full, sliding):
        if not isinstance(part, dict):
            raise ModelError(
                f"config.json: rope parameters are {part!r:.60}, an object belongs there: correct the file"
            )
    found = _rope(full, raw, max_position, base)
    if found.type in ("linear", "dynamic"):
        found = replace(found, original_length=round(max_position / found.factor))
    return found, _rope(sliding, raw, max_position, sliding_theta or base)


def rotated_share(raw: Mapping[str, Any], default: float) -> float:
    """The part of a head that is rotated."""
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    outside = number(raw, "partial_rotary_factor", default)
    return number(values, "partial_rotary_factor", outside) if isinstance(values, dict) else outside


def _rope(
    values: Mapping[str, Any], raw: Mapping[str, Any], max_position: int, base: float, aliases: Mapping[str, str] = {}
) -> RopeConfig:
    kind = values.get("rope_type", values.get("type", "default"))
    kind = {**_ALIASES, **aliases}.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in ROPE_TYPES:
        raise ModelError(
            f"config.json: rope type {kind!r:.60}, supported are {', '.join(ROPE_TYPES)}: use another model"
        )
    theta = number(values, "rope_theta", base)
    if values.get("llama_4_scaling_beta") and kind != "yarn":
        raise ModelError(
            f"config.json: llama_4_scaling_beta is set with rope type {kind!r}, it is supported with yarn: use another "
            "model"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, number(values, "factor"), original_length=max_position)
    if kind == "proportional":
        share = number(values, "partial_rotary_factor", 1.0)
        return RopeConfig(kind, theta, number(values, "factor", 1.0), share=share)
    # A top-level original_max_position_embeddings wins, as in transformers.
    lengths = {**values, **{key: raw[key] for key in ("original_max_position_embeddings",) if raw.get(key)}}
    original = RawConfig(lengths, {"original_max_position_embeddings": max_position}).count(
        "original_max_position_embeddings"
    )
    if kind == "llama3":
        low, high = number(values, "low_freq_factor"), number(values, "high_freq_factor")
        return RopeConfig(kind, theta, number(values, "factor"), original, low_freq_factor=low, high_freq_factor=high)
    factor = number(values, "factor", max_position / original)
    temperature = RawConfig(values, {"attention_factor": None}).optional_number("attention_factor")
    scaled = RopeConfig(kind, theta, factor, original, attention_factor=temperature)
    if kind == "longrope":
        short, long = _numbers(values, "short_factor"), _numbers(values, "long_factor")
        return replace(scaled, short_factor=short, long_factor=long)
    return replace(
        scaled,
        beta_fast=_optional(values, "beta_fast") or 32.0,
        beta_slow=_optional(values, "beta_slow") or 1.0,
        mscale=_optional(values, "mscale"),
        mscale_all_dim=_optional(values, "mscale_all_dim"),
        truncate=bool(flag({"truncate": values.get("truncate", True)}, "truncate")),
        growth=_optional(values, "llama_4_scaling_beta") or 0.0,
    )


def _optional(values: Mapping[str, Any], key: str) -> float | None:
    """A number above 0; None where it is left out, null, or 0, which transformers takes for that."""
    value = values.get(key)
    return None if value is None or value == 0 else number(values, key)


def _numbers(values: Mapping[str, Any], key: str) -> tuple[float, ...]:
    found = values.get(key)
    if not isinstance(found, (list, tuple)):
        raise ModelError(f"config.json: {key} is {found!r:.60}, a list of numbers belongs there: correct the file")
    return tuple(number({key: value}, key) for value in found)
