"""One exception, one error body: what goes wrong reaches the client in OpenAI's shape, or in Anthropic's.

Without FastAPI, as all that the front door needs in the first second.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from .client.mailbox import EngineDeadError, ShuttingDownError

if TYPE_CHECKING:
    from fastapi import FastAPI

_ANTHROPIC_PATH = re.compile(r"/v1/messages(/|$)")
_SHARED_PATH = re.compile(r"/v1/models(/|$)")  # of both APIs: the header says whose client asks
ANTHROPIC_HEADER = "anthropic-version"
CODE_HEADER = "x-error-code"  # of an error in Anthropic's shape, whose body has no place for it: the router reads it
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer that is not 200. The message is one short sentence for the person who sent the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def anthropic_body(self, request_id: str | None) -> bytes:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": kind, "message": self.message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    def response(self, scope: Scope | None = None) -> Response:
        """`scope`: of the request, whose path says what shape its client expects."""
        if scope is None or not _is_anthropic(scope):
            return Response(self.body(), self.status, self.headers, media_type="application/json")
        request_id = scope.get("state", {}).get("request_id")
        headers = {**self.headers, "request-id": request_id} if request_id else dict(self.headers)
        if self.code:
            headers[CODE_HEADER] = self.code
        return Response(self.anthropic_body(request_id), self.status, headers, media_type="application/json")


def _is_anthropic(scope: Scope) -> bool:
    path: str = scope["path"]
    if _SHARED_PATH.search(path):
        return any(name == ANTHROPIC_HEADER.encode() for name, _ in scope.get("headers", ()))
    return _ANTHROPIC_PATH.search(path) is not None


class ClientDisconnected(Exception):
    """The client left before its answer was ready; nobody reads what is returned now."""


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, what: str | None = None) -> ApiError:
    """For what would change the answer and is not built: better refused than silently ignored."""
    return bad_request(f"{what or repr(param)} is not supported by this server.", param, "unsupported_parameter")


def model_not_found(name: str, served: Sequence[str]) -> ApiError:
    """`served`: names, of which eight are told."""
    told = ", ".join(f"`{shorten(one)}`" for one in served[:8])
    more = f" and {len(served) - 8} more, see /v1/models" if len(served) > 8 else ""
    message = f"The model `{shorten(name)}` does not exist; this server has {told}{more}."
    return ApiError(404, message, param="model", code="model_not_found")


def context_length_exceeded(limit: int, num_prompt: int, num_output: int | None, param: str) -> ApiError:
    # Agent frameworks match the opening words to shorten their history and try again.
    message = f"This model's maximum context length is {limit} tokens. However, "
    if num_output is None:
        message += f"your prompt contains {num_prompt} input tokens. Please reduce the length of the input prompt."
    else:
        message += (
            f"you requested {num_output} output tokens and your prompt contains {num_prompt} input tokens, for a total "
            f"of {num_prompt + num_output} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens."
        )
    return bad_request(message, param, "context_length_exceeded")


def engine_dead(cause: str, retry_after: int = 5) -> ApiError:
    return ApiError(
        503,
        f"The engine died: {cause}",
        type="service_unavailable_error",
        code="engine_dead",
        headers={"retry-after": str(retry_after)},
    )


def engine_silent() -> ApiError:
    return ApiError(
        503,
        "The engine does not answer: it may hang, or do something long.",
        type="service_unavailable_error",
        code="engine_silent",
        headers={"retry-after": "5"},
    )


def adapter_unavailable(name: str) -> ApiError:
    """Its files are no longer what was loaded, or an engine that started again could not load them."""
    # 503: the request is not at fault, and a router asks another server, which may have the adapter still. This one
    # says so until somebody loads it again: clients' libraries need not repeat themselves.
    return ApiError(
        503,
        f"The adapter `{shorten(name)}` cannot be used now: its files are not what was loaded, or are gone. Whoever "
        "runs the server has to load it again; its log says more.",
        type="service_unavailable_error",
        param="model",
        code="adapter_unavailable",
        headers={"x-should-retry": "false"},
    )


def took_too_long(limit: float) -> ApiError:
    """`limit`: --request-timeout, in seconds."""
    return ApiError(
        408,
        f"The request took longer than --request-timeout, {limit:g} s.",
        type="timeout_error",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "The server is shutting down.",
        type="service_unavailable_error",
        code="server_shutting_down",
        headers={"retry-after": "5", "connection": "close"},
    )


def unavailable(error: EngineDeadError) -> ApiError:
    return shutting_down() if isinstance(error, ShuttingDownError) else engine_dead(str(error))


def still_loading(phase: str) -> ApiError:
    return ApiError(
        503,
        f"The model is still loading ({phase}).",
        type="service_unavailable_error",
        code="model_loading",
        headers={"retry-after": "1"},
    )


def internal_error(request_id: str) -> ApiError:
    return ApiError(500, f"Internal error; the server's log has more under request {request_id}.", type="server_error")


def shorten(value: Any, limit: int = 60) -> str:
    """A value as it may appear in a one-line message."""
    text = value if isinstance(value, str) else repr(value)
    head = " ".join(text[: 16 * limit].split())  # of a text that may be megabytes of words
    return head if len(head) <= limit and len(text) <= 16 * limit else head[: limit - 1] + "…"


def add_error_handlers(app: FastAPI) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(request.scope)

    async def dead_engine(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineDeadError)
        return unavailable(error).response(request.scope)

    async def disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    @cache
    def paths() -> list[str]:
        return [route.path for route in app.routes if isinstance(route, Route) and route.include_in_schema]

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]  # request.url is made of the Host header too
        code = None
        if error.status_code == 404:
            message, code = f"Unknown path {shorten(path)}.", "unknown_url"
            if near := difflib.get_close_matches(path[:200], paths(), n=1, cutoff=0.7):
                message = f"Unknown path {shorten(path)}; did you mean {near[0]}?"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            message, code = f"{request.method} is not allowed for {shorten(path)}; use {allowed}.", "method_not_allowed"
        else:
            message = str(error.detail)
        return ApiError(error.status_code, message, code=code, headers=error.headers).response(request.scope)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(EngineDeadError, dead_engine)
    app.add_exception_handler(ClientDisconnected, disconnected)
    app.add_exception_handler(HTTPException, http_error)
