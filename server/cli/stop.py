"""end a server of this machine in order: it answers what it has, and takes nothing new"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from . import health, servers
from .servers import Server

EXAMPLES = ("vserve stop", "vserve stop 8000", "vserve stop Qwen/Qwen3-0.6B")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "which", nargs="?", metavar="WHICH", help="its model, port or process; may be left out where one runs"
    )
    parser.add_argument("--all", action="store_true", help="all of this user's")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="to wait for (default: %(default)g)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 when they have ended, 1 where one has not, 2 where it is not clear which is meant."""
    running = servers.find()
    found = running if arguments.which is None else [one for one in running if _is_meant(one, arguments.which)]
    if not found:
        what = "no server of yours runs here" if arguments.which is None else f"no server of yours is {arguments.which}"
        print(f"vserve: {what}; `vserve ps` lists them", file=sys.stderr)
        return 0 if arguments.all and arguments.which is None else 2
    if len(found) > 1 and not arguments.all:
        names = ", ".join(f"{one.port or one.pid} ({', '.join(one.models)})" for one in found)
        print(f"vserve: {len(found)} servers run: {names}; name one, or add --all", file=sys.stderr)
        return 2
    for one in found:
        if health.is_vserve(one.pid):  # it may have ended meanwhile, and another program have its number
            os.kill(one.pid, signal.SIGTERM)
    until = time.monotonic() + arguments.timeout
    while (left := [one for one in found if _runs(one)]) and time.monotonic() < until:
        time.sleep(0.05)
    for one in found:
        if one not in left:
            print(f"{one.address} has ended")
    for one in left:
        print(f"vserve: {one.address} still answers what it has; a second SIGTERM to process {one.pid} breaks that off",
              file=sys.stderr)  # fmt: skip
    return 1 if left else 0


def _is_meant(server: Server, which: str) -> bool:
    names = [*server.models, *(name.rpartition("/")[2] for name in server.models)]
    return which in (str(server.pid), str(server.port or server.pid), *names)


def _runs(server: Server) -> bool:
    try:
        os.kill(server.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not servers.is_zombie(server.pid)
