"""vserve: an LLM inference server that speaks the OpenAI API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server.offline.adapters import LoRARequest
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
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
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


def __getattr__(name: str) -> Any:
    """The offline API, imported when it is first asked for: the command line must not wait for it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".server.offline.{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    """What a notebook offers by tab: the offline API, not this file's helpers."""
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})
