"""Why a connection ends, in the words of an answer."""

from __future__ import annotations

from ..errors import ApiError


class Refusal(Exception):
    """Ends the connection with an answer. The code is also the name under which it is counted."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.code = code
        kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
        self.error = ApiError(status, message, type=kind, code=code, headers=headers)


def malformed(why: str) -> Refusal:
    return Refusal(400, "malformed_request", f"The request is not valid HTTP/1.1: {why}.")
