"""What the start of a server is told to."""

from __future__ import annotations

import socket
from typing import Protocol

from ..engine.link.messages import EngineInfo, Progress
from .options.config import ServerConfig


class Reporter(Protocol):
    """Who tells the person that started the server how far it is; cli/progress.py has one for terminals."""

    def __call__(self, progress: Progress) -> None: ...

    def done(self) -> None:
        """Nothing more is to come of the start, whether it went well or not."""
        ...

    def ready(self, info: EngineInfo, config: ServerConfig, sock: socket.socket, seconds: float, chats: bool) -> None:
        """The server answers, so long after it was started. `chats`: the model has a chat template."""
        ...
