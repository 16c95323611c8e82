"""What the server runs with: every setting in effect, and where it is from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...engine.link.messages import EngineInfo
from ..errors import ApiError
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..state import ServerState

HIDDEN = "(hidden)"


def server_info(server: ServerState) -> dict[str, Any]:
    """Sources: default; flag; environment; file (--config); preset (--performance-mode); model (its folder); device;
    fitted (to memory, or to another setting).
    Of sampling: generation_config.json, flag or default.

    Raises ApiError (503) while there is no engine.
    """
    info = server.engine_info()
    settings: dict[str, Any] = {}
    for config in (server.client.config, server.config):
        for spec in dataclasses.fields(config):
            settings[spec.name] = _setting(spec, getattr(config, spec.name), info, server.sources)
    model = server.model
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    sampling = {
        name: {"value": model.defaults.get(name, value), "source": model.default_sources.get(name, "default")}
        for name, value in neutral.items()
    }
    sampling["max_new_tokens"] = {
        "value": model.max_new_tokens,
        "source": model.default_sources.get("max_new_tokens", "default"),
    }
    return {
        "version": __version__,
        "started": server.started,
        "model": {
            "names": list(model.names),
            "root": model.root,
            "vocab_size": info.vocab_size,
            "eos_token_ids": list(model.eos_token_ids),
            "chat_template": model.tokenizer.has_chat_template,
            "tool_format": None if model.formats.tools is None else model.formats.tools.name,
            "reasoning_format": None if model.formats.reasoning is None else model.formats.reasoning.name,
        },
        "chat_template": _template(model.tokenizer),
        "embedding_model": None if server.beside is None else _beside(server.beside),
        "settings": dict(sorted(settings.items())),
        "sampling_defaults": sampling,
        "num_blocks": info.num_blocks,
        "memory": info.memory,
        "quantization": info.quantization or None,
        "experts": info.experts or None,
        "kv_cache": info.kv_cache,
        "startup_seconds": info.startup_seconds,
    }


def _template(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """What the chat template takes, by name and in words; None: there is none that can be used."""
    if not tokenizer.has_chat_template:
        return None
    try:
        can = tokenizer.capabilities(tokenizer.template(tools=True))
    except ApiError:
        return None
    return {"deviations": list(can.deviations()), "capabilities": can.described()}


def _beside(server: ServerState) -> dict[str, Any]:
    """What the second model's engine runs with."""
    info = server.engine_info()
    return {
        "names": list(server.model.names),
        "tasks": list(info.tasks),
        "settings": dict(sorted(info.settings.items())),
        "memory": info.memory,
        "startup_seconds": info.startup_seconds,
    }


def _setting(spec: dataclasses.Field[Any], asked: Any, info: EngineInfo, sources: dict[str, str]) -> dict[str, Any]:
    value = info.settings.get(spec.name, asked)
    if spec.name in info.fitted:
        source = "fitted"
    elif spec.name in sources:
        source = sources[spec.name]
    elif value == spec.default:
        source = "default"
    elif spec.name in ("max_model_len", "model_impl") or (
        spec.name in ("dtype", "kv_cache_dtype") and info.device != "cpu"
    ):
        source = "model"
    else:
        source = "device"
    if spec.metadata.get("secret") and (value or source == "environment"):
        value = HIDDEN
    return {"value": list(value) if isinstance(value, tuple) else value, "source": source}
