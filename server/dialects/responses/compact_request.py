"""POST /v1/responses/compact: what a request may hold, and the chat that it stands for."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from ...errors import bad_request
from ...wire.requests import ChatRequest
from ..as_chat import SamplingFields, chat_request, speaking_of
from .compaction import compacted
from .items import input_messages
from .request import NAMES
from .shapes import InputItem


class CompactRequest(SamplingFields):
    not_built: ClassVar = {"conversation": (), "stream": (False,), "background": (False,)}

    model: str | None = Field(None, description="a name that the server serves; where it is missing, the first one")
    input: str | list[dict[str, Any]] | None = Field(None, description="text, or the items of a conversation")
    instructions: str | None = Field(None, description="a system message before the conversation")
    previous_response_id: str | None = Field(
        None, max_length=256, description="of a stored response: its conversation comes before the input"
    )
    prompt_cache_key: str | None = Field(
        None, max_length=1024, description="accepted: equal prefixes are always shared"
    )
    prompt_cache_options: dict[str, Any] | None = Field(None, description="accepted")
    prompt_cache_retention: str | None = Field(None, max_length=32, description="accepted")
    service_tier: str | None = Field(None, max_length=32, description="accepted")

    @field_validator("input", mode="plain", json_schema_input_type=str | list[InputItem] | None)
    @classmethod
    def _input(cls, value: Any) -> Any:
        return [] if value is None else value

    def chat(self, before: list[dict[str, Any]]) -> ChatRequest:
        """`before`: the messages of the previous response. Raises ApiError (400) in terms of this request."""
        given = self.input if self.input is not None else []
        messages = [*before, *input_messages(given, self.leave_out, self._sees)]
        if not messages:
            message = "There is nothing to compact: send the conversation as 'input', or a 'previous_response_id'."
            raise bad_request(message, "input", "missing_required_parameter")
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        asked = {"model": self.model, "messages": [*system, *compacted(messages)], "reasoning_effort": "none"}
        with speaking_of(NAMES):
            return chat_request({**self.sampling, **asked})
