"""Inputs become engine requests for embeddings, and the engine's word on each becomes a vector."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.messages import EngineInfo, RequestOutput
from ..engine.request import Pooling, SamplingParams
from .choice import Choice, Delta, MailboxLike, Prompt, TextOptions
from .detokenizer import NoText
from .embedding_protocol import EmbeddingRequest
from .engine_client import EngineClient
from .errors import bad_request, context_length_exceeded, unsupported
from .outputs import EmbeddingOutput, EmbeddingRequestOutput
from .progress_bar import Progress
from .sampling import check_tokens, truncated
from .tokenizer import TextModel, Tokenizer


def resolve_embeddings(
    request: EmbeddingRequest, inputs: Sequence[list[int]], model: TextModel, info: EngineInfo
) -> list[Prompt]:
    """Raises ApiError (400) for what this model or engine cannot do."""
    pooling = model.pooling
    if pooling.problem is not None:
        raise unsupported("model", f"Embedding with this model ({pooling.problem}; --pooling overrides it)")
    if request.dimensions is not None and request.dimensions > info.hidden_size:
        raise bad_request(
            f"'dimensions' is {request.dimensions}; this model's embeddings have {info.hidden_size}.", "dimensions"
        )
    if request.priority and info.scheduling_policy != "priority":
        raise unsupported("priority", "'priority' (without --scheduling-policy priority)")
    normalize = pooling.normalize if request.normalize is None else request.normalize
    # Nothing is sampled: the engine wants to know a limit all the same.
    sampling = SamplingParams(
        max_tokens=1, temperature=0.0, pooling=Pooling(pooling.kind, normalize, request.dimensions)
    )
    prompts = []
    for token_ids in inputs:
        if not token_ids:
            raise bad_request("'input' gives no tokens.", "input")
        check_tokens("input", token_ids, info)
        token_ids = truncated(request.truncate_prompt_tokens, token_ids, info, 0)
        if len(token_ids) > info.max_model_len:
            raise context_length_exceeded(info.max_model_len, len(token_ids), None, "input")
        prompts.append(Prompt(token_ids, sampling))
    return prompts


class EmbeddingChoice(Choice):
    """The answer to one input: a vector, in one output of the engine."""

    __slots__ = ("embedding",)

    embedding: bytes | None  # little-endian float32

    def feed(self, output: RequestOutput) -> Delta:
        self.embedding = output.embedding
        self.finish_reason = output.finish_reason
        return Delta("", [], None, None, output.finish_reason)


@dataclass(frozen=True, slots=True)
class EmbeddingOptions(TextOptions):
    """What takes the place of text."""

    def choice(self, index: int, prompt: Prompt, mailbox: MailboxLike, tokenizer: Tokenizer) -> Choice:
        return EmbeddingChoice(index, prompt, mailbox, NoText(), self)


async def embed_all(
    client: EngineClient, prompts: Sequence[Prompt], ids: Sequence[str], progress: Progress
) -> list[EmbeddingRequestOutput]:
    """Submits all prompts at once. Raises RuntimeError, and ends the others, when the engine fails on one."""
    mailboxes = [client.submit(prompt.token_ids, prompt.sampling) for prompt in prompts]
    try:
        outputs = []
        for id, prompt, mailbox in zip(ids, prompts, mailboxes, strict=True):
            output = await mailbox.get()
            if output.embedding is None:
                raise RuntimeError(f"request {id} failed: {output.error or 'the engine aborted it'}")
            vector = EmbeddingOutput(numbers(output.embedding))
            outputs.append(EmbeddingRequestOutput(id, vector, prompt.token_ids, output.num_cached_tokens or 0))
            progress.finished(len(prompt.token_ids), 0)
        return outputs
    finally:
        client.abort(mailboxes)  # those that have ended are left alone


def numbers(embedding: bytes) -> list[float]:
    """Of little-endian float32."""
    return list(struct.unpack(f"<{len(embedding) // 4}f", embedding))
