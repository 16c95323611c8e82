"""The requests on the wire: pydantic models with strict types, and one short sentence for whatever does not fit."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ...engine.link.sampling_params import MAX_SEED
from ..errors import bad_request, unsupported
from ..grammar import structured, tools
from ..grammar.constraint import Constraint
from ..grammar.tools import ToolChoice, ToolDefinition, ToolUse
from ..text import conversation
from ..text.conversation import Message
from . import fields

MAX_CHOICES = 16_384  # prompts times n
MAX_PATTERN = 256  # tokens of a repeated pattern: each possible length costs a comparison a token


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = Field(None, description="one more chunk with the usage, before the end")
    continuous_usage_stats: bool | None = Field(
        None, description="the usage so far in every chunk, unless include_usage is false"
    )
    include_obfuscation: bool | None = Field(None, description="accepted; no padding is added")


class RepetitionDetection(BaseModel):
    """Ends an answer whose last tokens are one pattern over and over."""

    model_config = ConfigDict(strict=True, extra="forbid")
    max_pattern_size: int = Field(0, ge=0, le=MAX_PATTERN, description="tokens of the longest pattern; 0: off")
    min_pattern_size: int = Field(0, ge=0, le=MAX_PATTERN, description="tokens of the shortest pattern")
    min_count: int = Field(0, ge=0, le=2**31 - 1, description="how often in a row ends the answer; at least 2")


# Names of what is not built, with the values that ask for nothing. Anything else is refused.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),  # and n
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
# Of these, why, and what there is instead.
_INSTEAD = {
    "logits_processors": "no code of others runs here, whatever --logits-processor-pattern allows; there are "
    "'logit_bias', 'allowed_token_ids', 'bad_words' and 'structured_outputs'",
}
GUIDED = frozenset((*(f"guided_{kind}" for kind in structured.KINDS), "guided_whitespace_pattern"))


class GenerationRequest(BaseModel):
    """What chat and completions share. None is the same as leaving a field out."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="a name that the server serves; where it is missing, the first one")
    stream: bool | None = Field(None, description="answer as server-sent events")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=1024, description="the client's own label")
    request_id: str | None = Field(
        None, min_length=1, max_length=1024, description="becomes part of the answer's id; the header X-Request-Id wins"
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="how many answers")
    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate")
    min_tokens: int | None = Field(None, ge=0, description="no end before so many tokens")
    temperature: float | None = Field(None, ge=0, le=2, description="0: the most likely token each time")
    top_p: float | None = Field(None, gt=0, le=1, description="sample from the likeliest tokens of this total weight")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="sample from so many tokens; -1 and 0: off")
    min_p: float | None = Field(None, ge=0, le=1, description="least probability, as a share of the likeliest token's")
    repetition_penalty: float | None = Field(None, gt=0, description="above 1: prompt and output repeat less")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="off the logit of what the output has")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="the same, once for each time")
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED, description="the same request gives the same answer")
    logit_bias: dict[int, float] | None = Field(None, description="added to the logits of these token ids, -100 to 100")
    allowed_token_ids: list[int] | None = Field(None, description="no other token is sampled")
    bad_words: list[str] | None = Field(None, description="text that is not generated")
    stop: list[str] | None = Field(None, description="text that ends the answer")
    stop_token_ids: list[int] | None = Field(None, description="tokens that end the answer")
    include_stop_str_in_output: bool | None = Field(None, description="leave what ended the answer in its text")
    ignore_eos: bool | None = Field(None, description="go on after the model's end of text")
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text (default true)")
    spaces_between_special_tokens: bool | None = Field(
        None, description="where special tokens are shown, keep the decoder's spaces between them (default true)"
    )
    add_special_tokens: bool | None = Field(None, description="tokenise with the tokenizer's special tokens")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="keep the last tokens of the prompt; -1: as many as leave room for max_tokens"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="where truncate_prompt_tokens cuts off: left keeps the last tokens (default), right the first"
    )
    repetition_detection: RepetitionDetection | None = None
    logprob_token_ids: list[int] | None = Field(
        None, description="log-probabilities of these tokens at each place, and not of the likeliest ones"
    )
    prompt_logprobs: int | None = Field(
        None, ge=-1, description="log-probabilities of the prompt's tokens, with so many of the likeliest ones; -1: all"
    )
    echo: bool | None = Field(None, description="begin with the prompt; in chat with the message that is continued")
    return_token_ids: bool | None = Field(None, description="the ids of prompt and output beside their text")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="log-probabilities name tokens as token_id:7, which is never ambiguous"
    )
    response_format: structured.ResponseFormat | None = Field(None, description="JSON, or what a JSON schema allows")
    structured_outputs: structured.StructuredOutputs | None = Field(None, description="the form of the output")
    guided_json: Any = Field(None, description="older name of structured_outputs.json")
    guided_regex: Any = Field(None, description="older name of structured_outputs.regex")
    guided_choice: Any = Field(None, description="older name of structured_outputs.choice")
    guided_grammar: Any = Field(None, description="older name of structured_outputs.grammar")
    guided_json_object: Any = Field(None, description="older name of structured_outputs.json_object")
    guided_structural_tag: Any = Field(None, description="older name of structured_outputs.structural_tag")
    guided_whitespace_pattern: Any = Field(None, description="older name of structured_outputs.whitespace_pattern")
    guided_decoding_backend: Any = Field(None, description="ignored: the server chooses for each request")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="lower runs sooner, with --scheduling-policy priority"
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="cached prefixes are shared only where this is equal"
    )

    @field_validator("stop", mode="plain", json_schema_input_type=str | list[str] | None)
    @classmethod
    def _stop(cls, value: Any) -> list[str] | None:
        return fields.stop_strings(value)

    @field_validator("bad_words", mode="plain", json_schema_input_type=list[str] | None)
    @classmethod
    def _bad_words(cls, value: Any) -> list[str] | None:
        return fields.bad_words(value)

    @field_validator("stop_token_ids", mode="plain", json_schema_input_type=list[int] | None)
    @classmethod
    def _stop_token_ids(cls, value: Any) -> list[int] | None:
        return fields.token_ids(value, "stop_token_ids")

    @field_validator("logprob_token_ids", mode="plain", json_schema_input_type=list[int] | None)
    @classmethod
    def _logprob_token_ids(cls, value: Any) -> list[int] | None:
        return fields.token_ids(value, "logprob_token_ids")

    @field_validator("allowed_token_ids", mode="plain", json_schema_input_type=list[int] | None)
    @classmethod
    def _allowed_token_ids(cls, value: Any) -> list[int] | None:
        ids = fields.token_ids(value, "allowed_token_ids", fields.MAX_ALLOWED_TOKENS)
        if ids == []:
            raise bad_request("'allowed_token_ids' must not be empty.", "allowed_token_ids", "empty_array")
        return ids

    @field_validator("logit_bias", mode="plain", json_schema_input_type=dict[str, float] | None)
    @classmethod
    def _logit_bias(cls, value: Any) -> dict[int, float] | None:
        return fields.logit_bias(value)

    # Left as they are: _agree reads them together with the older names.
    @field_validator("response_format", mode="plain", json_schema_input_type=structured.ResponseFormat | None)
    @classmethod
    def _response_format(cls, value: Any) -> Any:
        return value

    @field_validator("structured_outputs", mode="plain", json_schema_input_type=structured.StructuredOutputs | None)
    @classmethod
    def _structured_outputs(cls, value: Any) -> Any:
        return value

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, raw: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, value in raw.items():
            if name in cls.model_fields or name not in _UNSUPPORTED:
                kept[name] = value
                continue
            neutral = (raw.get("n") or 1,) if name == "best_of" else _UNSUPPORTED[name]  # the best n of n
            if value is not None and value not in neutral:
                raise unsupported(name, f"'{name}' ({_INSTEAD[name]})" if name in _INSTEAD else None)
        return kept

    @model_validator(mode="after")
    def _agree(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if self.truncate_prompt_tokens == 0:
            name = "truncate_prompt_tokens"
            raise bad_request(f"'{name}' is 0; it must be -1 or at least 1.", name)
        if (watch := self.repetition_detection) is not None and watch.max_pattern_size:
            name = "repetition_detection"
            if watch.min_pattern_size > watch.max_pattern_size:
                raise bad_request(
                    f"'{name}.min_pattern_size' is {watch.min_pattern_size}, above 'max_pattern_size', which is "
                    f"{watch.max_pattern_size}.",
                    f"{name}.min_pattern_size",
                )
            if watch.min_count < 2:
                raise bad_request(
                    f"'{name}.min_count' must be at least 2, but it is {watch.min_count}.", f"{name}.min_count"
                )
        if self.constraint is not None and self.min_tokens:
            raise bad_request(
                "'min_tokens' cannot be combined with structured output, which says itself when it may end.",
                "min_tokens",
            )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats) and options.include_usage is not False

    # Read several times a request, for which pydantic's private attributes are slow.
    @cached_property
    def constraint(self) -> tuple[str, Constraint] | None:
        """(the parameter that asks for it, what the output must look like). Raises ApiError when validated."""
        guided = {name: getattr(self, name) for name in GUIDED & self.model_fields_set}
        if guided or self.response_format is not None or self.structured_outputs is not None:
            return structured.constraint(self.response_format, self.structured_outputs, guided)
        return None

    @property
    def ignored(self) -> list[str]:
        """Names of fields that nobody here knows."""
        return list(self.model_extra or ())


