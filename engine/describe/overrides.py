"""A model's config.json as the options change it: another file, other values, no sliding window."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..families.encoders import ENCODERS
from ..families.head_spec import KEYS
from ..families.raw_config import TEXT_KEYS, VISION_KEYS, text_values
from ..families.registry import FAMILIES
from ..families.rope_config import FULL, SLIDING
from ..options.config import EngineConfig

# What is read of any config.json, here and by the server; families read more.
_KEYS = frozenset((
    "architectures", "dtype", "is_causal", "model_type", "original_max_position_embeddings", "partial_rotary_factor",
    "quantization_config", "rope_parameters", "rope_scaling", "rope_theta", "torch_dtype",
    "use_bidirectional_attention", *TEXT_KEYS, *VISION_KEYS,
))  # fmt: skip
_ROPE = ("rope_scaling", "rope_parameters")  # transformers before 5, and since


def unknown_key(changes: Mapping[str, Any]) -> str | None:
    """What is wrong with --hf-overrides: it would change nothing."""
    keys = _KEYS.union(KEYS, *(family.defaults for family in (*FAMILIES, *ENCODERS)))
    unknown = sorted(changes.keys() - keys)
    return f"nothing reads {unknown[0]!r}; it may set {', '.join(sorted(keys))}" if unknown else None


def overrides(config: EngineConfig) -> dict[str, Any]:
    """What --hf-overrides, --rope-theta and --rope-scaling put into config.json; the narrower option counts.

    Raises ConfigError for a key of --hf-overrides that nothing reads.
    """
    found = json.loads(config.hf_overrides or "{}")
    if problem := unknown_key(found):
        raise ConfigError(f"--hf-overrides is {config.hf_overrides!r}: {problem}")
    if config.rope_scaling is not None:
        found = {key: value for key, value in found.items() if key not in _ROPE}
        found["rope_scaling"] = json.loads(config.rope_scaling)
    if config.rope_theta is not None:
        found["rope_theta"] = config.rope_theta
    return found


def overridden(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with these values. Objects are merged key by key, but for rotary parameters that name their type: these
    replace what was there, apart from the base and the part of a head that is rotated."""
    rope = _rope(raw, changes)
    taken = (*_ROPE, "rope_theta") if rope is not None else ()
    result = _merged(
        {key: value for key, value in raw.items() if key not in taken},
        {key: value for key, value in changes.items() if key not in taken},
    )
    if rope is None:
        return result
    for key in TEXT_KEYS:  # in which old rotary parameters, under whatever name, would come back
        if isinstance(text := result.get(key), dict):
            result[key] = {name: value for name, value in text.items() if name not in taken} | {"rope_parameters": rope}
    return result | {"rope_parameters": rope}


def _rope(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary parameters in one object; None where no change is of them.

    Where they differ by layer, those of layers without a window change, unless the change names others.
    """
    if not any(key in changes for key in (*_ROPE, "rope_theta")):
        return None
    if "rope_parameters" not in raw and "rope_scaling" not in raw:
        raw = {**text_values(raw), **raw}
    before = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if isinstance(inner := before.get(FULL), dict) and not {FULL, SLIDING} & _asked(changes).keys():
        return {**before, FULL: _rope({"rope_parameters": inner}, changes)}
    asked = _asked(changes)
    removed = any(key in changes and changes[key] is None for key in _ROPE)
    share = {key: before[key] for key in ("partial_rotary_factor",) if key in before}
    kept = before if not removed and not {"rope_type", "type"} & asked.keys() else share
    rope = {**kept, **asked}
    bases = (changes, asked, before, raw)
    base = next((values["rope_theta"] for values in bases if values.get("rope_theta") is not None), None)
    return rope if base is None else rope | {"rope_theta": base}


def _asked(changes: Mapping[str, Any]) -> dict[str, Any]:
    asked = next((changes[key] for key in _ROPE if key in changes), None)
    if asked is not None and not isinstance(asked, dict):
        raise ConfigError(f"--hf-overrides has rotary parameters {asked!r:.60}: they are a JSON object")
    return asked or {}


def _merged(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        old = values.get(key)
        values[key] = _merged(dict(old), value) if isinstance(old, dict) and isinstance(value, dict) else value
    return values
