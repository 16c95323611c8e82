"""The many ways to ask for structured output (response_format, structured_outputs, guided_*) as one Constraint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Required

import msgspec
from typing_extensions import TypedDict

from ..errors import ApiError, bad_request, shorten
from ..options.text import BACKENDS
from .constraint import Constraint

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
MAX_TEXT = 512 * 1024  # characters of JSON that comes as text: more is not compiled
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


# The shapes, for the OpenAPI document.
class JsonSchema(TypedDict, total=False):
    name: str
    description: str | None
    schema: Required[dict[str, Any]]
    strict: bool | None  # output always follows the schema, whatever this says


class ResponseFormat(TypedDict, total=False):
    type: Required[Literal["text", "json_object", "json_schema", "structural_tag"]]
    json_schema: JsonSchema
    schema: dict[str, Any] | None  # of json_object, which then follows it
    format: dict[str, Any]  # of a structural tag
    structures: list[dict[str, Any]]  # of a structural tag in its older form
    triggers: list[str]


class StructuredOutputs(TypedDict, total=False):
    """One of the first six."""

    json: dict[str, Any] | str
    regex: str
    choice: list[str]
    grammar: str
    json_object: bool
    structural_tag: dict[str, Any] | str
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str
    backend: str  # one of BACKENDS; no two answers differ by it
    disable_fallback: bool


def constraint(
    response_format: Any = None, structured_outputs: Any = None, guided: Mapping[str, Any] | None = None
) -> tuple[str, Constraint] | None:
    """(the parameter that asks for it, what it asks for); None for free text.

    `guided`: the older fields by their names. Raises ApiError (400) for what is malformed and for contradictions.
    """
    asked: list[tuple[str, Constraint]] = []
    if (one := _response_format(response_format)) is not None:
        asked.append(("response_format", one))
    if structured_outputs is not None:
        asked.append(("structured_outputs", _structured_outputs(structured_outputs, "structured_outputs")))
    asked += _guided(guided or {})
    if len(asked) > 1:
        first, second = asked[0][0], asked[1][0]
        raise bad_request(f"'{second}' contradicts '{first}': give only one of them.", second)
    return asked[0] if asked else None


def _response_format(value: Any) -> Constraint | None:
    if value is None:
        return None
    where = "response_format"
    if not isinstance(value, dict):
        raise bad_request(f"'{where}' must be an object.", where, "invalid_type")
    kind = value.get("type")
    if kind not in FORMATS:
        if kind is None:
            message, code = f"Missing required parameter: '{where}.type'.", "missing_required_parameter"
            raise bad_request(message, f"{where}.type", code)
        raise bad_request(
            f"'{where}.type' must be one of {', '.join(FORMATS)}, but it is {shorten(kind)!r}.", f"{where}.type"
        )
    if kind == "text":
        return None
    if kind == "json_object":  # as llama.cpp and Together have it, with the schema beside the type
        schema = value.get("schema")
        return (
            Constraint("json_object", "") if schema is None else Constraint("json", _object(schema, f"{where}.schema"))
        )
    if kind == "structural_tag":
        return Constraint("structural_tag", _canonical(value, where))
    holder = value.get("json_schema")
    if not isinstance(holder, dict):
        raise bad_request(f"'{where}.json_schema' must be an object with a schema.", f"{where}.json_schema")
    schema = holder.get("schema")
    if schema is None:
        message = f"Missing required parameter: '{where}.json_schema.schema'."
        raise bad_request(message, f"{where}.json_schema.schema", "missing_required_parameter")
    return Constraint("json", _object(schema, f"{where}.json_schema.schema"))


def _structured_outputs(value: Any, where: str) -> Constraint:
    if not isinstance(value, dict):
        raise bad_request(f"'{where}' must be an object.", where, "invalid_type")
    options = {"disable_fallback": bool, "whitespace_pattern": str, "backend": str}
    options |= dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), bool)
    for name, given in value.items():
        if name not in KINDS and name not in options:
            raise bad_request(f"Unknown parameter: '{where}.{shorten(name)}'.", f"{where}.{shorten(name)}")
        if name in options and given is not None and not isinstance(given, options[name]):
            what = "a boolean" if options[name] is bool else "a string"
            raise bad_request(f"'{where}.{name}' must be {what}.", f"{where}.{name}", "invalid_type")
    if value.get("backend") not in (None, *BACKENDS):
        name = f"{where}.backend"
        raise bad_request(f"'{name}' is {shorten(value['backend'])!r}; choose one of {', '.join(BACKENDS)}.", name)
    kinds = [name for name in KINDS if value.get(name) is not None and value[name] is not False]
    if len(kinds) != 1:
        found = f"it has {' and '.join(kinds)}" if kinds else "it has none"
        raise bad_request(f"'{where}' must have exactly one of {', '.join(KINDS)}, but {found}.", where)
    kind = kinds[0]
    return Constraint(
        kind,  # type: ignore[arg-type]
        _source(kind, value[kind], f"{where}.{kind}"),
        any_whitespace=not value.get("disable_any_whitespace"),
        whitespace_pattern=value.get("whitespace_pattern"),
        additional_properties=not value.get("disable_additional_properties"),
    )


def _guided(fields: Mapping[str, Any]) -> list[tuple[str, Constraint]]:
    asked = []
    pattern = fields.get("guided_whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        name = "guided_whitespace_pattern"
        raise bad_request(f"'{name}' must be a string.", name, "invalid_type")
    for kind in KINDS:
        name = f"guided_{kind}"
        value = fields.get(name)
        if value is not None and value is not False:
            source = _source(kind, value, name)
            asked.append((name, Constraint(kind, source, whitespace_pattern=pattern)))  # type: ignore[arg-type]
    return asked


def _source(kind: str, value: Any, where: str) -> str:
    """The text of a Constraint."""
    if kind == "json_object":
        if value is not True:
            raise bad_request(f"'{where}' must be a boolean.", where, "invalid_type")
        return ""
    if kind in ("json", "structural_tag"):
        return _object(value, where)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise bad_request(f"'{where}' must be a list of strings, none of them empty.", where)
        return _canonical(value, where)
    if not isinstance(value, str) or not value:
        raise bad_request(f"'{where}' must be a string that is not empty.", where, "invalid_type")
    return value


def _object(value: Any, where: str) -> str:
    """A JSON object, given as one or as its text."""
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            message = f"'{where}' has {len(value)} characters: at most {MAX_TEXT} are allowed; simplify it."
            raise bad_request(message, where)
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise bad_request(f"'{where}' is not valid JSON: {shorten(str(error))}.", where) from None
    if not isinstance(value, dict):
        raise bad_request(f"'{where}' must be an object.", where, "invalid_type")
    return _canonical(value, where)


def _canonical(value: Any, where: str) -> str:
    """Compact JSON. The order of keys stays: the output has its properties in that order."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise too_deep(where) from None


def too_deep(where: str) -> ApiError:
    return bad_request(f"'{where}' is nested too deeply.", where)
