"""A body of multipart/form-data, as those send it who upload a file (RFC 7578)."""

from __future__ import annotations

import re
from email.message import Message
from typing import NamedTuple

from ..errors import ApiError, bad_request

MOST_PARTS = 32
LONGEST_HEAD = 4096  # bytes of the headers of a part
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{1,70}")


class Part(NamedTuple):
    content: bytes
    filename: str | None  # None: a field, and no file


def check_form(content_type: str) -> bytes:
    """What parts the parts. Raises ApiError (415)."""
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        text = "Unsupported Media Type: a file comes as 'multipart/form-data', with fields 'purpose' and 'file'."
        raise ApiError(415, text, code="unsupported_media_type")
    if not _BOUNDARY.fullmatch(boundary):
        raise bad_request("The boundary of the form is none: it has 1 to 70 characters.", None)
    return b"\r\n--" + boundary.encode()


def read_form(body: bytes, boundary: bytes) -> dict[str, Part]:
    """By name. `boundary`: of check_form. Raises ApiError (400)."""
    pieces = (b"\r\n" + body).split(boundary, MOST_PARTS + 2)
    if len(pieces) > MOST_PARTS + 2:
        raise bad_request(f"The form has too many parts; at most {MOST_PARTS} are read.", None)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise bad_request("The form has no end: its last line is the boundary with two hyphens behind it.", None)
    parts: dict[str, Part] = {}
    for piece in pieces[1:-1]:
        head, found, content = piece.partition(b"\r\n\r\n")
        if not found or len(head) > LONGEST_HEAD:
            raise bad_request("A part of the form has no headers, or too long ones.", None)
        name, filename = _named(head)
        if name in parts:
            raise bad_request(f"The form has {name!r:.60} twice: leave one out.", None)
        parts[name] = Part(content, filename)
    return parts


def _named(head: bytes) -> tuple[str, str | None]:
    """(name of the field, of the file). Raises ApiError (400)."""
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            message = Message()
            message["content-disposition"] = value.decode(errors="replace").strip().replace("\n", " ")
            name, filename = (message.get_param(word, header="content-disposition") for word in ("name", "filename"))
            if isinstance(name, str) and message.get_content_disposition() == "form-data":
                return name, filename if isinstance(filename, str) else None
    raise bad_request("A part of the form has no name: its Content-Disposition is form-data with a name.", None)
