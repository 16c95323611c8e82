"""The pictures of a conversation as its messages name them, and the same messages with a mark for each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from ..errors import ApiError, bad_request, shorten, unsupported

TYPES = ("image_url", "input_image")  # of content parts: chat completions', and those of responses
ROLES = ("user", "tool", "function")  # whose messages may have pictures
MAX_URL = 8192  # characters of a URL that is no data URL
MAX_UUID = 256
_DATA = re.compile(r"data:([^,]*),", re.IGNORECASE)
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):")
SCHEMES = ("http", "https", "file")

Detail = Literal["auto", "low", "high", "original"]
_DETAILS = ("auto", "low", "high", "original")


@dataclass(frozen=True, slots=True)
class Source:
    """One picture that a request brings or names."""

    where: str  # the content part, as errors name it
    url: str  # http, https or file; empty where `encoded` has it
    encoded: str  # base64 of the file, as the request has brought it
    detail: Detail = "auto"
    uuid: str | None = None  # the client's own name of it; url and encoded may then be empty


def is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in TYPES


def num_bytes(messages: list[dict[str, Any]]) -> int:
    """What the pictures in messages take of a body, about; they are read, but no text."""
    return sum(len(url) for part in _parts(messages) if isinstance(url := _url(part), str))


def has_pictures(messages: list[dict[str, Any]]) -> bool:
    return next(_parts(messages), None) is not None


def refused(messages: list[dict[str, Any]]) -> ApiError:
    """For a model that sees none."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if is_picture(part):
                return unsupported(f"messages[{i}].content[{j}].type", f"Content of type {part['type']!r}")
    raise ValueError("these messages have no picture")


def without(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without the data of their pictures, which may be megabytes."""
    if not has_pictures(messages):
        return messages
    found = []
    for message in messages:
        if isinstance(content := message.get("content"), list):
            message = {**message, "content": [{"type": "image"} if is_picture(part) else part for part in content]}
        found.append(message)
    return found


def _parts(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part for part in content if is_picture(part))


def _url(part: dict[str, Any]) -> Any:
    value = part.get("image_url")
    return value.get("url") if isinstance(value, dict) else value


def taken_out(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Source]]:
    """(The messages with {"type": "image", "picture": i} for picture i, the pictures). Raises ApiError (400)."""
    found: list[Source] = []
    changed = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(map(is_picture, content)):
            parts = []
            for j, part in enumerate(content):
                if is_picture(part):
                    found.append(_source(part, f"messages[{i}].content[{j}]"))
                    part = {"type": "image", "picture": len(found) - 1}
                parts.append(part)
            message = {**message, "content": parts}
        changed.append(message)
    return changed, found


def order_of(messages: list[dict[str, Any]]) -> list[int]:
    """The numbers of the pictures in messages that `taken_out` has made, as they come now."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part["picture"] for content in contents for part in content if "picture" in part]


def _source(part: dict[str, Any], where: str) -> Source:
    """Raises ApiError (400)."""
    value = part.get("image_url")
    field = f"{where}.image_url"
    detail, url = part.get("detail"), value
    if isinstance(value, dict):
        detail, url, field = value.get("detail", detail), value.get("url"), f"{field}.url"
    uuid = part.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= MAX_UUID):
        raise bad_request(f"'{where}.uuid' must be a string of 1 to {MAX_UUID} characters.", f"{where}.uuid")
    if part.get("file_id") is not None and url is None:
        raise bad_request(
            f"'{where}.file_id' is not supported by this server: give the picture as 'image_url', a URL or a data URL.",
            f"{where}.file_id", "unsupported_parameter",
        )  # fmt: skip
    if url is None and uuid is None:
        raise bad_request(f"Missing required parameter: '{field}'.", field, "missing_required_parameter")
    if url is not None and not isinstance(url, str):
        raise bad_request(f"'{field}' must be a string: a URL, or a data URL.", field, "invalid_type")
    if detail is not None and detail not in _DETAILS:
        raise bad_request(
            f"The detail of '{where}' is {shorten(detail)!r}; it must be one of {', '.join(_DETAILS)}.",
            f"{where}.image_url.detail",
        )
    address, encoded = _split(url or "", field)
    return Source(where, address, encoded, cast(Detail, detail or "auto"), uuid)


def _split(url: str, field: str) -> tuple[str, str]:
    """(The URL, "") or ("", the base64 of a data URL). Raises ApiError (400)."""
    if not url:
        return "", ""
    if (data := _DATA.match(url)) is not None:
        kind, *parameters = data[1].lower().split(";")
        if "base64" not in (one.strip() for one in parameters):
            raise bad_request(f"'{field}' is a data URL that is no base64: give 'data:image/png;base64,…'.", field)
        if kind and not kind.startswith("image/") and kind != "application/octet-stream":
            raise bad_request(f"'{field}' is of type {shorten(kind)!r}: only pictures (image/…) are read.", field)
        return "", url[data.end() :]
    scheme = _SCHEME.match(url)
    if scheme is None or scheme[1].lower() not in SCHEMES:
        raise bad_request(
            f"'{field}' is {shorten(url)!r}: it must begin with https://, http:// or data:image/…;base64,.", field
        )
    if len(url) > MAX_URL:
        raise bad_request(f"'{field}' has {len(url)} characters; at most {MAX_URL} are allowed.", field)
    return url, ""
