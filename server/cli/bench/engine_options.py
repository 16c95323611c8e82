"""The engine's flags on commands that run it without a server."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable

import numpy as np

from ....engine.errors import ConfigError
from ....engine.options.config import EngineConfig
from ...client.engine_client import EngineDeadError
from ...offline.llm import LLM
from ...options.config import ServerConfig
from ..flags import add_flags, read_flags
from .load import BenchError


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig, only=("tokenizer",))


def random_numbers(arguments: argparse.Namespace) -> np.random.Generator:
    """For prompts: other ones in each run unless --seed is given."""
    return np.random.default_rng(arguments.opt_seed)


def run_with_llm(arguments: argparse.Namespace, measure: Callable[[argparse.Namespace, LLM], None]) -> int:
    """Loads the model and calls `measure`. Returns the exit code; what went wrong is the last line printed."""
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        engine, server = read_flags(arguments)
        with LLM(tokenizer=server.tokenizer, **dataclasses.asdict(engine)) as llm:
            measure(arguments, llm)
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    except (BenchError, EngineDeadError, ValueError) as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
