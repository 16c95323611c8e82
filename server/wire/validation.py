"""JSON to a pydantic model, and one short sentence for whatever does not fit."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import ApiError, bad_request, shorten

Model = TypeVar("Model", bound=BaseModel)

_repr = reprlib.Repr()  # of a value that may have millions of parts, of which a message shows the first
_repr.maxlist = _repr.maxdict = _repr.maxstring = _repr.maxlong = _repr.maxother = 40


def validated(model: type[Model], raw: Any) -> Model:
    """Raises ApiError (400)."""
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
        return unknown_parameter(param)
    value = shorten(_repr.repr(error["input"]), 30)
    if kind in _TYPES:
        return bad_request(f"'{param}' must be {_TYPES[kind]}, but it is {value}.", param, "invalid_type")
    if kind in _LIMITS:
        what = _LIMITS[kind](error.get("ctx", {}))
        got = "" if kind.startswith("string") else f", but it is {value}"
        return bad_request(f"'{param}' {what}{got}.", param)
    return bad_request(f"Invalid value for '{param}': {error['msg']}.", param)


def unknown_parameter(name: str) -> ApiError:
    return bad_request(f"Unknown parameter: '{shorten(name)}'.", shorten(name), "unknown_parameter")
