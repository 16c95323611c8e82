"""the servers that run on this machine"""

from __future__ import annotations

import argparse
import json
import time

from . import servers
from .download_line import duration, size

EXAMPLES = ("vserve ps", "vserve ps --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one object a line")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    found = servers.find()
    if arguments.json:
        for one in found:
            print(json.dumps({"pid": one.pid, "url": one.address, "models": one.models, "state": one.state,
                              "memory_bytes": one.memory, "started": int(one.started)}))  # fmt: skip
        return 0
    if not found:
        print("no server of yours runs here: `vserve MODEL` starts one")
        return 0
    rows = [
        (str(one.pid), ", ".join(one.models) or "?", one.state, one.address, size(one.memory),
         duration(time.time() - one.started))
        for one in found
    ]  # fmt: skip
    head = ("PID", "MODEL", "STATE", "ADDRESS", "MEMORY", "UP")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0
