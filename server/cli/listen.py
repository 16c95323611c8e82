"""The socket that the server listens on, taken before anything else: a port in use is said at once."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from ...engine.errors import ConfigError
from ..options.config import ServerConfig

BACKLOG = 2048  # connections that wait to be accepted


def listen(config: ServerConfig) -> socket.socket:
    """Raises ConfigError."""
    if config.uds is not None:
        return _listen_uds(config.uds)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
        sock.listen(BACKLOG)  # now: until then another server could bind the same port too
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error}); choose another with --port or --host"
        ) from None
    return sock


def _listen_uds(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            sock.connect(path)
            raise ConfigError(f"--uds {path!r}: another server listens on it; stop that one or name another path")
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)  # left by a server that was killed; any other file is not ours to remove
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on --uds {path!r} ({error}); name a path in a folder you can write") from None
    return sock
