"""delete a model from the hub's cache"""

from __future__ import annotations

import argparse
import shutil
import sys

from ...engine.options.model_names import hub_name
from ...engine.options.shelves import HUB, shelved
from ..options.hint import did_you_mean
from . import servers
from .download_line import size

EXAMPLES = ("vserve rm Qwen/Qwen3-0.6B", "vserve rm --yes Qwen/Qwen3-0.6B Qwen/Qwen3-1.7B")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="MODEL", help="as `vserve list` names it")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.add_argument("--download-dir", metavar="FOLDER", help="of models, where it is not the hub's cache")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 where all are gone, 1 where one is not, 2 for a name that is none."""
    found = {model.name: model for model in shelved(arguments.download_dir)}
    names = list(dict.fromkeys(hub_name(name) for name in arguments.names))
    for name in names:
        if name not in found:
            here = [name for name, model in found.items() if model.shelf == HUB]
            hint = did_you_mean(name, here) or "; `vserve list` names those that are"
            print(f"vserve: {name} is not on this machine{hint}", file=sys.stderr)
            return 2
        if found[name].shelf != HUB:
            print(f"vserve: {name} is {found[name].shelf}'s: remove it there", file=sys.stderr)
            return 2
    running = [(model.partition(":")[0], server) for server in servers.find() for model in server.uses]
    busy = {name: server for name, server in running if name in names}
    for name, server in busy.items():
        print(f"vserve: {name} is being served at {server.address}: `vserve stop {server.port or server.pid}` first",
              file=sys.stderr)  # fmt: skip
    if busy:
        return 1
    if not arguments.yes:
        if not sys.stdin.isatty():
            print("vserve: nobody is here to be asked: add --yes", file=sys.stderr)
            return 2
        total = size(sum(found[name].size for name in names))
        if not _agreed(f"delete {', '.join(names)} ({total})? [y/N] "):
            return 1
    for name in names:
        try:
            shutil.rmtree(found[name].path)
        except OSError as error:
            print(f"vserve: {name} cannot be deleted: {error}", file=sys.stderr)
            return 1
        print(f"deleted {name}, {size(found[name].size)}")
    return 0


def _agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False
