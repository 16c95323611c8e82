"""What the offline API returns, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import LoRARequest


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # the one that ended it included
    cumulative_logprob: float | None = None  # with logprobs
    logprobs: list[dict[int, Logprob]] | None = None  # one a token: of the sampled one, and of the most likely ones
    finish_reason: str | None = None  # stop | length | error
    stop_reason: int | str | None = None  # the stop token id or string; None for EOS and length; the cause of an error
    lora_request: LoRARequest | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    finished: bool = True


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]  # of each class; logits where use_activation is False

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ClassificationRequestOutput:
    """A prompt and its classes."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]  # of the pair; of embeddings, both texts' one after the other
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    finished: bool = True


@dataclass(slots=True)
class PoolingOutput:
    data: Any  # torch, float32 [width], or [tokens, width]


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt and what the model makes of it, or of each of its tokens."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    finished: bool = True


@dataclass(slots=True)
class RequestMetrics:
    """time.monotonic() of the first answer's events; None = did not happen."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # one a token, the first one None
    lora_request: LoRARequest | None = None
    kv_transfer_params: None = None
