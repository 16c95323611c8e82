"""compile a deployment's kernels into the cache before it starts: run it on the card, with the options of serve"""

from __future__ import annotations

import argparse
import sys

from ...engine.errors import ConfigError
from ...engine.link import logs
from ...engine.options.config import EngineConfig
from ..options.config import ServerConfig
from .flags import add_flags, read_flags
from .machine import gib

EXAMPLES = ("vserve warm Qwen/Qwen3-0.6B --max-model-len 8K", "vserve warm ./my-model --config server.yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig, ServerConfig)


def run(arguments: argparse.Namespace) -> int:
    logs.open_standard_streams()
    try:
        engine, server = read_flags(arguments)
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    logs.configure(server.log_level, server.log_format, "warm")
    from ...engine.start.precompile import warm
    from .progress import ProgressLine

    progress = ProgressLine()
    try:
        warmed = warm(engine, progress)
    except ConfigError as error:
        progress.done()
        logs.flush()
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    progress.done()
    logs.flush()
    rows = [(phase, f"{seconds:6.1f} s") for phase, seconds in warmed.phases.items()]
    rows += [("in all", f"{warmed.seconds:6.1f} s, imports included")]
    new = warmed.after.kernels - warmed.before.kernels
    rows += [("kernels", f"{new} compiled for {warmed.device}, {warmed.before.kernels} were there")]
    rows += [("cache", f"{warmed.folder}, {gib(warmed.after.num_bytes)}")]
    print("\n".join(f"{name:<12}{text}" for name, text in rows))
    return 0
