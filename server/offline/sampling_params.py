"""`SamplingParams` as users of the offline API write them: strings allowed, vLLM's names and defaults."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import ApiError
from ..options.hint import did_you_mean
from ..options.text import POOLING_TASKS
from ..wire.embeddings import EmbeddingRequest
from ..wire.requests import CompletionRequest
from ..wire.validation import first_error

Model = TypeVar("Model", bound=BaseModel)


class _Params:
    """Of their dataclasses, a keyword that is no field is told which one is nearest."""

    def __new__(cls, *values: Any, **keywords: Any) -> Self:
        fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
        for name in keywords.keys() - fields:
            raise TypeError(f"{cls.__name__} has no field {name!r}{did_you_mean(name, fields)}")
        return super().__new__(cls)


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # everything, once


@dataclass
class StructuredOutputsParams(_Params):
    """The form of an answer: one of the first six."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: str | None = None  # vLLM's name of one; the one that fits is taken
    disable_fallback: bool = False


GuidedDecodingParams = StructuredOutputsParams  # vLLM's older name


@dataclass
class RepetitionDetectionParams(_Params):
    """Ends an answer whose last tokens are one pattern, `min_count` times in a row."""

    max_pattern_size: int = 0  # tokens; 0 = off
    min_pattern_size: int = 0
    min_count: int = 0


@dataclass
class SamplingParams(_Params):
    """How to choose tokens. Raises ValueError for values that cannot be, and for fields that are not supported yet.

    None is the default of any field; max_tokens=None means what is left of the context.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1 = off
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None  # k = of the sampled token and of the k most likely ones
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    logprob_token_ids: list[int] | None = None  # of these tokens in the place of the k most likely ones
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None  # keep the last ones; -1 = as many as the context holds
    # vLLM's older names, and what is not built: neutral values pass.
    guided_decoding: StructuredOutputsParams | dict[str, Any] | None = None  # structured_outputs
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    logits_processors: list[Any] | None = None

    def __post_init__(self) -> None:
        self.request()

    def request(self) -> CompletionRequest:
        """These parameters as the server's request, with a prompt that stands for any: one place validates both.

        Raises ValueError.
        """
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        if (older := values.pop("guided_decoding")) is not None:
            if self.structured_outputs is not None:
                raise ValueError("SamplingParams: 'guided_decoding' and 'structured_outputs' are one: leave one out.")
            values["structured_outputs"] = older
        for name, neutral in _UNSUPPORTED.items():
            if values.pop(name) not in neutral:
                raise ValueError(f"SamplingParams: '{name}' is not supported; leave it at its default.")
        if values.pop("detokenize") is False and self.stop:
            raise ValueError("SamplingParams: 'stop' needs 'detokenize', which is off; use 'stop_token_ids' instead.")
        for spec in dataclasses.fields(self):
            if values.get(spec.name, 0) is None and spec.name != "max_tokens":
                values[spec.name] = spec.default
        if isinstance(values["logit_bias"], dict):
            values["logit_bias"] = {str(token): bias for token, bias in values["logit_bias"].items()}
        for name in ("structured_outputs", "repetition_detection"):
            if dataclasses.is_dataclass(values[name]):
                values[name] = dataclasses.asdict(values[name])
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "logprob_token_ids", "bad_words"):
            if isinstance(values[name], tuple | set):
                values[name] = list(values[name])
        try:
            return validate(CompletionRequest, {"prompt": [0], **values})
        except ValueError as error:
            raise ValueError(f"SamplingParams: {error}") from None


@dataclass
class PoolingParams(_Params):
    """What an embedding, classes or scores are to be like. Raises ValueError for values that cannot be."""

    truncate_prompt_tokens: int | None = None  # keep the last ones; -1 = as many as the context holds
    dimensions: int | None = None  # only so many of the leading ones
    normalize: bool | None = None  # to length 1; None = what the model's folder says, or so
    use_activation: bool | None = (
        None  # of classes and scores: False = logits; of embeddings: another name of normalize
    )
    task: str | None = None  # of `encode`, as its pooling_task

    def __post_init__(self) -> None:
        self.request()

    def request(self) -> EmbeddingRequest:
        """As a server would get it, with an input that stands for any. Raises ValueError."""
        try:
            values = {name: value for name, value in dataclasses.asdict(self).items() if name != "task"}
            if self.task not in (None, *POOLING_TASKS):
                raise ValueError(f"task is {self.task!r}: choose one of {', '.join(POOLING_TASKS)}.")
            return validate(EmbeddingRequest, {"input": [0], **values})
        except ValueError as error:
            raise ValueError(f"PoolingParams: {error}") from None


# What would change the output and is not built, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "flat_logprobs": (None, False),
    "output_kind": (None, *RequestOutputKind),  # AsyncLLM heeds it; LLM has whole answers
    "extra_args": (None, {}),
    "skip_reading_prefix_cache": (None, False),
    "thinking_token_budget": (None,),
    "logits_processors": (None, []),
}


def validate(model: type[Model], values: dict[str, Any]) -> Model:
    """Raises ValueError with the sentence that a client of the server would read."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ValueError(first_error(error).message) from None
    except ApiError as error:
        raise ValueError(error.message) from None
