"""What the engine says of texts becomes probabilities and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...engine.link.messages import EngineInfo
from ..errors import bad_request
from ..text.model import TextModel
from ..text.pairs import PairEncoder
from ..text.tokenizer import Pair
from ..wire.scores import PairRequest
from .embedding import numbers


def activated(logits: Sequence[float], activation: str) -> list[float]:
    """`activation`: as EngineInfo has it."""
    if activation == "sigmoid":
        return [_sigmoid(logit) for logit in logits]
    if activation == "softmax":
        highest = max(logits)
        shares = [math.exp(logit - highest) for logit in logits]
        total = math.fsum(shares)
        return [share / total for share in shares]
    return list(logits)


def activation_of(asked: bool | None, model: TextModel, info: EngineInfo) -> str:
    """`asked`: use_activation of a request."""
    return info.activation if (model.pooling.activate if asked is None else asked) else ""


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def score(logits: bytes, activation: str) -> float:
    """Of a classifier with one class."""
    (value,) = activated(numbers(logits), activation)
    return value


def cosine(one: bytes, other: bytes) -> float:
    """Of two embeddings; 0 where one has no length."""
    import numpy as np  # the server starts without it

    a, b = (np.frombuffer(vector, "<f4").astype(np.float64) for vector in (one, other))
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else 0.0


def check_scores_pairs(info: EngineInfo) -> None:
    """Raises ApiError (400) for a classifier that has no score to give."""
    if "classify" in info.tasks and (len(info.labels) != 1 or info.by_token):
        raise bad_request(
            f"This model has {len(info.labels)} classes{' of each token' if info.by_token else ''}: a score needs one; "
            "use /classify.",
            "model",
            "unsupported_task",
        )


def encode_pair(
    pairs: PairEncoder, request: PairRequest, info: EngineInfo, query: str | None, document: str | None
) -> Pair:
    """Both as one prompt, or one alone. Raises ApiError (400)."""
    query = None if query is None else pairs.cut(query, request.max_tokens_per_query)
    document = None if document is None else pairs.cut(document, request.max_tokens_per_doc)
    if query is None or document is None:
        if request.instruction is not None:
            raise bad_request(
                "'instruction' is for models that read both texts at once: put it before the query.", "instruction"
            )
        return pairs.alone(document or query or "")
    keep = request.truncate_prompt_tokens
    if keep is not None and (keep == -1 or keep > info.max_model_len):
        keep = info.max_model_len
    return pairs.encode(query, document, request.instruction, keep)
