"""What the requests have in common that ask for vectors or numbers of texts, and the requests of /classify and
/pooling."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..errors import bad_request
from ..options.text import PoolingTask
from ..text import conversation
from ..text.conversation import Message
from . import fields

_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
MAX_INPUTS = 2048  # in one request; OpenAI's limit
MAX_DESCRIBED = 256  # in one header of an answer: most clients read 64 KiB


class PooledRequest(BaseModel):
    """None is the same as leaving a field out."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="a name that the server serves; where it is missing, the first one")
    user: str | None = Field(None, max_length=1024, description="the client's own label")
    request_id: str | None = Field(
        None, min_length=1, max_length=1024, description="names the request in the log; the header X-Request-Id wins"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="keep the last tokens of each input; -1: as many as the context holds"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="where truncate_prompt_tokens cuts off: left keeps the last tokens (default), right the first"
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="lower runs sooner, with --scheduling-policy priority"
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="cached prefixes are shared only where this is equal"
    )

    @model_validator(mode="after")
    def _keeps_something(self) -> PooledRequest:
        if self.truncate_prompt_tokens == 0:
            name = "truncate_prompt_tokens"
            raise bad_request(f"'{name}' is 0; it must be -1 or at least 1.", name)
        return self

    @property
    def ignored(self) -> list[str]:
        """Names of fields that nobody here knows."""
        return list(self.model_extra or ())


class InputRequest(PooledRequest):
    """One input or many, or one conversation."""

    input: list[str] | list[list[int]] = Field([], description="one or many, as text or as token ids")
    messages: list[dict[str, Any]] | None = Field(
        None, description="in place of input: a conversation, rendered by the chat template"
    )
    add_generation_prompt: bool | None = Field(
        None, description="of messages: end where the assistant begins to speak (default false)"
    )
    continue_final_message: bool | None = Field(None, description="of messages: leave the last one open")
    chat_template: str | None = Field(
        None, description="of messages: a Jinja template; only with --trust-request-chat-template"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="of messages: further variables of the chat template"
    )
    add_special_tokens: bool | None = Field(
        None, description="tokenise with the tokenizer's special tokens (default true; false for messages)"
    )

    @field_validator("input", mode="plain", json_schema_input_type=str | list[str] | list[int] | list[list[int]])
    @classmethod
    def _input(cls, value: Any) -> list[str] | list[list[int]]:
        return [] if value is None else fields.prompts(value, "input", MAX_INPUTS)

    @field_validator("messages", mode="plain", json_schema_input_type=list[Message] | None)
    @classmethod
    def _messages(cls, value: Any) -> list[dict[str, Any]] | None:
        return None if value is None else conversation.messages(value)

    @model_validator(mode="after")
    def _one_of_two(self) -> InputRequest:
        if not self.input and self.messages is None:
            raise bad_request("Missing required parameter: 'input'.", "input", "missing_required_parameter")
        if self.input and self.messages is not None:
            raise bad_request("'messages' take the place of 'input': leave one out.", "messages")
        if self.messages is None:
            for name in _OF_MESSAGES:
                if getattr(self, name):
                    raise bad_request(f"'{name}' is only for 'messages'.", name)
        elif self.continue_final_message and self.add_generation_prompt:
            name = "add_generation_prompt"
            raise bad_request(f"'{name}' must be false when 'continue_final_message' is true.", name)
        return self

    @property
    def num_inputs(self) -> int:
        return 1 if self.messages is not None else len(self.input)

    @property
    def param(self) -> str:
        """The field that has the texts."""
        return "input" if self.messages is None else "messages"

    @property
    def is_text(self) -> bool:
        """No token ids of a client's own."""
        return self.messages is not None or isinstance(self.input[0], str)


class EncodedRequest(InputRequest):
    """Whose answer is vectors."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = Field(
        None,
        description="float: numbers (default); base64: their bytes, little-endian float32 where nothing else is said; "
        "bytes: the body is nothing but these, and the header `metadata` says what lies where; bytes_only: without it",
    )
    dimensions: int | None = Field(
        None, ge=1, description="only so many of the leading ones (default: what --pooler-config says, or all)"
    )
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = Field(
        None, description="of base64 and bytes (default float32)"
    )
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="of base64 and bytes (default native, which is little)"
    )
    normalize: bool | None = Field(None, description="to length 1 (default: what the model's folder says, or true)")

    @model_validator(mode="after")
    def _of_bytes(self) -> EncodedRequest:
        if self.encoding_format in (None, "float"):
            for name, neutral in (("embed_dtype", ("float32",)), ("endianness", ("native", "little"))):
                if (value := getattr(self, name)) is not None and value not in neutral:
                    raise bad_request(f"'{name}' {value} is only for 'encoding_format' base64 or bytes.", name)
        if self.encoding_format == "bytes" and self.num_inputs > MAX_DESCRIBED:
            raise bad_request(
                f"'encoding_format' bytes says in a header where each input lies, and clients read none that long: "
                f"it is for {MAX_DESCRIBED} inputs, not {self.num_inputs}; take bytes_only or base64, or send fewer.",
                "encoding_format",
            )
        return self

    @property
    def is_raw(self) -> bool:
        """Whether the answer's body is bytes, and no JSON."""
        return self.encoding_format in ("bytes", "bytes_only")


class ClassifyRequest(InputRequest):
    use_activation: bool | None = Field(None, description="false: logits in place of probabilities")
    activation: bool | None = Field(None, description="an older name of use_activation")

    @property
    def activates(self) -> bool | None:
        """None: as the server's options say."""
        given = [one for one in (self.use_activation, self.activation) if one is not None]
        return all(given) if given else None


class PoolingRequest(EncodedRequest):
    task: PoolingTask | None = Field(
        None,
        description="embed: a vector of each input; classify: its classes; token_embed, token_classify: of each token "
        "(default: what the model is for, of one vector where it has the choice)",
    )
    use_activation: bool | None = Field(None, description="of classes; false: logits in place of probabilities")
