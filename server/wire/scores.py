"""The requests of /score and /rerank: how well texts go with others."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from ..errors import bad_request
from . import fields
from .pooled import MAX_INPUTS, PooledRequest

_QUERIES = ("queries", "text_1", "data_1")
_DOCUMENTS = ("documents", "items", "text_2", "data_2")
SCORED = _QUERIES  # fields that no other kind of request has
Texts = str | list[str] | list[dict[str, Any]] | None


class PairRequest(PooledRequest):
    instruction: str | None = Field(
        None,
        max_length=1 << 16,
        description="what the query wants, for models whose template of pairs has a place for it",
    )
    use_activation: bool | None = Field(
        None, description="of classifiers; false: their logits (default: what --pooler-config says, or true)"
    )
    max_tokens_per_doc: int | None = Field(None, ge=0, description="a document's further ones are cut off; 0: none")
    max_tokens_per_query: int | None = Field(None, ge=0, description="a query's further ones are cut off; 0: none")

    @property
    def queries_and_documents(self) -> tuple[list[str], list[str]]:
        """As many of one as of the other, or one query."""
        raise NotImplementedError

    @property
    def is_cut(self) -> bool:
        """Documents that are too long are no error."""
        return bool(self.truncate_prompt_tokens or self.max_tokens_per_doc)

    @property
    def num_pairs(self) -> int:
        return len(self.queries_and_documents[1])

    @property
    def document_param(self) -> str:
        return "documents"


class ScoreRequest(PairRequest):
    """One query and many documents, or as many of one as of the other; under three names each."""

    queries: Texts = Field(None, description="one or many")
    text_1: Texts = Field(None, description="another name of queries")
    data_1: Texts = Field(None, description="another name of queries")
    documents: Texts = Field(None, description="one or many")
    items: Texts = Field(None, description="another name of documents")
    text_2: Texts = Field(None, description="another name of documents")
    data_2: Texts = Field(None, description="another name of documents")

    @field_validator(*_QUERIES, *_DOCUMENTS, mode="plain", json_schema_input_type=Texts)
    @classmethod
    def _texts(cls, value: Any, info: Any) -> list[str] | None:
        return None if value is None else fields.texts(value, info.field_name, MAX_INPUTS)

    @model_validator(mode="after")
    def _pairs(self) -> ScoreRequest:
        for names in (_QUERIES, _DOCUMENTS):
            given = [name for name in names if getattr(self, name) is not None]
            if not given:
                raise bad_request(f"Missing required parameter: '{names[0]}'.", names[0], "missing_required_parameter")
            if len(given) > 1:
                raise bad_request(f"'{given[1]}' is another name of '{given[0]}': leave one out.", given[1])
        queries, documents = self.queries_and_documents
        if len(queries) not in (1, len(documents)):
            raise bad_request(
                f"There are {len(queries)} queries and {len(documents)} documents: give one query, or as many as "
                "documents.",
                self.document_param,
            )
        return self

    @property
    def queries_and_documents(self) -> tuple[list[str], list[str]]:
        queries, documents = (
            next(value for name in names if (value := getattr(self, name)) is not None)
            for names in (_QUERIES, _DOCUMENTS)
        )
        return queries, documents

    @property
    def document_param(self) -> str:
        return next(name for name in _DOCUMENTS if getattr(self, name) is not None)


class RerankRequest(PairRequest):
    """As Jina and Cohere have it."""

    query: str = Field(description="what the documents should answer")
    documents: list[str] = Field(description="texts, or objects with a text")
    top_n: int | None = Field(None, ge=0, description="only so many, the best ones (default and 0: all)")
    return_documents: bool | None = Field(None, description="their texts too (default true)")

    @field_validator("documents", mode="plain", json_schema_input_type=list[str] | list[dict[str, Any]])
    @classmethod
    def _documents(cls, value: Any) -> list[str]:
        return fields.texts(value, "documents", MAX_INPUTS)

    @model_validator(mode="after")
    def _query(self) -> RerankRequest:
        if not self.query:
            raise bad_request("'query' must not be empty.", "query", "empty_array")
        return self

    @property
    def queries_and_documents(self) -> tuple[list[str], list[str]]:
        return [self.query], self.documents