class ChatRequest(GenerationRequest):
    messages: list[dict[str, Any]] = Field(description="the conversation so far")
    max_completion_tokens: int | None = Field(None, ge=1, description="newer name of max_tokens, which it overrides")
    logprobs: bool | None = Field(None, description="log-probabilities of the answer's tokens")
    top_logprobs: int | None = Field(None, ge=0, description="and of so many of the likeliest tokens at each place")
    add_generation_prompt: bool | None = Field(None, description="end the prompt where the assistant begins to speak")
    continue_final_message: bool | None = Field(None, description="the answer goes on where the last message ends")
    documents: list[dict[str, Any]] | None = Field(None, description="for templates that know them")
    chat_template: str | None = Field(None, description="a Jinja template; only with --trust-request-chat-template")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further variables of the chat template")
    reasoning_effort: str | None = Field(
        None, max_length=32, description="for templates that know it; none: without reasoning, where the model can"
    )
    include_reasoning: bool | None = Field(None, description="false: leave the reasoning out of the answer")
    thinking_token_budget: int | None = Field(
        None, ge=0, le=2**31 - 1, description="tokens of reasoning, after which it is ended"
    )
    tools: list[dict[str, Any]] | None = Field(None, description="functions that the model may call")
    tool_choice: Any = Field(None, description="whether a tool is called, and which (default auto)")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most (default true)")
    store: bool | None = Field(None, description="keep the answer for GET (default false)")
    metadata: dict[str, str] | None = Field(None, description="the client's own labels of a stored answer")

    @field_validator("metadata", mode="after")
    @classmethod
    def _metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        return fields.metadata(value)

    @field_validator("messages", mode="plain", json_schema_input_type=list[Message])
    @classmethod
    def _messages(cls, value: Any) -> list[dict[str, Any]]:
        return conversation.messages(value)

    @field_validator("tools", mode="plain", json_schema_input_type=list[ToolDefinition] | None)
    @classmethod
    def _tools(cls, value: Any) -> list[dict[str, Any]] | None:
        return tools.definitions(value)

    @field_validator("tool_choice", mode="plain", json_schema_input_type=ToolChoice | None)
    @classmethod
    def _tool_choice(cls, value: Any) -> Any:
        return tools.choice(value)

    @field_validator("documents", mode="plain", json_schema_input_type=list[dict[str, Any]] | None)
    @classmethod
    def _documents(cls, value: Any) -> list[dict[str, Any]] | None:
        return fields.documents(value)

    @model_validator(mode="after")
    def _chat_agrees(self) -> ChatRequest:
        if self.continue_final_message and self.add_generation_prompt:
            name = "add_generation_prompt"
            raise bad_request(f"'{name}' must be false when 'continue_final_message' is true.", name)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise bad_request("'logprob_token_ids' needs 'logprobs': true.", "logprob_token_ids")
        if self.tool_use is not None and self.min_tokens:
            raise bad_request(
                "'min_tokens' cannot be combined with 'tools', whose calls say themselves where they end.", "min_tokens"
            )
        return self

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Which tools may be called; None: none. Raises ApiError when validated."""
        return tools.tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def num_logprobs(self) -> int | None:
        return (len(self.logprob_token_ids or ()) or self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def prompt_only(self) -> bool:
        return False

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """(name of the field that set it, most tokens to generate; None = what is left of the context)"""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionRequest(GenerationRequest):
    prompt: list[str] | list[list[int]] = Field(description="one or many, as text or as token ids")
    max_tokens: int | None = Field(None, ge=0, description="most tokens to generate; 0 only with echo (default 16)")
    logprobs: int | None = Field(
        None, ge=0, description="log-probabilities of the tokens, with so many of the likeliest ones"
    )

    @field_validator("prompt", mode="plain", json_schema_input_type=str | list[str] | list[int] | list[list[int]])
    @classmethod
    def _prompt(cls, value: Any) -> list[str] | list[list[int]]:
        return fields.prompts(value)

    @model_validator(mode="after")
    def _something_to_say(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("'max_tokens' must be at least 1, but it is 0; 0 is only for 'echo'.", "max_tokens")
        if self.logprob_token_ids and self.echo:
            raise bad_request("'logprob_token_ids' are of the output: leave 'echo' out.", "logprob_token_ids")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return len(self.logprob_token_ids or ()) or self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """What the engine is asked for: an echo shows the prompt's log-probabilities as it does the output's."""
        if self.prompt_logprobs == -1:
            return -1
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((k for k in asked if k is not None), default=None)

    @property
    def prompt_only(self) -> bool:
        """Nothing of the output is wanted; the engine, which cannot generate nothing, is asked for one token."""
        return self.max_tokens == 0

    @property
    def token_limit(self) -> tuple[str, int | None]:
        return "max_tokens", 1 if self.prompt_only else self.max_tokens
