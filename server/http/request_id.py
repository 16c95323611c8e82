"""The id of a request, which its answer, its line in the log and its span have in common."""

from __future__ import annotations

import re
import uuid

MAX_ID_LENGTH = 128
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:-]+")


def clean_id(raw: str) -> str:
    """A request id that is safe in headers, logs and JSON; a new one where nothing safe is left."""
    return _UNSAFE.sub("", raw)[:MAX_ID_LENGTH] or uuid.uuid4().hex
