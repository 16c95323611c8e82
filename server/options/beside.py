"""What --embedding-model means: the options of a second model's engine, and of its text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ...engine.options.config import EngineConfig
from .config import ServerConfig

CACHE_BYTES = 1 << 30  # of the KV cache, where the second model is a decoder: prompts of some steps, and prefixes
_SHARED = (
    "device", "download_dir", "trust_remote_code", "gpu_memory_utilization", "cpu_threads", "seed", "scheduling_policy",
    "engine_in_process", "load_format",
)  # fmt: skip
_OF_TEXT = ("tokenizer", "tokenizer_revision", "chat_template", "skip_tokenizer_init", "generation_config",
            "override_generation_config")  # fmt: skip


def embedding_engine(config: ServerConfig, first: EngineConfig) -> EngineConfig | None:
    """Of the second model's engine; None: there is none. Raises ConfigError."""
    if config.embedding_model is None:
        return None
    shared = {name: getattr(first, name) for name in _SHARED}
    return EngineConfig(config.embedding_model, runner="pooling", kv_cache_memory_bytes=CACHE_BYTES, **shared)


def of_first(config: ServerConfig) -> ServerConfig:
    """What the first model's text goes by: how embeddings are pooled is said of the second, where there is one."""
    if config.embedding_model is None:
        return config
    return dataclasses.replace(config, pooling="auto", pooler_config=None, override_pooler_config=None)


def of_second(config: ServerConfig) -> ServerConfig:
    """What the second model's text goes by."""
    given = config.embedding_model or ""
    path = Path(given).expanduser()
    names = (path.resolve().name, given) if path.is_dir() else (given,)
    defaults: dict[str, Any] = {spec.name: spec.default for spec in dataclasses.fields(config) if spec.name in _OF_TEXT}
    return dataclasses.replace(
        config,
        embedding_model=None,
        embedding_model_name=None,
        served_model_name=(config.embedding_model_name,) if config.embedding_model_name else names,
        tool_call_parser="none",
        reasoning_parser="none",
        **defaults,
    )
