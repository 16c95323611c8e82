"""The names that vLLM has, and had, for parts of --speculative-config."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ...engine.errors import ConfigError
from .vllm import READ, vllm_options

NAME = "speculative_config"
_WHO = ("method", "model", "num_speculative_tokens")  # keys that ask for drafts; the others say how
_NONE = ("", "None")  # as vLLM has it for what is not there


def with_speculation(merged: dict[str, Any]) -> dict[str, Any]:
    """What those say put into speculative_config; they stay, to be told of. Of Given, by name. Raises ConfigError."""
    options = vllm_options()
    parts = {
        name: one for name, one in merged.items()
        if name in options and options[name].accepted == READ and one.value not in _NONE
    }  # fmt: skip
    zero = {name for name in parts if name.startswith("ngram") and str(parts[name].value) == "0"}
    if not parts.keys() - zero:
        return merged
    try:
        config = json.loads(merged[NAME].value) if NAME in merged else {}
    except ValueError:
        config = None
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
    if NAME not in merged and not config.keys() & set(_WHO):
        config["num_speculative_tokens"] = 0  # who had them without a --speculative-model had no drafts, nor has now
    given = merged.get(NAME, next(iter(parts.values())))
    return merged | {NAME: dataclasses.replace(given, value=json.dumps(config))}
