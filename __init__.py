"""vserve: an LLM inference server that speaks the OpenAI API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server.offline.adapters import LoRARequest
    from .server.offline.engine import AsyncLLM, LLMEngine
    from .server.offline.engine import AsyncLLM as AsyncLLMEngine
    from .server.offline.engine_args import EngineArgs
    from .server.offline.engine_args import EngineArgs as AsyncEngineArgs
    from .server.offline.llm import LLM
    from .server.offline.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from .server.offline.prompt_like import TextPrompt, TokensPrompt
    from .server.offline.sampling_params import PoolingParams, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "LLM": "llm",
    "AsyncEngineArgs": "engine_args",
    "AsyncLLM": "engine",
    "AsyncLLMEngine": "engine",
    "EngineArgs": "engine_args",
    "LLMEngine": "engine",
    "ClassificationRequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "LoRARequest": "adapters",
    "PoolingParams": "sampling_params",
    "PoolingRequestOutput": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "ScoringRequestOutput": "outputs",
    "StructuredOutputsParams": "sampling_params",
    "TextPrompt": "prompt_like",
    "TokensPrompt": "prompt_like",
}

_OTHER_NAMES = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}  # vLLM's of the same things


def __getattr__(name: str) -> Any:
    """The offline API, imported when it is first asked for: the command line must not wait for it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home = importlib.import_module(f".server.offline.{_HOMES[name]}", __name__)
    return getattr(home, _OTHER_NAMES.get(name, name))


def __dir__() -> list[str]:
    """What a notebook offers by tab: the offline API, not this file's helpers."""
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})
