"""The requests on the wire: pydantic models with strict types, and one short sentence for whatever does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from typing_extensions import TypedDict

from .errors import ApiError, bad_request, shorten, unsupported

MAX_PROMPTS = 1024  # in one completions request
MAX_CHOICES = 16_384  # prompts times n
MAX_STOPS = 128
MAX_STOP_LENGTH = 1024  # characters; the tail of every stream is held back by the longest one
MAX_TOKEN_ENTRIES = 4096  # in stop_token_ids and logit_bias
MAX_SEED = 2**63 - 1


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's padding against traffic analysis: accepted, none is added


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class Message(TypedDict, total=False):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str
    reasoning: str
    reasoning_content: str


# Names of what is not built, with the values that ask for nothing. Anything else is refused.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


class GenerationRequest(BaseModel):
    """What chat and completions share. None is the same as leaving a field out."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=1024)  # the client's own label
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)  # -1 and 0: off
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    logit_bias: dict[int, float] | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)  # lower runs sooner
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    return_token_ids: bool | None = None

    @field_validator("stop", mode="plain", json_schema_input_type=str | list[str] | None)
    @classmethod
    def _stop(cls, value: Any) -> list[str] | None:
        if value is None:
            return None
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise bad_request("'stop' must be a string or a list of strings.", "stop", "invalid_type")
        if len(stops) > MAX_STOPS:
            raise bad_request(f"'stop' has {len(stops)} strings; at most {MAX_STOPS} are allowed.", "stop")
        if "" in stops:
            raise bad_request("'stop' must not contain an empty string.", "stop")
        if (longest := max(map(len, stops), default=0)) > MAX_STOP_LENGTH:
            raise bad_request(
                f"'stop' has a string of {longest} characters; at most {MAX_STOP_LENGTH} are allowed.", "stop"
            )
        return stops

    @field_validator("stop_token_ids", mode="plain", json_schema_input_type=list[int] | None)
    @classmethod
    def _stop_token_ids(cls, value: Any) -> list[int] | None:
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise bad_request("'stop_token_ids' must be a list of token ids.", "stop_token_ids", "invalid_type")
        if len(value) > MAX_TOKEN_ENTRIES:
            raise bad_request(
                f"'stop_token_ids' has {len(value)} entries; at most {MAX_TOKEN_ENTRIES} are allowed.", "stop_token_ids"
            )
        return value

    @field_validator("logit_bias", mode="plain", json_schema_input_type=dict[str, float] | None)
    @classmethod
    def _logit_bias(cls, value: Any) -> dict[int, float] | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise bad_request("'logit_bias' must be an object of token ids and numbers.", "logit_bias", "invalid_type")
        if len(value) > MAX_TOKEN_ENTRIES:
            raise bad_request(
                f"'logit_bias' has {len(value)} entries; at most {MAX_TOKEN_ENTRIES} are allowed.", "logit_bias"
            )
        biases = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) < 12):
                raise bad_request(f"'logit_bias' has the key {shorten(key)!r}, which is no token id.", "logit_bias")
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise bad_request(f"'logit_bias' of token {key} must be a number.", "logit_bias", "invalid_type")
            biases[int(key)] = float(min(100, max(-100, bias)))
        return biases

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, raw: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, value in raw.items():
            if name in cls.model_fields or name not in _UNSUPPORTED:
                kept[name] = value
            elif value is not None and value not in _UNSUPPORTED[name]:
                raise unsupported(name)
        return kept

    @model_validator(mode="after")
    def _agree(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def ignored(self) -> list[str]:
        """Names of fields that nobody here knows."""
        return list(self.model_extra or ())


class ChatRequest(GenerationRequest):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, max_length=32)  # for templates that know it

    @field_validator("messages", mode="plain", json_schema_input_type=list[Message])
    @classmethod
    def _messages(cls, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            raise bad_request("'messages' must be a list of messages.", "messages", "invalid_type")
        if not value:
            raise bad_request("'messages' must not be empty.", "messages", "empty_array")
        return [_message(message, f"messages[{i}]") for i, message in enumerate(value)]

    @model_validator(mode="after")
    def _logprobs_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """(name of the field that set it, most tokens to generate; None = what is left of the context)"""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionRequest(GenerationRequest):
    prompt: list[str] | list[list[int]]  # one or many, text or token ids: a list in any case after validation
    logprobs: int | None = Field(None, ge=0)

    @field_validator("prompt", mode="plain", json_schema_input_type=str | list[str] | list[int] | list[list[int]])
    @classmethod
    def _prompt(cls, value: Any) -> list[str] | list[list[int]]:
        prompts = value
        if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
            prompts = [value]
        if not isinstance(prompts, list):
            raise bad_request("'prompt' must be a string, token ids, or a list of either.", "prompt", "invalid_type")
        if len(prompts) > MAX_PROMPTS:
            raise bad_request(f"'prompt' has {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed.", "prompt")
        if not prompts or not all(prompts):
            raise bad_request("'prompt' must not be empty.", "prompt", "empty_array")
        strings = all(isinstance(prompt, str) for prompt in prompts)
        if not strings and not all(
            isinstance(prompt, list) and all(type(token) is int for token in prompt) for prompt in prompts
        ):
            raise bad_request("'prompt' must be a string, token ids, or a list of either.", "prompt", "invalid_type")
        return prompts

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens


def _message(raw: Any, where: str) -> dict[str, Any]:
    """One message as chat templates want it: content is a string."""
    if not isinstance(raw, dict):
        raise bad_request(f"'{where}' must be an object.", where, "invalid_type")
    role = raw.get("role")
    if role is None:
        raise bad_request(f"Missing required parameter: '{where}.role'.", f"{where}.role", "missing_required_parameter")
    if role in ("tool", "function") or raw.get("tool_calls") or raw.get("function_call"):
        raise unsupported(f"{where}.role" if role in ("tool", "function") else f"{where}.tool_calls", "Tool calling")
    if role not in ("system", "developer", "user", "assistant"):
        raise bad_request(
            f"'{where}.role' must be one of system, developer, user, assistant, but it is {shorten(role)!r}.",
            f"{where}.role",
        )
    message = {"role": role, "content": _content(raw.get("content"), f"{where}.content")}
    for name in ("name", "reasoning", "reasoning_content"):
        if (value := raw.get(name)) is not None:
            if not isinstance(value, str):
                raise bad_request(f"'{where}.{name}' must be a string.", f"{where}.{name}", "invalid_type")
            message[name] = value
    return message


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise bad_request(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
    if not isinstance(content, list) or not content:
        raise bad_request(f"'{where}' must be a string or a list of content parts.", where, "invalid_type")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise bad_request(f"'{where}[{i}]' must be an object.", f"{where}[{i}]", "invalid_type")
        if part.get("type") != "text":
            raise unsupported(f"{where}[{i}].type", f"Content of type {shorten(part.get('type'))!r}")
        if not isinstance(part.get("text"), str):
            raise bad_request(f"'{where}[{i}].text' must be a string.", f"{where}[{i}].text", "invalid_type")
        texts.append(part["text"])
    return "\n".join(texts)


Model = TypeVar("Model", bound=BaseModel)


async def read_request(model: type[Model], request: Request) -> Model:
    """The validated body. Raises ApiError (400, 415)."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        message = "Unsupported Media Type: Only 'application/json' is allowed."
        raise ApiError(415, message, code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "A compressed body is not accepted.", code="unsupported_media_type")
    try:
        raw = msgspec.json.decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {shorten(str(error))}.", None, "invalid_json") from None
    if not isinstance(raw, dict):
        raise bad_request("The body must be a JSON object.", None, "invalid_type")
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise first_error(error) from None


_TYPES = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
_LIMITS: dict[str, Callable[[dict[str, Any]], str]] = {
    "finite_number": lambda limit: "must be finite",
    "greater_than": lambda limit: f"must be above {limit['gt']:g}",
    "greater_than_equal": lambda limit: f"must be at least {limit['ge']}",
    "less_than_equal": lambda limit: f"must be at most {limit['le']}",
    "string_too_long": lambda limit: f"must have at most {limit['max_length']} characters",
    "string_too_short": lambda limit: "must not be empty",
}


def first_error(errors: ValidationError) -> ApiError:
    """The first thing wrong, in one sentence."""
    error = errors.errors(include_url=False)[0]
    kind = error["type"]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])[1:]
    if kind == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        return bad_request(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
    value = shorten(repr(error["input"]), 30)
    if kind in _TYPES:
        return bad_request(f"'{param}' must be {_TYPES[kind]}, but it is {value}.", param, "invalid_type")
    if kind in _LIMITS:
        what = _LIMITS[kind](error.get("ctx", {}))
        got = "" if kind.startswith("string") else f", but it is {value}"
        return bad_request(f"'{param}' {what}{got}.", param)
    return bad_request(f"Invalid value for '{param}': {error['msg']}.", param)
