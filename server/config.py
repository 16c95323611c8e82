"""Every option of the HTTP server; flags and /server_info derive from it, as from engine/config.py."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..engine.config import ConfigError, flag, option
from .http_config import HttpConfig
from .log_config import LogConfig
from .text_config import TextConfig


@dataclass(frozen=True)
class ServerConfig(HttpConfig, LogConfig, TextConfig):
    host: str = option("0.0.0.0", "address to listen on", group="server")
    port: int = option(8000, "port to listen on", group="server")
    uds: str | None = option(None, "Unix-domain socket to listen on instead of host and port", group="server")
    root_path: str = option("", "path prefix that a proxy in front of the server strips", group="server")
    served_model_name: tuple[str, ...] = option(
        (), "names that requests may use; answers carry the first (default: the model's)", group="server"
    )
    strict_params: bool = option(
        False, "refuse requests with unknown fields instead of listing them in x-vserve-ignored-params", group="server"
    )
    grammar_compile_timeout: float = option(
        5.0, "seconds that compiling the schema or grammar of a structured output may take", group="server"
    )
    response_store_size: int = option(
        1024, "how many responses of /v1/responses are kept for GET and previous_response_id; 0: none", group="server"
    )
    response_store_bytes: int = option(
        256 << 20, "bytes that they may take; those that were not used for longest go first", group="server"
    )
    ui: bool = option(True, "serve a page at / to chat with the model and to watch the engine", group="server")
    metrics_prefix: str = option("vllm:", "what the names on /metrics begin with", group="server")
    sse_ping_interval: float = option(
        0.0, "seconds between comment lines in a silent stream, for proxies that close idle connections; 0: none",
        group="server",
    )  # fmt: skip
    stall_timeout: float = option(
        30.0, "seconds without a step, while requests wait, after which /health is 503", group="server"
    )
    hang_timeout: float = option(
        300.0, "seconds without a step, while requests wait, after which the engine is restarted; 0: never",
        group="server",
    )  # fmt: skip
    engine_restarts: int = option(
        3, "how often within 10 minutes an engine that died is started again, before the server ends", group="server"
    )
    shutdown_timeout: float = option(
        30.0, "seconds that running requests get after SIGTERM or Ctrl-C; 0: none", group="server"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_logs()
        self.check_text()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}: it must be from 0 (any free one) to 65535")
        if not 0.1 <= self.stall_timeout <= 86_400:
            raise ConfigError(f"--stall-timeout is {self.stall_timeout}: it must be from 0.1 to 86400 seconds")
        if self.hang_timeout and not self.stall_timeout <= self.hang_timeout <= 86_400:
            raise ConfigError(
                f"--hang-timeout is {self.hang_timeout}: it must be 0 (never) or from --stall-timeout "
                f"({self.stall_timeout}) to 86400 seconds"
            )
        if not 0.1 <= self.grammar_compile_timeout <= 3600:
            raise ConfigError(
                f"--grammar-compile-timeout is {self.grammar_compile_timeout}: it must be from 0.1 to 3600 seconds"
            )
        for name, most in (("response_store_size", 10**7), ("response_store_bytes", 1 << 40)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}: it must be from 0 to {most}")
        if not 0 <= self.engine_restarts <= 1000:
            raise ConfigError(f"--engine-restarts is {self.engine_restarts}: it must be from 0 to 1000")
        if not 0 <= self.shutdown_timeout <= 86_400:
            raise ConfigError(f"--shutdown-timeout is {self.shutdown_timeout}: it must be from 0 to 86400 seconds")
        if not 0 <= self.sse_ping_interval <= 86_400:
            raise ConfigError(f"--sse-ping-interval is {self.sse_ping_interval}: it must be from 0 to 86400 seconds")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path is {self.root_path!r}: it must start with / and not end with one")
        if self.metrics_prefix.strip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:"):
            raise ConfigError(
                f"--metrics-prefix is {self.metrics_prefix!r}: only letters, digits, _ and : may be in a metric's name"
            )
        if self.metrics_prefix[:1].isdigit():
            raise ConfigError(f"--metrics-prefix is {self.metrics_prefix!r}: it must not start with a digit")
        if any(not name.strip() for name in self.served_model_name):
            raise ConfigError("--served-model-name has an empty name: leave it out")
        for spec in dataclasses.fields(self):
            choices = spec.metadata["choices"]
            if choices and getattr(self, spec.name) not in choices:
                raise ConfigError(
                    f"{flag(spec.name)} is {getattr(self, spec.name)!r}: choose one of {', '.join(choices)}"
                )
