"""Every option of the HTTP server; flags and /server_info derive from it, as from engine/config.py."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ..engine.config import ConfigError, flag, option


@dataclass(frozen=True)
class ServerConfig:
    host: str = option("0.0.0.0", "address to listen on", group="server")
    port: int = option(8000, "port to listen on", group="server")
    uds: str | None = option(None, "Unix-domain socket to listen on instead of host and port", group="server")
    root_path: str = option("", "path prefix that a proxy in front of the server strips", group="server")
    served_model_name: tuple[str, ...] = option(
        (), "names that requests may use; answers carry the first (default: the model's)", group="server"
    )
    tokenizer: str | None = option(None, "folder or hub name of the tokenizer (default: the model's)", group="server")
    chat_template: str | None = option(
        None, "file with a Jinja chat template (default: the tokenizer's)", group="server"
    )
    metrics_prefix: str = option("vllm:", "what the names on /metrics begin with", group="server")
    sse_ping_interval: float = option(
        0.0, "seconds between comment lines in a silent stream, for proxies that close idle connections; 0: none",
        group="server",
    )  # fmt: skip
    log_level: str = option(
        "info", "least severe messages to log", choices=("debug", "info", "warning", "error"), group="server"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}: it must be from 0 (any free one) to 65535")
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
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ConfigError(f"--chat-template {self.chat_template!r} is no file: give the path of a Jinja template")
        for spec in dataclasses.fields(self):
            choices = spec.metadata["choices"]
            if choices and getattr(self, spec.name) not in choices:
                raise ConfigError(
                    f"{flag(spec.name)} is {getattr(self, spec.name)!r}: choose one of {', '.join(choices)}"
                )
