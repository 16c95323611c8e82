"""one address before servers of several hosts: each request goes where its first token is expected soonest"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from urllib.parse import urlsplit

from ...engine.errors import ConfigError
from ...engine.link import logs
from ..options.config import ServerConfig
from .flags import add_flags, read_flags
from .listen import listen

logger = logging.getLogger("vserve")

EXAMPLES = (
    "vserve router http://gpu1:8000 http://gpu2:8000 --port 9000",
    "vserve router http://10.0.0.5:8000 http://10.0.0.6:8000 --health-interval 1 --cache-tokens 1000000",
)
_SERVER = (
    "host", "port", "uds", "timeout_keep_alive", "header_timeout", "body_timeout", "write_timeout", "max_body_size",
    "max_header_size", "max_header_count", "max_request_line", "max_connections", "api_key", "public_metrics",
    "allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials",
    "ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers",
    "shutdown_timeout", "log_level", "log_format",
)  # fmt: skip
KEY_VARIABLE = "VSERVE_SERVER_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="+", metavar="URL", help="of a vserve or vLLM server, such as http://gpu1:8000")
    group = parser.add_argument_group("router")
    group.add_argument(
        "--server-api-key", metavar="KEY", help="what the servers get instead of the client's own key, and with which "
        f"they are asked for their models; also from {KEY_VARIABLE}",
    )  # fmt: skip
    group.add_argument(
        "--health-interval", type=_number(float, 0.1, 3600), default=2.0, metavar="X",
        help="seconds between two questions to a server whether it takes requests (default: 2)",
    )  # fmt: skip
    group.add_argument(
        "--cache-tokens", type=_number(int, 1024, 10**9), default=400_000, metavar="N",
        help="tokens that the prefix cache of one server holds, about (default: 400000)",
    )  # fmt: skip
    add_flags(parser, ServerConfig, only=_SERVER)


def _number(kind: type, least: float, most: float) -> type:
    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: it must be from {least} to {most}")
        return float(value) if kind is float else value

    read.__name__ = "number"
    return read  # type: ignore[return-value]


def run(arguments: argparse.Namespace) -> int:
    try:
        urls = [_checked(url) for url in dict.fromkeys(arguments.model)]
        arguments.model = None
        _, config = read_flags(arguments)
        sock = listen(config)
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    logs.configure(config.log_level, config.log_format, "router")
    from ..router.service import RouterService

    key = arguments.server_api_key or os.environ.get(KEY_VARIABLE) or None
    service = RouterService(
        urls, config, sock, server_key=key, interval=arguments.health_interval, cache_tokens=arguments.cache_tokens
    )
    scheme = "http" if config.ssl_certfile is None else "https"
    host = "localhost" if config.host in ("0.0.0.0", "::", "127.0.0.1") else config.host
    address = f"unix:{config.uds}" if config.uds is not None else f"{scheme}://{host}:{sock.getsockname()[1]}"

    async def main() -> None:
        task = asyncio.create_task(service.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.stop)
        logs.say(f"{address}   routes to {', '.join(urls)}")
        await task

    try:
        import uvloop

        uvloop.run(main())
    except ImportError:
        asyncio.run(main())
    finally:
        if config.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(config.uds)
    return 0


def _checked(url: str) -> str:
    """Raises ConfigError."""
    parts = urlsplit(url)
    try:
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) and not parts.username
    except ValueError:
        fine = False
    if not fine or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is no address of a server: give one such as http://gpu1:8000")
    return url.rstrip("/")
