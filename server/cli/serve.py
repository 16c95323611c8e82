"""serve a model over HTTP"""

from __future__ import annotations

import argparse
import logging
import sys

from ...engine.describe.overrides import overrides
from ...engine.describe.reading import check_described
from ...engine.errors import ConfigError, ModelError
from ...engine.link import logs
from ...engine.link.logs import dump_stacks_on_signal
from ...engine.options.config import EngineConfig
from ...engine.options.model_path import find_model
from ...engine.ranks.handshake import check_secret
from ...engine.ranks.node import run as run_node
from ...engine.start import faults
from ..client.meeting import Meeting
from ..options.beside import embedding_engine
from ..options.config import ServerConfig
from .flags import add_flags, read_flags, sources
from .given import notices, unknown_variables
from .listen import listen

logger = logging.getLogger("vserve")

LAST_WORDS = 15.0  # seconds that node 0 takes beside what its requests take

EXAMPLES = (
    "vserve Qwen/Qwen3-0.6B --max-model-len 8K --port 9000",
    "vserve ./my-model --served-model-name mine --api-key-file keys",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig, ServerConfig)


def run(arguments: argparse.Namespace) -> int:
    logs.open_standard_streams()
    try:
        engine_config, server_config = read_flags(arguments)
        second = embedding_engine(server_config, engine_config)
        for config in filter(None, (engine_config, second)):
            overrides(config)  # of a model of the hub, this is all that can be said yet
            if (folder := find_model(config.model)) is not None:
                check_described(folder, config)
        if server_config.api_server_count > 1 and engine_config.engine_in_process:
            raise ConfigError("--engine-in-process has room for one API process: leave it or --api-server-count out")
        if server_config.api_server_count > 1 and second is not None:
            raise ConfigError("--embedding-model is served by one API process: leave it or --api-server-count out")
        faults.planned()
        check_nodes(engine_config, server_config)
        if server_config.headless:
            return run_headless(engine_config, server_config)
        sock = listen(server_config)
    except ModelError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    logs.configure(server_config.log_level, server_config.log_format, "api")
    for line in notices(arguments):
        logger.info(line)
    for line in unknown_variables():
        logger.warning(line)
    dump_stacks_on_signal()
    from .. import service  # after the port is taken: its imports take a moment
    from .progress import ProgressLine

    meeting = Meeting.open(server_config.api_server_count) if server_config.api_server_count > 1 else None
    return service.run(engine_config, server_config, sources(arguments), sock, ProgressLine(), meeting)


def check_nodes(engine: EngineConfig, server: ServerConfig) -> None:
    """Raises ConfigError."""
    if engine.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "--distributed-executor-backend external_launcher is for programs that torchrun starts and that use LLM; a "
            "server's rank 0 starts the others: leave it out and start one process, on further hosts with --nnodes and "
            "--headless"
        )
    if server.headless and engine.node_rank == 0:
        raise ConfigError("--headless is for every node but the first, which answers HTTP: give --nnodes and "
                          "--node-rank, or leave it out")  # fmt: skip
    if engine.node_rank > 0 and not server.headless:
        raise ConfigError(f"--node-rank {engine.node_rank}: only node 0 answers HTTP: add --headless")
    if engine.nnodes > 1 and server.embedding_model is not None:
        raise ConfigError("--embedding-model is served beside a model of one host: leave it or --nnodes out")
    check_secret(engine)


def run_headless(engine: EngineConfig, server: ServerConfig) -> int:
    logs.configure(server.log_level, server.log_format, f"node {engine.node_rank}")
    dump_stacks_on_signal()
    code = run_node(engine, server.shutdown_timeout + LAST_WORDS)
    logs.flush()
    return code
