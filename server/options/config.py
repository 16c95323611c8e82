"""Every option of the HTTP server; flags and /server_info derive from it, as from engine/options/config.py."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...engine.errors import ConfigError
from ...engine.options.option import SECONDS, Bounds, check_options, option
from .adapters import AdapterConfig
from .batches import BatchConfig
from .http import HttpConfig
from .logs import LogConfig
from .media import MediaConfig
from .text import TextConfig


def _path_prefix(path: str) -> str | None:
    return "it must start with / and not end with one" if path and (path[0] != "/" or path[-1] == "/") else None


def _names(names: tuple[str, ...]) -> str | None:
    return None if all(map(str.strip, names)) else "a name is empty, leave it out"


def _no_text(name: str) -> str | None:
    return None if name.strip() else "it is empty: give it a text, or leave it out"


def _metric_name(prefix: str) -> str | None:
    if not re.fullmatch("[a-zA-Z0-9_:]*", prefix):
        return "only letters, digits, _ and : may be in a metric's name"
    return "it must not start with a digit" if prefix[:1].isdigit() else None


@dataclass(frozen=True)
class ServerConfig(HttpConfig, LogConfig, TextConfig, AdapterConfig, BatchConfig, MediaConfig):
    host: str = option("0.0.0.0", "address to listen on", group="server")
    port: int = option(8000, "port to listen on", group="server", bounds=Bounds(0, 65535, zero="any free one"))
    api_server_count: int = option(
        1, "processes that answer HTTP on the same port, each connected to every engine: where one is busy with text "
        "before the engines are", group="server", bounds=Bounds(1, 64), short="asc",
    )  # fmt: skip
    headless: bool = option(
        False, "run the ranks of this node and no API: on every node but the first (--node-rank)", group="server"
    )
    uds: str | None = option(None, "Unix-domain socket to listen on instead of host and port", group="server")
    root_path: str = option(
        "", "path prefix that a proxy in front of the server strips", group="server", problem=_path_prefix
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names that requests may use; answers carry the first (default: the model's)",
        group="server",
        problem=_names,
    )
    embedding_model: str | None = option(
        None, "folder or hub name of a second model, for embeddings, scores, rankings and classes beside the first: "
        "an engine of its own, whose memory is taken first", group="server", problem=_no_text,
    )  # fmt: skip
    embedding_model_name: str | None = option(
        None, "name of the second model in requests and answers (default: as it was given)", group="server",
        problem=_no_text,
    )  # fmt: skip
    hf_token: str | None = option(
        None, "token for models of the hub that are not public (better: HF_TOKEN, which no list of processes shows)",
        group="server", secret=True,
    )  # fmt: skip
    strict_params: bool = option(
        False, "refuse requests with unknown fields instead of listing them in x-vserve-ignored-params", group="server"
    )
    return_tokens_as_token_ids: bool = option(
        False, "log-probabilities name tokens as token_id:7 where a request does not say", group="server"
    )
    enable_force_include_usage: bool = option(
        False, "every chunk of a stream of chat and completions has the usage, whether asked for or not", group="server"
    )
    enable_per_request_metrics: bool = option(
        False, "answers of chat and completions with one choice carry `metrics`: milliseconds in the queue, to the "
        "first token and between tokens, and tokens of the prompt that the cache held", group="server",
    )  # fmt: skip
    tokenizer_pool_size: int = option(
        0, "threads for texts that take long to tokenise; short ones wait for none; 0: 4", group="server",
        bounds=Bounds(0, 256, zero="4"),
    )  # fmt: skip
    renderer_num_workers: int | None = option(
        None, "the same, by vLLM's present name", group="server", bounds=Bounds(1, 256)
    )
    grammar_compile_timeout: float = option(
        5.0,
        "seconds that compiling the schema or grammar of a structured output may take",
        group="server",
        bounds=Bounds(0.1, 3600, unit="seconds"),
    )
    warm_grammars: bool = option(
        True, "load the compiler of grammars once the server is ready and idle, in a process of its own; off: when the "
        "first structured output is asked for, which then waits some seconds", group="server",
    )  # fmt: skip
    response_store_size: int = option(
        1024,
        "how many responses of /v1/responses, how many conversations and how many stored chats are kept for those who "
        "ask for them; 0: none",
        group="server",
        bounds=Bounds(0, 10**7),
    )
    response_store_bytes: int = option(
        256 << 20,
        "bytes that each of the three may take; those that were not used for longest go first",
        group="server",
        bounds=Bounds(0, 1 << 40),
    )
    ui: bool = option(True, "serve a page at / to chat with the model and to watch the engine", group="server")
    metrics_prefix: str = option("vllm:", "what the names on /metrics begin with", group="server", problem=_metric_name)
    sse_ping_interval: float = option(
        0.0, "seconds between comment lines in a silent stream, for proxies that close idle connections; 0: none",
        group="server", bounds=Bounds(0, 86_400, unit="seconds"),
    )  # fmt: skip
    stall_timeout: float = option(
        30.0, "seconds without a step, while requests wait, after which /health is 503", group="server", bounds=SECONDS
    )
    hang_timeout: float = option(
        300.0, "seconds without a step, while requests wait, after which the engine is restarted; 0: never",
        group="server", bounds=Bounds(0, 86_400, zero="never", unit="seconds"),
    )  # fmt: skip
    engine_restarts: int = option(
        3,
        "how often within 10 minutes an engine that died is started again, before the server ends",
        group="server",
        bounds=Bounds(0, 1000),
    )
    shutdown_timeout: float = option(
        30.0,
        "seconds that running requests get after SIGTERM or Ctrl-C; 0: none",
        group="server",
        bounds=Bounds(0, 86_400, unit="seconds"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        self.check_keys()
        self.check_tls()
        self.check_logs()
        self.check_text()
        self._check_second()
        self.check_adapters()
        if self.tokenizer_pool_size and self.renderer_num_workers is not None:
            raise ConfigError("--tokenizer-pool-size and --renderer-num-workers are one option: leave one out")
        if self.hang_timeout and self.hang_timeout < self.stall_timeout:
            raise ConfigError(
                f"--hang-timeout is {self.hang_timeout}: it must be 0 (never) or at least --stall-timeout "
                f"({self.stall_timeout})"
            )

    @property
    def tokenizer_threads(self) -> int | None:
        """None where nothing says how many."""
        return self.tokenizer_pool_size or self.renderer_num_workers

    def _check_second(self) -> None:
        name = self.embedding_model_name or self.embedding_model
        if self.embedding_model is None and name is not None:
            raise ConfigError("--embedding-model-name names a second model: give --embedding-model, or leave it out")
        if name is not None and name in self.served_model_name:
            raise ConfigError(
                f"--embedding-model and --served-model-name are both {name!r}: no request could tell them apart; give "
                "--embedding-model-name another name"
            )
