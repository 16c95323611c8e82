"""Token ids in, token ids out, as vLLM has it: /inference/v1/generate, and what makes text of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator, model_validator

from ..errors import bad_request, unsupported
from . import fields
from .answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    PromptLogprobs,
    Schema,
    Usage,
)
from .requests import MAX_CHOICES, ChatRequest, CompletionRequest, StreamOptions
from .validation import validated

# Of vLLM's sampling parameters, what says how its own answer is made, and of a rendered prompt, what is for people.
_UNREAD = frozenset(("detokenize", "output_kind", "skip_clone", "flat_logprobs"))
_RENDERED = frozenset(("prompt", "prompt_token_ids", "count", "max_model_len", "token_offsets"))
MAX_RESPONSES = fields.MAX_PROMPTS
MOST = 2**31 - 1  # of a number that is written again
Count = Annotated[int, Field(ge=0, le=MOST)]


class TokensRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    token_ids: list[int] = Field(description="the prompt")
    sampling_params: dict[str, Any] = Field(description="fields of a completion, such as max_tokens and logprobs")
    request_id: str | None = Field(None, min_length=1, max_length=1024, description="what the answer is called")
    model: str | None = Field(None, description="a name that the server serves; where it is missing, the first one")
    stream: bool | None = Field(None, description="answer as server-sent events")
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="the prompt's ids too")
    output_mode: Literal["tokens", "text"] | None = Field(None, description="text: beside the ids (default tokens)")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="cached prefixes are shared only where this is equal"
    )
    priority: int | None = Field(None, description="lower runs sooner, with --scheduling-policy priority")
    features: None = Field(None, description="pictures are not supported")
    kv_transfer_params: None = Field(None, description="not supported")

    @field_validator("token_ids", mode="plain", json_schema_input_type=list[int])
    @classmethod
    def _token_ids(cls, value: Any) -> list[int]:
        if not fields.are_integers(value) or not value:
            raise bad_request("'token_ids' must be a list of token ids that is not empty.", "token_ids", "invalid_type")
        ids: list[int] = value
        return ids

    @field_validator("features", "kv_transfer_params", mode="before")
    @classmethod
    def _nothing(cls, value: Any, info: Any) -> None:
        if value is not None:
            raise unsupported(info.field_name)

    def completion(self) -> CompletionRequest:
        """What it amounts to. Raises ApiError (400)."""
        given = {name: value for name, value in self.sampling_params.items() if name not in _UNREAD}
        for name in ("prompt", "stream", "echo"):
            if name in given:
                raise bad_request(f"'sampling_params' has '{name}', which is none: leave it out.", "sampling_params")
        same = ("model", "request_id", "stream", "stream_options", "cache_salt", "priority")
        return validated(
            CompletionRequest,
            {**given, **{name: getattr(self, name) for name in same if name != "stream_options"},
             "prompt": [self.token_ids], "return_token_ids": True,
             "stream_options": None if self.stream_options is None else self.stream_options.model_dump()},
        )  # fmt: skip

    def ignored_beside(self, completion: CompletionRequest) -> list[str]:
        """Names of fields that nobody here knows."""
        own = [name for name in self.model_extra or () if name not in _RENDERED]
        return own + [f"sampling_params.{name}" for name in completion.ignored]


class TokenLogprob(BaseModel):
    """Of a token that was sampled, or might have been."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    token_id: int = Field(ge=0, le=MOST)
    logprob: float
    rank: int | None = Field(None, ge=0, le=MOST)


class SampledLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob] = Field([], description="the likeliest ones at its place")


