"""What the routes around prompts answer, for the OpenAPI document."""

from __future__ import annotations

from pydantic import BaseModel, Field, RootModel

from .answers import Schema
from .requests import ChatRequest, CompletionRequest


class WithOffsets(BaseModel):
    """What a request has beside its own fields where it is to be rendered alone."""

    return_token_offsets: bool | None = Field(None, description="where in the text each token is")


class RenderChat(WithOffsets, ChatRequest):
    pass


class RenderCompletion(WithOffsets, CompletionRequest):
    pass


class SamplingSettings(Schema):
    """As the engine would be asked, with the model's defaults filled in."""

    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    min_tokens: int
    max_tokens: int = Field(description="0: the prompt fills the context")
    logprobs: int | None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    bad_words: list[str]
    allowed_token_ids: list[int] | None
    logit_bias: dict[str, float] | None
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool


class RenderedStreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerateRequest(Schema):
    """vLLM's request of generating from tokens."""

    request_id: str
    token_ids: list[int]
    features: None
    sampling_params: SamplingSettings
    model: str
    stream: bool
    stream_options: RenderedStreamOptions | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


class RenderedText(GenerateRequest):
    token_offsets: list[tuple[int, int]] | None = Field(
        None, description="where each token begins and ends, in characters, where that was asked for and can be told"
    )


class RenderedCompletions(RootModel[list[RenderedText]]):
    """One for each prompt."""


class AddedToken(Schema):
    content: str
    lstrip: bool
    normalized: bool
    rstrip: bool
    single_word: bool
    special: bool


class TokenizerInfo(Schema):
    tokenizer_class: str
    model_max_length: int = Field(description="tokens of the context")
    vocab_size: int
    special_tokens: dict[str, str] = Field(description="by name: eos_token, bos_token and so on")
    added_tokens_decoder: dict[str, AddedToken] = Field(description="by id")
    chat_template: str | None


class RenderedPrompt(RenderedText):
    prompt: str = Field(description="what the chat template makes of the messages")
    prompt_token_ids: list[int]
    count: int
    max_model_len: int
