"""`vserve [MODEL]` and its subcommands."""

from __future__ import annotations

import argparse
import sys

from ... import __version__
from . import serve
from .bench import command as bench

COMMANDS = {"serve": serve, "bench": bench}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 fine, 1 could not run, 2 wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # `vserve MODEL --port 8000` is `vserve serve MODEL --port 8000`
    if not argv or (argv[0] not in COMMANDS and argv[0] not in ("-h", "--help", "--version")):
        argv.insert(0, "serve")
    parser = argparse.ArgumentParser(
        prog="vserve", description="Serve a language model over the OpenAI API.",
        epilog="`vserve MODEL` is short for `vserve serve MODEL`; `vserve` alone serves the bundled demo model. "
               "`vserve serve --help` lists the options.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"vserve {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=module.__doc__, description=module.__doc__)
        if name == argv[0]:  # the others would only make it start later
            module.add_arguments(subparser)
    arguments = parser.parse_args([argv[0], *(_dashes(a) for a in argv[1:])])
    return COMMANDS[arguments.command].run(arguments)


def _dashes(argument: str) -> str:
    """--max_model_len is --max-model-len."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


if __name__ == "__main__":
    sys.exit(main())
