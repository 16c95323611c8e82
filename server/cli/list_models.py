"""the models that are on this machine: in the hub's cache, and in the folders of Ollama and LM Studio"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from ...engine.options.shelves import HUB, Shelved, shelved
from .download_line import duration, size

EXAMPLES = ("vserve list", "vserve list --json")
_DAY = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--download-dir", metavar="FOLDER", help="of models, where it is not the hub's cache")
    parser.add_argument("--json", action="store_true", help="one object a line")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    found = sorted(shelved(arguments.download_dir), key=lambda model: -model.used)
    if arguments.json:
        for model in found:
            print(json.dumps({"name": model.name, "shelf": model.shelf, "path": str(model.path), "bytes": model.size,
                              "used": int(model.used), "complete": model.is_whole}))  # fmt: skip
        return 0
    if not found:
        print(
            "no model is on this machine: `vserve pull Qwen/Qwen3-0.6B` downloads one, `vserve` alone serves the demo"
        )
        return 0
    names = [_short(model) for model in found]
    width = max(map(len, [*names, "NAME"]))
    print(f"{'NAME':<{width}}  {'SIZE':>9}  {'USED':<14}  WHERE")
    for name, model in zip(names, found, strict=True):
        where = model.shelf if model.is_whole else f"{model.shelf}, not all of it: `vserve pull` goes on"
        print(f"{name:<{width}}  {size(model.size):>9}  {_ago(time.time() - model.used):<14}  {where}")
    return 0


def _short(model: Shelved) -> str:
    home = str(Path.home())
    return model.name if model.shelf == HUB or not model.name.startswith(home) else "~" + model.name[len(home) :]


def _ago(seconds: float) -> str:
    if seconds < 60:
        return "now"
    if seconds < 2 * _DAY:
        return f"{duration(seconds)} ago"
    return f"{seconds / _DAY:.0f} days ago"
