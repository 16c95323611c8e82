"""print what makes the shell complete vserve's commands and options"""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = (
    "vserve completion bash > ~/.local/share/bash-completion/completions/vserve",
    'vserve completion zsh > "${fpath[1]}/_vserve"',
    "vserve completion fish > ~/.config/fish/completions/vserve.fish",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(whole_parser(), shell=arguments.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Every command with all its options: the parsers themselves say what there is to complete."""
    import shtab

    from . import main

    parser = main.Parser(prog="vserve", usage=main.USAGE)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, (help, _) in main.COMMANDS.items():
        main.fill(commands.add_parser(name, help=help), name, main.load(name))
    for one in _parsers(parser):
        for action in one._actions:
            if action.dest in ("model", "opt_model", "opt_tokenizer"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.metavar == "FILE" or action.dest.endswith(("file", "certs")):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                found += _parsers(child)
    return found
