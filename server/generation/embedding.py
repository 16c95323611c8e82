"""Inputs become engine requests for embeddings, and the engine's word on each becomes a vector."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.messages import EngineInfo, RequestOutput
from ...engine.request import Pooling, SamplingParams
from ..client.mailbox import MailboxLike
from ..errors import bad_request, context_length_exceeded, unsupported
from ..text.detokenizer import Detokenizer, NoText
from ..text.model import TextModel
from ..text.tokenizer import Tokenizer
from ..wire.embeddings import EmbeddingRequest
from .choice import Choice, Delta, Prompt, TextOptions
from .sampling import prompt_ids, truncated


def resolve_embeddings(
    request: EmbeddingRequest, inputs: Sequence[list[int]], model: TextModel, info: EngineInfo
) -> list[list[Prompt]]:
    """The pieces of each input: one, but for an input that is longer than the context where that is allowed. Raises
    ApiError (400) for what this model or engine cannot do."""
    pooling = model.pooling
    if pooling.problem is not None:
        raise unsupported("model", f"Embedding with this model ({pooling.problem}; --pooling overrides it)")
    if request.dimensions is not None and request.dimensions > info.hidden_size:
        raise bad_request(
            f"'dimensions' is {request.dimensions}; this model's embeddings have {info.hidden_size}.", "dimensions"
        )
    if request.priority and info.scheduling_policy != "priority":
        raise unsupported("priority", "'priority' (without --scheduling-policy priority)")
    # Nothing is sampled: the engine wants to know a limit all the same.
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        pooling=Pooling(pooling.kind, is_normalized(request, model), request.dimensions, head=True),
    )
    pieces = SamplingParams(
        max_tokens=1, temperature=0.0, pooling=Pooling(pooling.kind, False, request.dimensions, head=True)
    )
    param = "input" if request.messages is None else "messages"
    is_text = request.messages is not None or isinstance(request.input[0], str)
    prompts = []
    for token_ids in inputs:
        if not token_ids:
            raise bad_request(f"'{param}' gives no tokens.", param)
        ids = prompt_ids(param, token_ids, is_text, model.tokenizer, info)
        ids = truncated(request, ids, info, 0)
        size, longest = info.max_model_len, pooling.longest
        if len(ids) <= size:
            prompts.append([Prompt(ids, sampling)])
        elif longest is None or 0 < longest < len(ids):
            raise context_length_exceeded(max(size, longest or 0), len(ids), None, param)
        else:
            prompts.append([Prompt(ids[start : start + size], pieces) for start in range(0, len(ids), size)])
    return prompts


def is_normalized(request: EmbeddingRequest, model: TextModel) -> bool:
    return model.pooling.normalize if request.is_normalized is None else request.is_normalized


def merged(vectors: Sequence[bytes], num_tokens: Sequence[int], normalize: bool) -> bytes:
    """The mean of the pieces' vectors, each with the weight of its tokens: for mean pooling, that of all tokens."""
    import numpy as np  # the server starts without it

    values = np.stack([np.frombuffer(vector, "<f4") for vector in vectors]).astype(np.float64)
    mean = np.average(values, axis=0, weights=num_tokens)
    if normalize and (length := np.linalg.norm(mean)) > 0:
        mean /= length
    return mean.astype("<f4").tobytes()


class EmbeddingChoice(Choice):
    """The answer to one input: a vector, in one output of the engine."""

    __slots__ = ("embedding",)

    embedding: bytes | None  # little-endian float32; None before it is there, and where it never comes

    def __init__(
        self, index: int, prompt: Prompt, mailbox: MailboxLike, detokenizer: Detokenizer, options: TextOptions
    ) -> None:
        super().__init__(index, prompt, mailbox, detokenizer, options)
        self.embedding = None

    def feed(self, output: RequestOutput) -> Delta:
        self.embedding = output.embedding
        self.finish_reason = output.finish_reason
        return Delta("", [], None, None, output.finish_reason)


@dataclass(frozen=True, slots=True)
class EmbeddingOptions(TextOptions):
    """What takes the place of text."""

    def choice(self, index: int, prompt: Prompt, mailbox: MailboxLike, tokenizer: Tokenizer) -> Choice:
        return EmbeddingChoice(index, prompt, mailbox, NoText(), self)


def numbers(embedding: bytes) -> list[float]:
    """Of little-endian float32."""
    return list(struct.unpack(f"<{len(embedding) // 4}f", embedding))


def packed(embedding: bytes, dtype: str, big: bool) -> bytes:
    """The same of float32, float16 or bfloat16, rounded to even; large values become infinite in float16."""
    import numpy as np  # the server starts without it

    order = ">" if big else "<"
    values = np.frombuffer(embedding, "<f4")
    if dtype == "bfloat16":
        bits = values.view("<u4").astype(np.uint32)
        halves = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return halves.astype(f"{order}u2").tobytes()
    with np.errstate(over="ignore"):
        return values.astype(order + ("f2" if dtype == "float16" else "f4")).tobytes()
