"""How to get a package that only some options need."""

from __future__ import annotations

import sys

IMAGE = "/opt/vserve"  # where the Dockerfile installs: nothing stays that is installed there later


def how_to_install(extra: str) -> str:
    """For a message: the command, or in vserve's own image the argument of its build."""
    if sys.prefix == IMAGE:
        return f"build the image with --build-arg EXTRAS={extra} (several: EXTRAS=otel,kv-events)"
    return f"pip install 'vserve[{extra}]'"
