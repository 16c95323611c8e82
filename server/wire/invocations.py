"""What several APIs under one route take and give, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, RootModel

from .answers import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, EmbeddingList, Schema
from .answers import Model as OpenAIModel
from .answers import ModelList as OpenAIModelList
from .embeddings import EmbeddingRequest
from .pooled import ClassifyRequest, PoolingRequest
from .pooled_answers import ClassesList, PooledList, Ranking, ScoreList
from .requests import ChatRequest, CompletionRequest
from .scores import RerankRequest, ScoreRequest


class Invocation(
    RootModel[
        ChatRequest
        | CompletionRequest
        | EmbeddingRequest
        | ClassifyRequest
        | PoolingRequest
        | ScoreRequest
        | RerankRequest
    ]
):
    """A request of another route: the one that has this field, `prompt`, `query` or one of the names of queries; of
    `messages` and `input` the one for what the model does."""


class InvocationAnswer(
    RootModel[ChatCompletion | Completion | EmbeddingList | ClassesList | PooledList | ScoreList | Ranking]
):
    """As the other route answers."""


class InvocationChunk(RootModel[ChatCompletionChunk | CompletionChunk]):
    """As the other route streams."""


class AnthropicModel(Schema):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str = Field(description="when the server was started")
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(Schema):
    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ListedModel(RootModel[OpenAIModel | AnthropicModel]):
    """Anthropic's shape where the header anthropic-version is there."""


class ListedModels(RootModel[OpenAIModelList | AnthropicModelList]):
    """Anthropic's shape where the header anthropic-version is there."""
