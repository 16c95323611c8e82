"""The id of a request, which its answer, its line in the log and its span have in common."""

from __future__ import annotations

import re
import uuid

MAX_ID_LENGTH = 128
# What a router sends a server on with each request, for the ids that the server makes: with it any router finds the
# server again, also one that was started since.
TAG_HEADER = "x-server-tag"
TAG_LENGTH = 8
_TAG = re.compile(rf"[0-9a-f]{{{TAG_LENGTH}}}")
_TAGGED = re.compile(rf"(?:[a-z]+[-_])?({_TAG.pattern})")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:-]+")


def clean_id(raw: str) -> str:
    """A request id that is safe in headers, logs and JSON; a new one where nothing safe is left."""
    return _UNSAFE.sub("", raw)[:MAX_ID_LENGTH] or uuid.uuid4().hex


def new_id(tag: str | None) -> str:
    """128 random bits as hex digits, behind the tag where it is one."""
    return (tag if tag and _TAG.fullmatch(tag) else "") + uuid.uuid4().hex


def tag_of(id: str) -> str:
    """Where an id such as `resp_…`, `chatcmpl-…` or a request's own begins with a tag, that."""
    found = _TAGGED.match(id)
    return found[1] if found else ""
