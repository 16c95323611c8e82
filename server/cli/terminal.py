"""Text for a terminal: colour where there is one, and nothing that a model could do to it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
# All controls but tab and line feed, and what turns the direction of writing around.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def has_colours(stream: TextIO | None) -> bool:
    """https://no-color.org: any text in NO_COLOR switches them off. None: the stream was closed before the start."""
    return (
        stream is not None and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def styled(text: str, style: str, stream: TextIO | None) -> str:
    """`text` in bold, dim, red, green or yellow, where `stream` shows it."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if text and has_colours(stream) else text


def printable(text: str) -> str:
    """What a model says must not move the cursor, set the title or hide what stands there."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


def examples(commands: Sequence[str]) -> str:
    """What a command's help ends with."""
    return "\n".join([styled("examples:", "bold", sys.stdout), *(f"  {command}" for command in commands)])