class TokensLogprobs(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    content: list[SampledLogprob] | None = Field(None, description="one a token")


class TokensChoice(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    index: int = Field(ge=0, lt=MAX_CHOICES)
    token_ids: list[int] | None = None
    logprobs: TokensLogprobs | None = None
    finish_reason: str | None = Field(None, max_length=64, description="of a whole answer: stop where it is missing")


class TokensResponse(BaseModel):
    """An answer of /inference/v1/generate."""

    model_config = ConfigDict(extra="ignore", strict=True)

    request_id: str | None = Field(None, max_length=1024)
    output_mode: Literal["tokens"] = "tokens"
    choices: list[TokensChoice] = Field(max_length=MAX_CHOICES)
    prompt_token_ids: list[int] | None = None


class TokensUsage(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    prompt_tokens: int = Field(0, ge=0, le=MOST)
    completion_tokens: int = Field(0, ge=0, le=MOST)


class TokensEvent(TokensResponse):
    """One event of a streamed answer of /inference/v1/generate."""

    choices: list[TokensChoice] = Field(max_length=1)
    usage: TokensUsage | None = None


class DerenderState(BaseModel):
    """Of one choice, between two events of it: the server remembers nothing, the client gives it back as it came."""

    model_config = ConfigDict(extra="ignore", strict=True)

    output_token_ids: list[int] = []
    role_sent: bool = False


class Derender(BaseModel):
    """What is derendered, whole or by events."""

    model_config = ConfigDict(strict=True, extra="allow")
    whole: ClassVar[str]  # the field that has it, where it is not streamed

    model: str | None = Field(None, description="a name that the server serves; where it is missing, the first one")
    stream: bool | None = Field(None, description="generate_chunk is one event of a streamed answer")
    generate_chunk: TokensEvent | None = Field(None, description="with stream: one event of /inference/v1/generate")
    stream_state: DerenderState | None = Field(
        None, description="with stream: what the choice's last event was answered with; at its first event nothing"
    )

    @model_validator(mode="after")
    def _is_given(self) -> Self:
        param = "generate_chunk" if self.stream else self.whole
        if getattr(self, param) is None:
            raise bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
        return self

    @property
    def ignored(self) -> list[str]:
        """Names of fields that nobody here knows."""
        return list(self.model_extra or ())

    @property
    def state(self) -> DerenderState:
        return (self.stream_state if self.stream else None) or DerenderState()


class DerenderChat(Derender):
    whole = "generate_response"

    generate_response: TokensResponse | None = Field(None, description="what /inference/v1/generate has answered")
    prompt_tokens: Count | None = Field(None, description="of the prompt, for the usage")
    prompt_token_ids: list[int] | None = Field(None, description="those that the answer follows, or the last of them")
    chat_request: ChatRequest | None = Field(
        None, description="what was asked: with it reasoning and tool calls are read"
    )

    @property
    def given(self) -> TokensResponse:
        given = self.generate_chunk if self.stream else self.generate_response
        assert given is not None  # see _is_given
        return given


class DerenderCompletions(Derender):
    whole = "generate_responses"

    generate_responses: list[TokensResponse] | None = Field(
        None, min_length=1, max_length=MAX_RESPONSES, description="what /inference/v1/generate has answered each prompt"
    )
    prompt_tokens: Count | list[Count] | None = Field(
        None, description="of each prompt, for the usage; with stream of the one"
    )
    prompt_token_ids: list[list[int] | None] | list[int] | None = Field(
        None, description="those that each answer follows; with stream those of the one"
    )
    completion_request: CompletionRequest | None = Field(None, description="what was asked")

    @field_validator("prompt_tokens", mode="plain", json_schema_input_type=Count | list[Count] | None)
    @classmethod
    def _prompt_tokens(cls, value: Any) -> int | list[int] | None:
        counts = value if isinstance(value, list) else [] if value is None else [value]
        if not fields.are_integers(counts) or not all(0 <= count <= MOST for count in counts):
            name = "prompt_tokens"
            raise bad_request(f"'{name}' must be a number from 0 to {MOST}, or a list of such.", name, "invalid_type")
        found: int | list[int] | None = value
        return found

    @field_validator("prompt_token_ids", mode="plain", json_schema_input_type=list[list[int] | None] | list[int] | None)
    @classmethod
    def _prompt_token_ids(cls, value: Any) -> list[Any] | None:
        if value is None or fields.are_integers(value):
            return value
        if not isinstance(value, list) or not all(one is None or fields.are_integers(one) for one in value):
            name = "prompt_token_ids"
            message = f"'{name}' must be a list of token ids, or a list with such a list or null for each prompt."
            raise bad_request(message, name, "invalid_type")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Of several answers, one entry each."""
        for param in ("prompt_tokens", "prompt_token_ids"):
            given, num = getattr(self, param), len(self.each_given)
            if given is None:
                continue
            is_each = isinstance(given, list) and (param == "prompt_tokens" or not fields.are_integers(given))
            if is_each == bool(self.stream):
                wanted = "of one prompt, with 'stream'" if self.stream else "a list with an entry for each prompt"
                raise bad_request(f"'{param}' must be {wanted}.", param, "invalid_type")
            if is_each and len(given) != num:
                raise bad_request(f"'{param}' has {len(given)} entries for {num} generate_responses.", param)
        return self

    @property
    def each_given(self) -> Sequence[TokensResponse]:
        if not self.stream:
            return self.generate_responses or ()
        return () if self.generate_chunk is None else (self.generate_chunk,)

    @property
    def each_prompt(self) -> Sequence[Any]:
        """Its token ids, a list or None."""
        if self.stream:
            return [self.prompt_token_ids]
        return [None] * len(self.each_given) if self.prompt_token_ids is None else self.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int | None:
        return sum(self.prompt_tokens) if isinstance(self.prompt_tokens, list) else self.prompt_tokens


# ---- answers, for the OpenAPI document ----
class TokensAnswerChoice(BaseModel):
    index: int
    token_ids: list[int]
    text: str | None = Field(None, description="with output_mode text")
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None


class TokensAnswer(Schema):
    request_id: str
    created: int
    model: str
    output_mode: Literal["tokens", "text"]
    choices: list[TokensAnswerChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: None


class TokensChunk(BaseModel):
    request_id: str
    output_mode: Literal["tokens", "text"]
    choices: list[TokensAnswerChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class DerenderedChatEvent(Schema):
    chunk: ChatCompletionChunk
    stream_state: DerenderState


class DerenderedEvent(Schema):
    chunk: CompletionChunk
    stream_state: DerenderState


class DerenderedChat(RootModel[ChatCompletion | DerenderedChatEvent]):
    """With stream one event and what the next one needs."""


class DerenderedCompletions(RootModel[Completion | DerenderedEvent]):
    """The same."""
