"""argparse as this command line wants it: help on a group or a flag alone, and "did you mean" for what is unknown."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from ..options.hint import did_you_mean
from .terminal import styled
from .words import rewritten

_IS_REFUSED = "is_refused"
# What other servers call it.
_SLIPS = {
    "-p": "--port", "-m": "--model", "--model-path": "--model", "--model-id": "--model", "-c": "--max-model-len",
    "--ctx-size": "--max-model-len", "--context-length": "--max-model-len", "-a": "--served-model-name",
    "--alias": "--served-model-name", "-t": "--cpu-threads", "--threads": "--cpu-threads", "-d": "--device",
    "-np": "--max-num-seqs", "--parallel": "--max-num-seqs", "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--gpu-memory-utilization", "--url": "--base-url", "--base-url": "--url",
    "--n-ctx": "--max-model-len", "--context-size": "--max-model-len", "--max-total-tokens": "--max-model-len",
    "--max-tokens": "--max-model-len", "--max-input-length": "--max-model-len", "--max-batch-size": "--max-num-seqs",
    "--max-concurrency": "--max-num-seqs", "--gpus": "--tensor-parallel-size", "--num-gpus": "--tensor-parallel-size",
    "--num-shard": "--tensor-parallel-size", "--tp-size": "--tensor-parallel-size", "--workers": "--api-server-count",
    "--bind": "--host", "--listen": "--host",
}  # fmt: skip


def refuse(action: argparse.Action) -> None:
    """It is known only to be refused: no hint names it."""
    setattr(action, _IS_REFUSED, True)


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        # No abbreviations: a script that uses one breaks when another option of that beginning is added.
        super().__init__(**{"allow_abbrev": False, "add_help": False, "formatter_class": _Formatter, **options})
        self.add_argument(
            "-h", "--help", action=_Help, nargs="?", metavar="WORD",
            help="this help, or that on a group of options or a flag alone: --help=cache, --help=max-model-len",
        )  # fmt: skip

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            words = rewritten(self._option_string_actions, list(sys.argv[1:] if args is None else args))
        except ValueError as error:
            self.error(str(error))
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:  # said here, where a subcommand's own parser knows what it has
            names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            if not names:
                self.error(f"unexpected argument {unknown[0]!r}")
            self.error(f"unknown option {names[0]}{self._hint(names[0])}")
        return parsed, unknown

    def _hint(self, name: str) -> str:
        flags = [flag for flag in self.all_flags() if flag != name]
        if (meant := _SLIPS.get(name)) in flags:
            return f"; did you mean {meant}?"
        refused = self._option_string_actions.keys() - set(flags) - {name}
        return did_you_mean(name, flags, refused=refused) if name.startswith("--") else ""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Nothing is guessed from its beginning; -O3 is -O 3."""
        found: list[Any] = super()._get_option_tuples(option_string)
        return [one for one in found if one[1] == option_string[:2] and option_string[2:].isdecimal()]

    def all_flags(self) -> list[str]:
        """Those of its subcommands included, without those that are refused."""
        flags = [
            flag for flag, action in self._option_string_actions.items() if not getattr(action, _IS_REFUSED, False)
        ]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    flags += parser.all_flags()
        return flags

    def error(self, message: str) -> NoReturn:
        if found := re.match(r"(argument .*: )invalid choice: ('.*') \(choose from (.*)\)", message):
            where, value, choices = found.groups()
            message = f"{where}{value} is none of its values: choose {choices.replace(chr(39), '')}"
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` lists the options)\n")

    def help_on(self, word: str) -> str:
        """The group of that title, else the flag of that name, else all flags that contain it; "" where none does."""
        name = word.lower().lstrip("-").replace("_", "-")
        if name == "all":
            return self.format_help()
        groups = [(group.title or "", group._group_actions) for group in self._action_groups]
        found = [(title, actions) for title, actions in groups if title.lower() == name and actions]
        for fits in (lambda flag: flag == name, lambda flag: name in flag):
            if not found:
                chosen = [(t, [a for a in actions if any(map(fits, _names(a)))]) for t, actions in groups]
                found = [(title, actions) for title, actions in chosen if actions]
        formatter = self._get_formatter()
        for title, actions in found:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    def help_words(self) -> list[str]:
        names = [name for action in self._actions for name in _names(action)]
        return [group.title or "" for group in self._action_groups if group._group_actions] + names


def _names(action: argparse.Action) -> list[str]:
    return [flag.lstrip("-") for flag in action.option_strings]


class _Help(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values is None:
            parser.print_help()
            parser.exit()
        text = parser.help_on(values)
        if not text:
            parser.error(f"there is no group and no option {values!r}{did_you_mean(values, parser.help_words())}")
        print(text, end="")
        parser.exit()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def start_section(self, heading: str | None) -> None:
        super().start_section(styled(heading or "", "bold", sys.stdout))
