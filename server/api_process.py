"""An API process beside the first one, started by it as `python -m vserve.server.api_process`; what it needs to know
stands on its stdin."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import socket
import sys
from typing import Any

from ..engine.link import logs
from ..engine.link.logs import die_with_parent, dump_stacks_on_signal
from ..engine.options.config import EngineConfig
from .api_processes import options
from .client.board import Board
from .client.meeting import Meeting
from .options.config import ServerConfig

logger = logging.getLogger("vserve")


class Silent:
    """A Reporter: the first process has said all."""

    def __call__(self, progress: Any) -> None:
        pass

    def done(self) -> None:
        pass

    def ready(self, info: Any, config: Any, sock: Any, seconds: float, chats: bool) -> None:
        logger.info("takes requests after %.1f s", seconds)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    dump_stacks_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides when this one ends
    spec = json.load(sys.stdin)
    logs.configure(arguments.log_level, arguments.log_format, f"api-{spec['seat']}")
    board = Board(spec["board"], spec["num_seats"], spec["seat"])
    meeting = Meeting(spec["folder"], spec["seat"], spec["client"], board, spec["secret"])
    sock = socket.socket(fileno=spec["socket"])
    from . import service

    return service.run(
        options(EngineConfig, spec["engine"]), options(ServerConfig, spec["server"]), spec["sources"], sock, Silent(),
        meeting,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
