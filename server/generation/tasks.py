"""What a model is there for: a request for something else is told so."""

from __future__ import annotations

from ...engine.link.messages import EngineInfo
from ..errors import bad_request

GENERATE, EMBED, CLASSIFY, REWARD = "generate", "embed", "classify", "reward"
_DOES = {
    GENERATE: "generates text (/v1/chat/completions, /v1/completions)",
    EMBED: "makes embeddings (/v1/embeddings, /v1/score, /v1/rerank)",
    CLASSIFY: "classifies texts (/classify; of one class: /v1/score, /v1/rerank)",
    REWARD: "rates texts (/classify, and /pooling for every token)",
}
_ASKED = {
    GENERATE: "generate text",
    EMBED: "make embeddings",
    CLASSIFY: "classify or score texts",
    REWARD: "rate texts",
}


def check_task(info: EngineInfo, *tasks: str) -> None:
    """Raises ApiError (400) for a model that does none of these."""
    if not any(task in info.tasks for task in tasks):
        does = " and ".join(_DOES[task] for task in info.tasks)
        remedy = "Another --runner or --convert at the start may change that."
        if info.reads_both_ways and GENERATE in tasks:
            remedy = "It reads texts both ways and writes none: ask another model."
        raise bad_request(
            f"This model does not {_ASKED[tasks[0]]}: it {does}. {remedy}",
            "model",
            "unsupported_task",
        )
