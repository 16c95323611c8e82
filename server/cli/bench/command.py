"""measure a server, the engine, or how long starting takes"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys

from ..terminal import examples

MEASUREMENTS = ("serve", "throughput", "latency", "startup")


EXAMPLES = (
    "vserve bench serve --num-prompts 100 --request-rate 4",
    "vserve bench throughput ./my-model --input-len 1024 --output-len 128",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="measurement", required=True)
    for name in MEASUREMENTS:
        module = importlib.import_module(f".{name}", __package__)
        subparser = subparsers.add_parser(name, help=module.__doc__, description=module.__doc__)
        module.add_arguments(subparser)
        subparser.epilog = examples(module.EXAMPLES)
        subparser.set_defaults(measure=module.run)


def run(arguments: argparse.Namespace) -> int:
    # The processes that a measurement starts are ended on the way out, which a bare SIGTERM would cut short.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        code: int = arguments.measure(arguments)
        return code
    finally:
        signal.signal(signal.SIGTERM, before)
