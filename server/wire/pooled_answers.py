"""The answers of what makes no text, for the OpenAPI document alone, as answers.py has the others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .answers import EmbeddingUsage, Schema


class _List(Schema):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: EmbeddingUsage


class Classes(Schema):
    index: int = Field(description="of the input")
    label: str = Field(description="of the most likely class")
    probs: list[float] = Field(description="of all classes; logits where use_activation is false")
    num_classes: int


class ClassesList(_List):
    data: list[Classes]


class PooledData(Schema):
    index: int = Field(description="of the input")
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str = Field(description="numbers, those of each token, or their base64")


class PooledList(_List):
    data: list[PooledData]


class Score(Schema):
    index: int = Field(description="of the pair")
    object: Literal["score"]
    score: float


class ScoreList(_List):
    data: list[Score]


class RerankedDocument(Schema):
    text: str


class Ranked(Schema):
    index: int = Field(description="of the document")
    document: RerankedDocument | None = Field(None, description="unless return_documents is false")
    relevance_score: float


class ApiVersion(Schema):
    version: str


class BilledUnits(Schema):
    search_units: int | None = None
    input_tokens: int | None = None
    image_tokens: int | None = None


class Meta(Schema):
    api_version: ApiVersion
    billed_units: BilledUnits


class Ranking(Schema):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Ranked] = Field(description="the best first")
    meta: Meta | None = Field(None, description="of /v2/rerank")


class CohereEmbeddings(Schema):
    id: str
    embeddings: dict[str, list[list[float]] | list[list[int]] | list[str]] = Field(description="by embedding type")
    texts: list[str]
    response_type: Literal["embeddings_by_type"]
    meta: Meta
