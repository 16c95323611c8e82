"""The answers on the wire, for the OpenAPI document alone: handlers encode them by hand. A test compares the two."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class Schema(BaseModel):
    """An answer has these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Schema):
    message: str = Field(description="one sentence for a person")
    type: str
    param: str | None = Field(description="the field of the request that is at fault")
    code: str | None


class Error(Schema):
    error: ErrorDetail


class PromptTokensDetails(Schema):
    cached_tokens: int = Field(description="taken from the prefix cache")


class CompletionTokensDetails(Schema):
    reasoning_tokens: int


class Usage(Schema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(Schema):
    token: str
    logprob: float = Field(description="-9999 stands for minus infinity")
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Schema):
    content: list[TokenLogprob]
    refusal: None


class PromptLogprob(Schema):
    logprob: float
    rank: int = Field(description="1 is the likeliest token")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; null for the first token


class FunctionCall(Schema):
    name: str
    arguments: str = Field(description="JSON")


class ToolCall(Schema):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Schema):
    role: Literal["assistant"]
    content: str | None = Field(description="null beside tool calls or reasoning where nothing else was said")
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: str | None
    reasoning_content: str | None = Field(None, description="the same under its other name")
    tool_calls: list[ToolCall] | None = Field(None, description="where tools are called")


class ChatChoice(Schema):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = Field(
        description="stop string or token, null at the model's own end; abort: cancelled; repetition: in circles"
    )
    token_ids: list[int] | None = Field(description="with return_token_ids")


class RequestMetrics(Schema):
    time_to_first_token_ms: float | None = Field(description="from its first step to its first token")
    generation_time_ms: float | None = Field(description="from its first token to its last")
    queue_time_ms: float | None = Field(description="until its first step")
    mean_itl_ms: float | None = Field(description="between tokens, the mean")
    tokens_per_second: float | None = Field(description="from its first step to its last token")
    prompt_tokens: int
    cached_tokens: int = Field(description="of the prompt's, those that the cache held")


class ChatCompletion(Schema):
    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Unix time")
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: None
    system_fingerprint: None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None = Field(description="with return_token_ids")
    kv_transfer_params: None
    metrics: RequestMetrics | None = Field(None, description="with --enable-per-request-metrics, of one choice")


class FunctionCallDelta(Schema):
    name: str | None = None
    arguments: str = Field(description="more of the JSON text")


class ToolCallDelta(Schema):
    """Id, type and name come once, with empty arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class ChatDelta(Schema):
    role: Literal["assistant"] | None = Field(None, description="in the first chunk of a choice")
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = Field(None, description="the same under its other name")
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Schema):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = Field(None, description="with the finish reason")
    token_ids: list[int] | None = None


class ChatCompletionChunk(Schema):
    """One event of a streamed answer; after the last one comes `data: [DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice] = Field(description="empty in the chunk that has the usage")
    usage: Usage | None = Field(None, description="with stream_options.include_usage, or continuous_usage_stats")
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics | None = Field(None, description="with --enable-per-request-metrics, of one choice")


class CompletionLogprobs(Schema):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Schema):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class Completion(Schema):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: None
    system_fingerprint: None
    kv_transfer_params: None
    metrics: RequestMetrics | None = Field(None, description="with --enable-per-request-metrics, of one choice")


class CompletionChunkChoice(Schema):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChunk(Schema):
    """One event of a streamed answer; after the last one comes `data: [DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = Field(None, description="with --enable-per-request-metrics, of one choice")


class ModelPermission(Schema):
    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class Model(Schema):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    modalities: list[Literal["text", "image"]] = Field(description="what a prompt may have")
    max_model_len: int
    tasks: list[str] = Field(description="generate, embed, classify, reward: what requests may ask for")
    permission: list[ModelPermission]


class ModelList(Schema):
    object: Literal["list"]
    data: list[Model]


class Tokens(Schema):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = Field(description="with return_token_strs")


class Embedding(Schema):
    object: Literal["embedding"]
    index: int = Field(description="of the input")
    embedding: list[float] | str = Field(description="numbers, or with base64 their little-endian float32 bytes")


class EmbeddingUsage(Schema):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Schema):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Text(Schema):
    prompt: str


class Load(Schema):
    server_load: int


class Version(Schema):
    version: str


class Cancelled(Schema):
    id: str
    object: Literal["request.cancelled"]
    cancelled: int = Field(description="how many requests had this id")


class Reloaded(Schema):
    reloaded: list[Literal["keys", "certificates"]]


class Scaled(Schema):
    message: str
    data_parallel_size: int = Field(description="engines that serve now")


class Setting(Schema):
    value: bool | int | float | str | list[str] | None
    source: str = Field(
        description="default; flag, environment, file, preset; model, device, fitted (to memory or another setting)"
    )


class ServedModel(Schema):
    names: list[str]
    root: str
    vocab_size: int
    eos_token_ids: list[int]
    chat_template: bool
    tool_format: str | None = Field(None, description="of tool calls; null: they stay text")
    reasoning_format: str | None = Field(None, description="of reasoning; null: it stays in the text")


class TemplateInfo(Schema):
    """What the chat template was found to take."""

    deviations: list[str] = Field(description="a line for each thing that is not taken as clients send it")
    capabilities: dict[str, bool | str | list[str]]


class EngineStep(Schema):
    step: int
    time: float = Field(description="when its result was in, Unix time")
    num_requests: int
    num_tokens: int = Field(description="computed, of prompts and answers")
    num_decodes: int = Field(description="requests that computed one token")
    host_seconds: float
    device_seconds: float


class SecondModel(Schema):
    """Of --embedding-model."""

    names: list[str]
    tasks: list[str]
    settings: dict[str, bool | int | float | str] = Field(description="of its engine")
    memory: dict[str, int] = Field(description="bytes by purpose")
    startup_seconds: dict[str, float]


class ServerInfo(Schema):
    version: str
    started: int = Field(description="Unix time")
    model: ServedModel
    chat_template: TemplateInfo | None = Field(None, description="null: there is none that can be used")
    embedding_model: SecondModel | None = None
    settings: dict[str, Setting]
    sampling_defaults: dict[str, Setting]
    num_blocks: int
    memory: dict[str, int] = Field(description="bytes by purpose")
    startup_seconds: dict[str, float]
    experts: dict[str, str | int] | None = Field(
        None, description="of a mixture: layers, experts, experts_per_token, on_this_rank, ranks, products"
    )
    quantization: dict[str, str | int] | None = Field(
        None, description="method, formats, products, how many matrices are quantized and how many not, bytes"
    )
    kv_cache: dict[str, str | int] = Field(
        default={}, description="dtype; how many share a scale (none: these are numbers); bytes of a block"
    )
    steps: list[EngineStep] = Field(default=[], description="the last ones, where they are asked for; the latest last")


class Health(BaseModel):
    """Why the server takes no requests."""

    status: str
