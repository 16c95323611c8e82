"""The requests of /v1/embeddings and, in Cohere's words, /v2/embed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ..errors import bad_request, unsupported
from . import fields
from .pooled import MAX_INPUTS, EncodedRequest, PooledRequest

# What sentence-transformers' files call the prompts for what Cohere calls these.
PROMPT_NAMES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
_EMBEDDING_TYPES = ("float", "base64", "binary", "ubinary")


class EmbeddingRequest(EncodedRequest):
    """None is the same as leaving a field out."""

    use_activation: bool | None = Field(None, description="another name of normalize")
    prompt_name: str | None = Field(
        None, max_length=256, description="one of the prompts in the model's folder, which is put before each text "
        "(default: the folder's default)"
    )  # fmt: skip

    @model_validator(mode="after")
    def _agrees(self) -> EmbeddingRequest:
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            name = "use_activation"
            raise bad_request(f"'{name}' is another name of 'normalize', and the two differ.", name)
        if self.prompt_name is not None and not (self.messages is None and self.is_text):
            name = "prompt_name"
            raise bad_request(f"'{name}' is for texts: 'input' has token ids, or there are 'messages'.", name)
        return self

    @property
    def is_normalized(self) -> bool | None:
        """None: as the model's folder says."""
        return self.use_activation if self.normalize is None else self.normalize


class TextsRequest(EmbeddingRequest):
    """What a CohereEmbedRequest amounts to."""

    @property
    def param(self) -> str:
        return "texts"


class CohereEmbedRequest(PooledRequest):
    """Cohere's /v2/embed, of texts."""

    texts: list[str] = Field([], description="to be embedded")
    input_type: Literal["search_document", "search_query", "classification", "clustering", "image"] | None = Field(
        None, description="what they are for: the prompt of this name in the model's folder, where it has one"
    )
    embedding_types: list[Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]] | None = Field(
        None, description="(default float) binary and ubinary: a bit a number, whether it is above 0"
    )
    output_dimension: int | None = Field(
        None, ge=1, description="only so many of the leading ones (default: what --pooler-config says, or all)"
    )
    max_tokens: int | None = Field(None, ge=1, description="of a text; what is beyond is cut off")
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="where a text beyond the context or max_tokens is cut off; NONE: it is refused (default END)"
    )
    images: list[str] | None = Field(None, description="not supported")
    inputs: list[dict[str, Any]] | None = Field(None, description="texts, as content: [{type: text, text}]")

    @field_validator("texts", mode="plain", json_schema_input_type=list[str])
    @classmethod
    def _texts(cls, value: Any) -> list[str]:
        return fields.texts(value, "texts", MAX_INPUTS)

    @model_validator(mode="after")
    def _of_texts(self) -> CohereEmbedRequest:
        if self.images or self.input_type == "image":
            raise unsupported("images", "'images': models here read text only, and an image")
        if self.inputs is not None:
            if self.texts:
                raise bad_request("'inputs' take the place of 'texts': leave one out.", "inputs")
            self.texts = fields.texts([_text_of(one) for one in self.inputs], "inputs", MAX_INPUTS)
        if not self.texts:
            raise bad_request("Missing required parameter: 'texts'.", "texts", "missing_required_parameter")
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise bad_request(
                "'max_tokens' cuts texts off, and 'truncate' NONE forbids it: leave one out.", "max_tokens"
            )
        for kind in self.embedding_types or ():
            if kind not in _EMBEDDING_TYPES:
                raise unsupported("embedding_types", f"'embedding_types' {kind} (choose {', '.join(_EMBEDDING_TYPES)})")
        return self

    def as_embeddings(self, known: Collection[str], context: int) -> TextsRequest:
        """`known`: names of prompts; `context`: tokens that a text may have at most."""
        kind = self.input_type or ""
        name = next((name for name in PROMPT_NAMES.get(kind, (kind,)) if name in known), None)
        keep = self.truncate_prompt_tokens
        if keep is None and self.truncate != "NONE":
            keep = -1 if self.max_tokens is None or self.max_tokens > context else self.max_tokens
        same = ("model", "user", "request_id", "priority", "cache_salt")
        return TextsRequest.model_construct(
            **{field: getattr(self, field) for field in same}, input=self.texts, dimensions=self.output_dimension,
            prompt_name=name, truncate_prompt_tokens=keep,
            truncation_side=self.truncation_side or ("left" if self.truncate == "START" else "right"),
        )  # fmt: skip


def _text_of(given: dict[str, Any]) -> str:
    content = given.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if not texts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise bad_request("'inputs' must have content of {type: text, text}: models here read text only.", "inputs")
    return "".join(str(text) for text in texts)
