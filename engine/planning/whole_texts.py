"""The settings of an engine that reads whole texts: a text is computed in one step, and nothing is cached."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..options.config import EngineConfig

STEP_TOKENS = {"cuda": 16384, "cpu": 1024}
STEP_TEXTS = {"cuda": 1024, "cpu": 128}


def whole_texts(config: EngineConfig, length: int, kind: str) -> dict[str, Any]:
    """Fields of Resolved: a text is computed in one step, a step has as many as it holds, and nothing is cached.

    kind: of the device, "cuda" or "cpu".
    Raises ConfigError for a step that is shorter than the longest text.
    """
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: this model reads texts whole and has no cache: leave it out"
        )
    tokens = config.max_num_batched_tokens
    if tokens is not None and config.max_model_len is not None and tokens < config.max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens is {tokens}: this model reads a text in one step, and --max-model-len is "
            f"{config.max_model_len}; raise the first or lower the second"
        )
    length = min(length, tokens or length)
    tokens = tokens or max(length, STEP_TOKENS[kind])
    return {
        "max_model_len": length,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": min(config.max_num_seqs or STEP_TEXTS[kind], tokens),
        "max_mixed_tokens": 0,
        "large_mixed_tokens": (),
        "max_num_partial_prefills": 0,
        "max_long_partial_prefills": 0,
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "block_size": length,  # a text takes one block, of nothing
        "reduced": (),
        "notices": (),
    }
