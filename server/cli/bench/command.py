"""measure a server, the engine, or how long starting takes"""

from __future__ import annotations

import argparse
import importlib

MEASUREMENTS = ("serve", "throughput", "latency", "startup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="measurement", required=True)
    for name in MEASUREMENTS:
        module = importlib.import_module(f".{name}", __package__)
        subparser = subparsers.add_parser(name, help=module.__doc__, description=module.__doc__)
        module.add_arguments(subparser)
        subparser.set_defaults(measure=module.run)


def run(arguments: argparse.Namespace) -> int:
    code: int = arguments.measure(arguments)
    return code
