"""What the other APIs share: their requests become a chat's, and errors about that speak of their own fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from ..errors import ApiError, bad_request, shorten, unsupported
from ..wire.requests import ChatRequest
from ..wire.validation import first_error

MAX_ITEMS = 65_536  # of an input, or messages
MAX_PARTS = 4096  # of one item

Names = Sequence[tuple[str, str]]  # patterns of a chat's fields, and what they are called in another API


class SamplingFields(BaseModel):
    """Parameters of chat completions that go beyond the other APIs."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    not_built: ClassVar[dict[str, tuple[Any, ...]]] = {}  # names of fields, with the values that ask for nothing
    _sees: bool = PrivateAttr(default=False)
    _left_out: dict[str, None] = PrivateAttr(default_factory=dict)  # in their order: clients choose how many

    top_k: int | None = Field(None, description="sample from so many tokens; -1 and 0: off")
    min_p: float | None = Field(None, description="least probability, as a share of the likeliest token's")
    seed: int | None = Field(None, description="the same request gives the same answer")
    repetition_penalty: float | None = Field(None, description="above 1: prompt and output repeat less")
    presence_penalty: float | None = Field(None, description="off the logit of what the output has")
    frequency_penalty: float | None = Field(None, description="the same, once for each time")
    logit_bias: dict[str, float] | None = Field(None, description="added to the logits of these token ids")
    allowed_token_ids: list[int] | None = Field(None, description="no other token is sampled")
    bad_words: list[str] | None = Field(None, description="text that is not generated")
    stop_token_ids: list[int] | None = Field(None, description="tokens that end the answer")
    min_tokens: int | None = Field(None, description="no end before so many tokens")
    ignore_eos: bool | None = Field(None, description="go on after the model's end of text")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further variables of the chat template")
    priority: int | None = Field(None, description="lower runs sooner, with --scheduling-policy priority")
    cache_salt: str | None = Field(None, description="cached prefixes are shared only where this is equal")
    request_id: str | None = Field(
        None, min_length=1, max_length=1024, description="the request's own id; the header X-Request-Id wins"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, raw: dict[str, Any]) -> dict[str, Any]:
        for name, neutral in cls.not_built.items():
            if (value := raw.get(name)) is not None and value not in neutral:
                raise unsupported(name)
        return {name: value for name, value in raw.items() if name not in cls.not_built}

    # Left as they are, since the chat looks at them.
    @field_validator("logit_bias", mode="plain", json_schema_input_type=dict[str, float] | None)
    @classmethod
    def _logit_bias(cls, value: Any) -> Any:
        return value

    @field_validator("allowed_token_ids", "stop_token_ids", mode="plain", json_schema_input_type=list[int] | None)
    @classmethod
    def _token_ids(cls, value: Any) -> Any:
        return value

    @field_validator("bad_words", mode="plain", json_schema_input_type=list[str] | None)
    @classmethod
    def _bad_words(cls, value: Any) -> Any:
        return value

    @property
    def sampling(self) -> dict[str, Any]:
        """Those that are set, as a chat has them."""
        return {name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None}

    def see(self, sees: bool) -> None:
        """Whether the model that is asked sees pictures: a chat can have them then."""
        self._sees = sees

    def leave_out(self, name: str) -> None:
        """`name`: of what the chat of this request does not have, though the request has it."""
        self._left_out[name] = None

    @property
    def ignored(self) -> list[str]:
        """Names of fields that nobody here knows, and of what was left out once the chat was made."""
        return [*(self.model_extra or ()), *self._left_out]


@contextmanager
def speaking_of(names: Names) -> Iterator[None]:
    """Errors about a chat's fields become errors about these."""
    try:
        yield
    except ValidationError as error:
        raise _renamed(first_error(error), names) from None
    except ApiError as error:
        raise _renamed(error, names) from None


def _renamed(error: ApiError, names: Names) -> ApiError:
    if error.param is None:
        return error
    message, param = error.message, error.param
    for pattern, name in names:
        if re.match(pattern, param):
            param = re.sub(f"^{pattern}", name, param)
            message = re.sub(f"'{pattern}", f"'{name}", message)
            break
    return ApiError(error.status, message, type=error.type, param=param, code=error.code, headers=error.headers)


def chat_request(given: Mapping[str, Any]) -> ChatRequest:
    """What has no value is left out: to a chat the two are not always the same."""
    return ChatRequest.model_validate({name: value for name, value in given.items() if value is not None})


# ---- reading fields by hand ----


def objects(value: Any, where: str, most: int = MAX_ITEMS) -> list[dict[str, Any]]:
    """A list of objects. Raises ApiError (400)."""
    if not isinstance(value, list):
        raise bad_request(f"'{where}' must be a list.", where, "invalid_type")
    if len(value) > most:
        raise bad_request(f"'{where}' has {len(value)} entries; at most {most} are allowed.", where)
    for i, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise bad_request(f"'{where}[{i}]' must be an object.", f"{where}[{i}]", "invalid_type")
    return value


def string(value: Mapping[str, Any], name: str, where: str) -> str:
    """A field that must be there. Raises ApiError (400)."""
    param = f"{where}.{name}"
    if (text := value.get(name)) is None:
        raise bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if not isinstance(text, str):
        raise bad_request(f"'{param}' must be a string.", param, "invalid_type")
    return text


def text_of(content: Any, where: str, kinds: Mapping[str, str]) -> str:
    """The text of a string, or of parts whose type is one of `kinds`, which has it in the field of that name."""
    if isinstance(content, str):
        return content
    if content is None:
        raise bad_request(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
    parts = enumerate(objects(content, where, MAX_PARTS))
    return "\n".join(part_text(part, f"{where}[{i}]", kinds) for i, part in parts)


def image_part(url: str, detail: Any = None) -> dict[str, Any]:
    """A picture in a chat's message."""
    return {"type": "image_url", "image_url": {"url": url, **({} if detail is None else {"detail": detail})}}


def joined(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message of texts and pictures: one text of several lines where there are no pictures."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if not isinstance(part, str):
            content.append(part)
        elif content and "text" in content[-1]:
            content[-1] = {"type": "text", "text": f"{content[-1]['text']}\n{part}"}
        else:
            content.append({"type": "text", "text": part})
    if not content:
        return ""
    return content[0]["text"] if len(content) == 1 and "text" in content[0] else content


def with_line_between(contents: Sequence[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """The content of one message of those of several."""
    parts: list[str | dict[str, Any]] = []
    for content in contents:
        parts += [f"{content}\n"] if isinstance(content, str) else content
    if parts and isinstance(last := parts[-1], str):
        parts[-1] = last.removesuffix("\n")
    return joined(parts)


def part_text(part: Mapping[str, Any], where: str, kinds: Mapping[str, str]) -> str:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise unsupported(f"{where}.type", f"Content of type {shorten(kind)!r}")
    return string(part, kinds[kind], where)
