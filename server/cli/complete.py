"""let a running server continue a text"""

from __future__ import annotations

import argparse
import sys

from . import talk
from .talk import Connection, TalkError

EXAMPLES = ("vserve complete 'Once upon a time' --max-tokens 50", "vserve complete --temperature 0 < lines.txt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    talk.add_text(parser, "one text, one continuation, no more")
    talk.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0; 1 where the server refuses or is not there; 130 for Ctrl-C with --quick."""
    try:
        connection = Connection(arguments)
        once = talk.said_once(arguments)
        texts = talk.inputs("> ") if once is None else iter([once])
        interactive = once is None and sys.stdin.isatty()
        code = 0
        with talk.past_input("complete", keep=once is None and not arguments.no_history):
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
