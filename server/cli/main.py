"""`vserve [MODEL]` and its subcommands."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from types import ModuleType

from ... import __version__
from ..options.hint import did_you_mean
from .parser import Parser
from .terminal import examples, styled

# By what a person wants; the modules are imported when they are needed, for all of them together take seconds.
GROUPS = {
    "Serve": {
        "serve": ("a model over HTTP; the demo model when none is named", "serve"),
        "router": ("one address before servers of several hosts", "router"),
        "run-batch": ("answer a file of requests, without a server", "run_batch"),
    },
    "Models on this machine": {
        "run": ("chat with a model: it is downloaded, served, and ended with the conversation", "run_model"),
        "pull": ("download a model", "pull"),
        "list": ("the models that are here", "list_models"),
        "show": ("what a model is", "show"),
        "rm": ("delete one", "remove"),
    },
    "Talk to a server": {
        "chat": ("several turns, streamed", "chat"),
        "complete": ("continue a text", "complete"),
        "connect": ("point Claude Code, Codex, opencode or aider at one", "connect"),
    },
    "Measure": {"bench": ("a server, the engine, or how long starting takes", "bench.command")},
    "Look after it": {
        "ps": ("the servers that run here", "ps"),
        "stop": ("end one in order", "stop"),
        "plan": ("how many cards a load needs, computed without them", "plan"),
        "doctor": ("whether this machine can serve, and what to do where not", "doctor"),
        "warm": ("compile a deployment's kernels into the cache, before it starts", "warm"),
        "collect-env": ("versions and hardware, for a bug report", "collect_env"),
        "completion": ("make the shell complete commands and options", "completion"),
    },
}
_ALIASES = {"ls": "list", "remove": "rm", "download": "pull"}  # what is typed by habit
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}
EXAMPLES = ("vserve Qwen/Qwen3-0.6B --max-model-len 8K", "vserve chat 'What is 12 + 30?'")
USAGE = "vserve [MODEL] [options] | vserve COMMAND ..."


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 fine, 1 could not run, 2 wrong usage."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:  # while modules are imported; who runs for long catches it
        print("vserve: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough; Python would complain about stdout when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: list[str]) -> int:
    first = argv[0] if argv else ""
    if first in ("-h", "--help", "help"):
        print(overview())
        return 0
    if first in ("-V", "--version", "version"):
        print(f"vserve {__version__}")
        return 0
    if not os.path.exists(first) and first in _ALIASES:
        argv[0] = first = _ALIASES[first]
    if first in COMMANDS:
        name = argv.pop(0)
    elif not first.startswith("-") and not os.path.exists(first) and (hint := did_you_mean(first, COMMANDS)):
        print(f"vserve: there is no command, and no folder, {first!r}{hint}", file=sys.stderr)
        return 2
    else:
        name = "serve"  # `vserve MODEL --port 8000` is `vserve serve MODEL --port 8000`
    module = load(name)
    rest: list[str] = []
    if getattr(module, "TAKES_REST", False) and "--" in argv:  # what stands behind it is another program's
        at = argv.index("--")
        argv, rest = argv[:at], argv[at + 1 :]
    arguments = command_parser(name, module).parse_args([_dashes(word) for word in argv])
    arguments.rest = rest
    code: int = module.run(arguments)
    return code


def overview() -> str:
    lines = [f"usage: {USAGE}", "", "Serve a language model over the OpenAI API."]
    for title, commands in GROUPS.items():
        lines += ["", styled(f"{title}:", "bold", sys.stdout)]
        lines += [f"  {name:<14}{help}" for name, (help, _) in commands.items()]
    lines += [
        "",
        "`vserve COMMAND --help` lists a command's options, `vserve serve --help=cache` those of one group.",
        "`vserve` alone serves the bundled demo model; then try `vserve chat`. `vserve version` says which it is.",
        "Exit codes: 0 fine, 1 could not run, 2 wrong usage, 128 + n ended by signal n.",
        "",
        examples(EXAMPLES),
    ]
    return "\n".join(lines)


def load(name: str) -> ModuleType:
    return importlib.import_module(f".{COMMANDS[name][1]}", __package__)


def command_parser(name: str, module: ModuleType) -> Parser:
    parser = Parser(prog=f"vserve {name}", description=module.__doc__)
    fill(parser, name, module)
    return parser


def fill(parser: argparse.ArgumentParser, name: str, module: ModuleType) -> None:
    if name == "serve":
        parser.usage = "vserve [serve] [MODEL] [options]"  # without it, all of them
    module.add_arguments(parser)
    parser.epilog = examples(module.EXAMPLES)


def _dashes(argument: str) -> str:
    """--max_model_len is --max-model-len."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    name, dot, key = name.partition(".")
    return name.replace("_", "-") + dot + key + equals + value


if __name__ == "__main__":
    sys.exit(main())
