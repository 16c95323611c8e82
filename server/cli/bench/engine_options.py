"""The engine's flags on commands that run it without a server."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import typing
from collections.abc import Callable
from typing import Any

import numpy as np

from ....engine.config import ConfigError, EngineConfig
from ...engine_client import EngineDeadError
from ...llm import LLM
from ..serve import _add_flag, _configs
from .load import BenchError


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder of a Hugging Face model, or its name on the hub")
    hints = typing.get_type_hints(EngineConfig)
    groups: dict[str, Any] = {}
    for spec in dataclasses.fields(EngineConfig):
        name = spec.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        _add_flag(groups[name], spec, hints[spec.name])
    groups["model"].add_argument("--tokenizer", dest="opt_tokenizer", metavar="TEXT",
                                 help="folder or hub name of the tokenizer (default: the model's)")  # fmt: skip


def random_numbers(arguments: argparse.Namespace) -> np.random.Generator:
    """For prompts: other ones in each run unless --seed is given."""
    return np.random.default_rng(arguments.opt_seed)


def run_with_llm(arguments: argparse.Namespace, measure: Callable[[argparse.Namespace, LLM], None]) -> int:
    """Loads the model and calls `measure`. Returns the exit code; what went wrong is the last line printed."""
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        engine, server = _configs(arguments)
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
