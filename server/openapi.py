"""The OpenAPI document: FastAPI's list of routes, with the bodies that handlers read and write themselves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse
from starlette.routing import Route

from ..engine.link.messages import HISTORY
from .dialects.cohere.request import CohereChatRequest
from .dialects.cohere.schemas import CohereChat, CohereEvent
from .dialects.messages.request import CountRequest, MessagesRequest, RenderMessages
from .dialects.messages.schemas import AnthropicError, MessageEvent, MessageObject, TokenCount
from .dialects.responses.compact_request import CompactRequest
from .dialects.responses.conversations import (
    Conversation,
    ConversationUpdate,
    DeletedConversation,
    NewConversation,
    NewItems,
)
from .dialects.responses.request import RenderResponse, ResponsesRequest
from .dialects.responses.schemas import (
    CompactedResponse,
    DeletedResponse,
    InputItems,
    InputTokens,
    ListedItem,
    ResponseEvent,
    ResponseObject,
)
from .http.docs_page import SECURITY_POLICY, docs_page
from .wire import answers as responses
from .wire import batches, pooled_answers, rendered, tokens_in
from .wire.adapters import LoadAdapterRequest, UnloadAdapterRequest
from .wire.chat_batch import ChatBatch
from .wire.embeddings import CohereEmbedRequest, EmbeddingRequest
from .wire.invocations import Invocation, InvocationAnswer, InvocationChunk, ListedModel, ListedModels
from .wire.pooled import ClassifyRequest, PoolingRequest
from .wire.requests import ChatRequest, CompletionRequest
from .wire.scaling import ElasticRequest, ScaleRequest
from .wire.scores import RerankRequest, ScoreRequest
from .wire.stored_chats import ChatUpdate, DeletedChat, StoredChat, StoredChats, StoredMessages
from .wire.tokens import AbortRequest, DetokenizeRequest, TokenizeRequest

JSON = "application/json"
PATH = "/openapi.json"
DOCS = ("/docs", "/redoc")  # one page, under the names that people know
_MEANINGS = {
    400: "The request is wrong; the message says where.",
    401: "A key is missing or wrong.",
    403: "The key that this needs is another one; the message says which.",
    404: "There is no such model or request.",
    408: "The request took too long.",
    409: "Something else is under way.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    422: "What the model wrote cannot be used; the message says why.",
    429: "Too many requests wait; the header Retry-After says when to come back.",
    500: "The server is at fault.",
    503: "The engine cannot serve now; the header Retry-After says when to come back.",
}


@dataclass(frozen=True)
class Operation:
    """What one route takes and gives."""

    path: str
    answer: type[BaseModel] | None  # None: nothing, or no JSON
    method: str = "post"
    body: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None  # of a stream
    errors: tuple[int, ...] = ()
    text: str = JSON
    failure: type[BaseModel] = field(default=responses.Error)
    done: bool = True  # a stream ends with [DONE]
    query: dict[str, dict[str, Any]] = field(default_factory=dict)  # name → schema
    raw: bool = False  # the answer may be bytes
    media: str = JSON  # of the body


_BODY = (400, 404, 413, 415, 503)
_GENERATION = (*_BODY, 408, 429, 500)
_PAGE: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "description": "how many (default 20)"},
    "order": {"enum": ["asc", "desc"], "description": "by age"},
    "after": {"type": "string", "description": "the id of the last one that the client has"},
}
OPERATIONS = (
    Operation("/v1/chat/completions", responses.ChatCompletion, body=ChatRequest,
              chunk=responses.ChatCompletionChunk, errors=_GENERATION),
    Operation("/v1/chat/completions/batch", responses.ChatCompletion, body=ChatBatch, errors=_GENERATION),
    Operation("/v1/chat/completions", StoredChats, "get", errors=(400,), query=_PAGE | {
        "model": {"type": "string", "description": "those of this model"},
        "metadata": {"type": "object", "description": "those with these labels, metadata[name]=value"}}),
    Operation("/v1/chat/completions/{completion_id}", StoredChat, "get", errors=(404,)),
    Operation("/v1/chat/completions/{completion_id}", StoredChat, body=ChatUpdate, errors=(400, 404, 413, 415)),
    Operation("/v1/chat/completions/{completion_id}", DeletedChat, "delete", errors=(404,)),
    Operation("/v1/chat/completions/{completion_id}/messages", StoredMessages, "get", errors=(400, 404), query=_PAGE),
    Operation("/v1/completions", responses.Completion, body=CompletionRequest, chunk=responses.CompletionChunk,
              errors=_GENERATION),
    Operation("/v1/responses", ResponseObject, body=ResponsesRequest, chunk=ResponseEvent, errors=_GENERATION,
              done=False),
    Operation("/v1/responses/{response_id}", ResponseObject, "get", chunk=ResponseEvent, errors=(400, 404), done=False,
              query={"stream": {"type": "boolean", "description": "its events, where it was told to run in background "
                                "and to stream"},
                     "starting_after": {"type": "integer", "description": "those after this sequence number"}}),
    Operation("/v1/responses/{response_id}", DeletedResponse, "delete", errors=(400, 404)),
    Operation("/v1/responses/{response_id}/input_items", InputItems, "get", errors=(400, 404), query=_PAGE),
    Operation("/v1/responses/input_tokens", InputTokens, body=ResponsesRequest, errors=_BODY),
    Operation("/v1/responses/compact", CompactedResponse, body=CompactRequest, errors=(*_GENERATION, 422)),
    Operation("/v1/responses/{response_id}/cancel", ResponseObject, errors=(400, 404)),
    Operation("/v1/conversations", Conversation, body=NewConversation, errors=(400, 413, 415)),
    *(Operation("/v1/conversations/{conversation_id}", answer, method, body=body, errors=errors)
      for answer, method, body, errors in (
          (Conversation, "get", None, (404,)), (Conversation, "post", ConversationUpdate, (400, 404, 413, 415)),
          (DeletedConversation, "delete", None, (404,)))),
    Operation("/v1/conversations/{conversation_id}/items", InputItems, "get", errors=(400, 404), query=_PAGE),
    Operation("/v1/conversations/{conversation_id}/items", InputItems, body=NewItems, errors=(400, 404, 413, 415)),
    Operation("/v1/conversations/{conversation_id}/items/{item_id}", ListedItem, "get", errors=(404,)),
    Operation("/v1/conversations/{conversation_id}/items/{item_id}", Conversation, "delete", errors=(404,)),
    Operation("/v1/files", batches.FileObject, body=batches.FileUpload, errors=(400, 413, 415, 429),
              media="multipart/form-data"),
    Operation("/v1/files", batches.FileList, "get", errors=(400,), query=_PAGE | {
        "purpose": {"enum": ["batch", "batch_output"], "description": "those of this purpose"}}),
    Operation("/v1/files/{file_id}", batches.FileObject, "get", errors=(400, 404)),
    Operation("/v1/files/{file_id}", batches.DeletedFile, "delete", errors=(400, 404, 409)),
    Operation("/v1/files/{file_id}/content", None, "get", errors=(400, 404), text="application/octet-stream"),
    Operation("/v1/batches", batches.BatchObject, body=batches.BatchRequest, errors=(*_BODY, 429)),
    Operation("/v1/batches", batches.BatchList, "get", errors=(400,), query=_PAGE),
    Operation("/v1/batches/{batch_id}", batches.BatchObject, "get", errors=(400, 404)),
    Operation("/v1/batches/{batch_id}/cancel", batches.BatchObject, errors=(400, 404)),
    Operation("/v1/messages", MessageObject, body=MessagesRequest, chunk=MessageEvent, errors=_GENERATION,
              failure=AnthropicError, done=False),
    Operation("/v1/messages/count_tokens", TokenCount, body=CountRequest, errors=_BODY, failure=AnthropicError),
    Operation("/v2/chat", CohereChat, body=CohereChatRequest, chunk=CohereEvent, errors=_GENERATION),
    Operation("/v1/embeddings", responses.EmbeddingList, body=EmbeddingRequest, errors=_GENERATION, raw=True),
    Operation("/v2/embed", pooled_answers.CohereEmbeddings, body=CohereEmbedRequest, errors=_GENERATION),
    Operation("/classify", pooled_answers.ClassesList, body=ClassifyRequest, errors=_GENERATION),
    Operation("/pooling", pooled_answers.PooledList, body=PoolingRequest, errors=_GENERATION, raw=True),
    *(Operation(path, pooled_answers.ScoreList, body=ScoreRequest, errors=_GENERATION)
      for path in ("/score", "/v1/score")),
    *(Operation(path, pooled_answers.Ranking, body=RerankRequest, errors=_GENERATION)
      for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    Operation("/v1/chat/completions/render", rendered.RenderedPrompt, body=rendered.RenderChat, errors=_BODY),
    Operation("/v1/responses/render", rendered.RenderedPrompt, body=RenderResponse, errors=_BODY),
    Operation("/v1/messages/render", rendered.RenderedPrompt, body=RenderMessages, errors=_BODY,
              failure=AnthropicError),
    Operation("/v1/completions/render", rendered.RenderedCompletions, body=rendered.RenderCompletion, errors=_BODY),
    Operation("/v1/chat/completions/derender", tokens_in.DerenderedChat, body=tokens_in.DerenderChat, errors=_BODY),
    Operation("/v1/completions/derender", tokens_in.DerenderedCompletions, body=tokens_in.DerenderCompletions,
              errors=_BODY),
    Operation("/inference/v1/generate", tokens_in.TokensAnswer, body=tokens_in.TokensRequest,
              chunk=tokens_in.TokensChunk, errors=_GENERATION),
    Operation("/tokenizer_info", rendered.TokenizerInfo, "get", errors=(503,)),
    Operation("/invocations", InvocationAnswer, body=Invocation, chunk=InvocationChunk,
              errors=_GENERATION, raw=True),
    Operation("/v1/engines/{model}/completions", responses.Completion, body=CompletionRequest,
              chunk=responses.CompletionChunk, errors=_GENERATION),
    Operation("/tokenize", responses.Tokens, body=TokenizeRequest, errors=_BODY),
    Operation("/detokenize", responses.Text, body=DetokenizeRequest, errors=_BODY),
    Operation("/v1/models", ListedModels, "get", errors=(400, 503), query={
        name: {"type": kind, "description": f"{what}, with the header anthropic-version"}
        for name, kind, what in (("limit", "integer", "how many"), ("after_id", "string", "those after this one"),
                                 ("before_id", "string", "those before this one"))}),
    Operation("/v1/models/{model}", ListedModel, "get", errors=(404, 503)),
    Operation("/v1/requests/{request_id}/cancel", responses.Cancelled, errors=(404,)),
    Operation("/abort_request", responses.Cancelled, body=AbortRequest, errors=(400, 404, 413, 415)),
    Operation("/v1/load_lora_adapter", None, body=LoadAdapterRequest, errors=_BODY, text="text/plain"),
    Operation("/v1/unload_lora_adapter", None, body=UnloadAdapterRequest, errors=_BODY, text="text/plain"),
    Operation("/load", responses.Load, "get"),
    Operation("/server_info", responses.ServerInfo, "get", errors=(400, 503), query={
        "steps": {"type": "integer", "minimum": 1, "maximum": HISTORY, "description": "how many of the engine's last "
                  "steps to tell of"}}),
    Operation("/reload", responses.Reloaded, errors=(500,)),
    Operation("/scale_data_parallel", responses.Scaled, body=ScaleRequest, errors=(400, 403, 409, 413, 415, 500, 503)),
    Operation("/scale_elastic_ep", responses.Scaled, body=ElasticRequest, errors=(400, 403, 409, 413, 415, 500, 503)),
    Operation("/version", responses.Version, "get"),
    Operation("/metrics", None, "get", text="text/plain"),
    *(Operation(path, None, "get", errors=(503,), text="", failure=responses.Health)
      for path in ("/health", "/readyz", "/livez")),
)  # fmt: skip


def add_openapi(app: FastAPI) -> None:
    """Has the document made when it is first asked for, on a thread: it takes 150 ms, and nobody else should wait."""
    lock = Lock()

    def make() -> dict[str, Any]:
        with lock:
            return openapi(app)

    app.openapi = make  # type: ignore[method-assign]
    position, route = next((i, r) for i, r in enumerate(app.routes) if isinstance(r, Route) and r.path == PATH)

    async def document(request: Request) -> Response:
        if app.openapi_schema is None:
            await asyncio.to_thread(make)
        response: Response = await route.endpoint(request)
        return response

    app.routes[position] = Route(PATH, document, include_in_schema=False)

    async def page(request: Request) -> Response:
        content = await asyncio.to_thread(lambda: docs_page(make()))
        return HTMLResponse(content, headers={"content-security-policy": SECURITY_POLICY})

    for path in DOCS:
        app.routes.append(Route(path, page, include_in_schema=False))


def openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        document.setdefault("components", {})["schemas"] = _schemas()
        for operation in OPERATIONS:
            described = document["paths"][operation.path][operation.method]
            if operation.body is not None:
                described["requestBody"] = {"required": True, "content": {operation.media: _reference(operation.body)}}
            if operation.query:
                described["parameters"] = [
                    {"name": name, "in": "query", "required": False, "schema": schema}
                    for name, schema in operation.query.items()
                ]
            described["responses"] = _responses(operation)
        app.openapi_schema = document
    return app.openapi_schema


def _schemas() -> dict[str, Any]:
    bodies = {operation.body for operation in OPERATIONS if operation.body is not None}
    answers: set[type[BaseModel]] = set()
    for operation in OPERATIONS:
        answers |= {model for model in (operation.answer, operation.chunk, operation.failure) if model is not None}
    models: list[Any] = [(model, "validation") for model in sorted(bodies | answers, key=lambda model: model.__name__)]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    return schemas["$defs"]


def _responses(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content[JSON] = _reference(operation.answer)
    elif operation.text:
        content[operation.text] = {"schema": {"type": "string"}}
    if operation.raw:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    if operation.chunk is not None:
        said = {"anyOf": [_reference(model)["schema"] for model in (operation.chunk, operation.failure)]}
        data = {"type": "string", "contentMediaType": JSON, "contentSchema": said}
        # OpenAPI 3.1 has no words for events: the schema is that of each one, as OpenAPI 3.2 would have it.
        content["text/event-stream"] = {
            "schema": {
                "type": "object",
                "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}] if operation.done else [data]}},
                "required": ["data"],
            }
        }
    answer = {"description": "As asked."} | ({"content": content} if content else {})
    failures = {
        str(status): {"description": _MEANINGS[status], "content": {JSON: _reference(operation.failure)}}
        for status in sorted({401, *operation.errors})
    }
    return {"200": answer, **failures}


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
