"""The names that vLLM has, and had, for parts of --speculative-config."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ...engine.config import ConfigError
from .vllm import READ, vllm_options

NAME = "speculative_config"


def with_speculation(merged: dict[str, Any]) -> dict[str, Any]:
    """What those say put into speculative_config; they stay, to be told of. Of Given, by name. Raises ConfigError."""
    options = vllm_options()
    parts = {name: one for name, one in merged.items() if name in options and options[name].accepted == READ}
    zero = {name for name in parts if name.startswith("ngram") and str(parts[name].value) == "0"}
    if not parts.keys() - zero:
        return merged
    config = json.loads(merged[NAME].value) if NAME in merged else {}
    if not isinstance(config, dict):
        return merged  # it is refused as it is
    for name, one in parts.items():
        key = options[name].reason
        if key in config or key.replace("_", "-") in config:
            raise ConfigError(f"{one.where} and --speculative-config.{key} are one option: leave one out")
        if name not in zero:
            config[key] = one.value
    if "prompt_lookup_max" in config and "ngram_prompt_lookup_max" in parts:
        config.setdefault("prompt_lookup_min", 1)  # as it was, when that was its name
    given = merged.get(NAME, next(iter(parts.values())))
    return merged | {NAME: dataclasses.replace(given, value=json.dumps(config))}
