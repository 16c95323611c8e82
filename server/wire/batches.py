"""What is asked and told of files and batches."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..errors import bad_request, shorten
from . import fields
from .answers import Schema
from .batch_lines import URLS


class FileUpload(BaseModel):
    """The fields of a form."""

    model_config = ConfigDict(extra="allow")

    file: bytes = Field(description="requests in OpenAI's batch format, one JSON object a line")
    purpose: Literal["batch"] = Field(description="what it is for")


class BatchRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    input_file_id: str = Field(max_length=256, description="of the file of requests")
    endpoint: str = Field(max_length=256, description="which all of them are for")
    completion_window: Literal["24h"] | None = Field(None, description="in which it is answered")
    metadata: dict[str, str] | None = Field(None, description="the client's own labels")

    @field_validator("endpoint", mode="after")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        if value not in URLS:
            raise bad_request(f"'endpoint' is {shorten(value)!r}; choose one of {', '.join(URLS)}.", "endpoint")
        return value

    @field_validator("metadata", mode="after")
    @classmethod
    def _metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        return fields.metadata(value)

    @property
    def ignored(self) -> list[str]:
        """Names of fields that nobody here knows."""
        return list(self.model_extra or ())


# ---- answers, for the OpenAPI document ----
class FileObject(Schema):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(Schema):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Schema):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchProblem(Schema):
    code: str
    message: str
    param: None
    line: int | None


class BatchProblems(Schema):
    object: Literal["list"]
    data: list[BatchProblem]


class BatchCounts(Schema):
    total: int
    completed: int
    failed: int


class BatchObject(Schema):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None = Field(description="what is wrong with the file")
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None = Field(description="of the requests that were answered 200")
    error_file_id: str | None = Field(description="of the others")
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, Any]


class BatchList(Schema):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
