"""let a running server continue a text"""

from __future__ import annotations

import argparse
import sys

from . import talk
from .talk import Connection, TalkError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quick", metavar="TEXT", help="one text, one continuation, no more")
    talk.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0; 1 where the server refuses or is not there; 130 for Ctrl-C with --quick."""
    try:
        connection = Connection(arguments)
        texts = talk.inputs("> ") if arguments.quick is None else iter([arguments.quick])
        interactive = arguments.quick is None and sys.stdin.isatty()
        code = 0
        with talk.past_input("complete", keep=arguments.quick is None and not arguments.no_history):
            for text in texts:
                try:
                    answer = connection.answer("completions", {"prompt": text})
                except TalkError as error:
                    if not interactive:
                        raise
                    print(f"vserve: {error}", file=sys.stderr)
                    continue
                talk.finish(answer)
                if answer.stopped and not interactive:
                    code = 130
                    break
        return code
    except TalkError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
