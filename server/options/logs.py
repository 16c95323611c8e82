"""Options of what the server tells about itself: logs, metrics, traces."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from ...engine.errors import ConfigError
from ...engine.link.logs import FORMATS
from ...engine.options.extras import how_to_install
from ...engine.options.option import SECONDS, Bounds, option

OPENTELEMETRY = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


@dataclass(frozen=True)
class LogConfig:
    log_level: str = option(
        "info", "least severe messages to log", choices=("debug", "info", "warning", "error"), group="logging"
    )
    log_format: str = option(
        "auto", "of log lines; auto: text on a terminal, JSON elsewhere", choices=FORMATS, group="logging"
    )
    access_log: bool = option(True, "log one line for each request", group="logging")
    disable_access_log_for_endpoints: str = option(
        "/health,/livez,/readyz,/ping,/metrics,/load,/version", "paths whose requests get no line", group="logging"
    )
    enable_log_requests: bool = option(False, "log the text of prompts", group="logging")
    enable_log_outputs: bool = option(False, "log the text of answers", group="logging")
    max_log_len: int | None = option(
        None, "characters of a prompt or an answer that are logged (default: all)", group="logging", bounds=Bounds(0)
    )
    disable_log_stats: bool = option(False, "no line on throughput, queue and cache while busy", group="logging")
    log_stats_interval: float = option(10.0, "seconds between those lines", group="logging", bounds=SECONDS)
    otlp_traces_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector that gets a span for each request, such as "
        "http://localhost:4318/v1/traces (needs vserve[otel])", group="logging",
    )  # fmt: skip

    def check_logs(self) -> None:
        """Raises ConfigError."""
        if (endpoint := self.otlp_traces_endpoint) is None:
            return
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-traces-endpoint is {endpoint!r}: give the http:// or https:// URL of an OTLP/HTTP receiver"
            )
        if not all(map(_is_installed, OPENTELEMETRY)):
            raise ConfigError(f"--otlp-traces-endpoint needs OpenTelemetry: {how_to_install('otel')}")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False
