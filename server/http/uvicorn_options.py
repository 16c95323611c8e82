"""What uvicorn is told of connections: which class each is, its limits, how many there may be."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable
from typing import Any

from uvicorn.config import SSL_PROTOCOL_VERSION, create_ssl_context

from ..options.http import HttpConfig
from .protocol import RESERVED_FILES, HttpProtocol
from .tls import TlsProtocol


def uvicorn_options(config: HttpConfig, refused: Callable[[str], None], num_processes: int = 1) -> dict[str, Any]:
    """What uvicorn.Config gets beside the application. `refused` hears of every connection that is ended, and why;
    `num_processes` share the connections that there may be."""
    share = None if config.max_connections is None else max(1, config.max_connections // num_processes)
    members: dict[str, Any] = {
        "limits": config, "refused": staticmethod(refused), "lingering": {}, "newcomers": {}, "kept": {},
        "arriving": {}, "max_connections": share or raise_file_limit(),
    }  # fmt: skip
    kind = HttpProtocol
    if config.ssl_certfile is not None:
        kind = TlsProtocol
        members["tls"] = create_ssl_context(
            config.ssl_certfile, config.ssl_keyfile, config.ssl_keyfile_password, SSL_PROTOCOL_VERSION,
            config.ssl_cert_reqs, config.ssl_ca_certs, config.ssl_ciphers,
        )  # fmt: skip
    return {
        "http": type(kind.__name__, (kind,), members),
        "timeout_keep_alive": config.timeout_keep_alive,
        "server_header": False,
    }


def raise_file_limit() -> int:
    """Raises the limit of open files as far as this process may. Returns how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return max(16, min(soft if soft != resource.RLIM_INFINITY else most, most) - RESERVED_FILES)
