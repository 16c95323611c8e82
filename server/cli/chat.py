"""talk to a running server, several turns"""

from __future__ import annotations

import argparse
import sys

from . import talk
from .talk import Connection, TalkError
from .terminal import styled

COMMANDS = {
    "/clear": "forget what was said",
    "/system TEXT": "another system prompt, and forget what was said",
    "/again": "another answer to the last message",
    "/exit": "leave, as Ctrl-D does",
}


EXAMPLES = ("vserve chat 'What is 12 + 30?'", "vserve chat --url http://host:8000/v1 --system-prompt 'Be brief.'")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system-prompt", metavar="TEXT", help="how the model should behave")
    talk.add_text(parser, "one message, one answer, no more")
    talk.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0; 1 where the server refuses or is not there; 130 for Ctrl-C in an answer with --quick."""
    try:
        conversation = Conversation(Connection(arguments), arguments.system_prompt)
        if (once := talk.said_once(arguments)) is not None:
            return 130 if conversation.say(once) else 0
        return _converse(conversation, keep=not arguments.no_history)
    except TalkError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class Conversation:
    def __init__(self, connection: Connection, system: str | None) -> None:
        self.connection = connection
        self._system = system
        self.clear()

    def clear(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def set_system(self, text: str) -> None:
        self._system = text or None
        self.clear()

    def say(self, text: str) -> bool:
        """Prints the answer. Whether it was stopped. Raises TalkError, and then nothing was said."""
        asked = [*self._messages, {"role": "user", "content": text}]
        answer = self.connection.answer("chat/completions", {"messages": asked})
        talk.finish(answer)
        # An answer that was stopped is what the person saw: it stays part of the conversation, unless it is empty.
        self._messages = [*asked, {"role": "assistant", "content": answer.text}] if answer.text else self._messages
        return answer.stopped

    def say_again(self) -> None:
        if self._messages[-1:] and self._messages[-1]["role"] == "assistant":
            *self._messages, question, _ = self._messages
            self.say(question["content"])


def _converse(conversation: Conversation, keep: bool) -> int:
    terminal = sys.stdin.isatty()
    if terminal:
        hint = "Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands"
        print(styled(f"{conversation.connection.model} at {conversation.connection.url}; {hint}", "dim", sys.stdout))
    code = 0
    with talk.past_input("chat", keep):
        for text in talk.inputs("> "):
            try:
                if terminal and text.startswith("/"):
                    if _command(conversation, text):
                        break
                elif conversation.say(text) and not terminal:
                    return 130
            except KeyboardInterrupt:  # just as an answer ended
                if not terminal:
                    raise
                print()
            except TalkError as error:  # such as a context that is full: the person decides what to do
                print(f"vserve: {error}", file=sys.stderr)
                code = 1
                if not terminal:
                    break
    return 0 if terminal else code


def _command(conversation: Conversation, text: str) -> bool:
    """Whether it was the one that leaves."""
    name, _, rest = text.strip().partition(" ")
    if name in ("/exit", "/quit"):
        return True
    if name == "/clear":
        conversation.clear()
    elif name == "/system":
        conversation.set_system(rest.strip())
    elif name == "/again":
        conversation.say_again()
    else:
        print("\n".join(f"  {command:<14}{help}" for command, help in COMMANDS.items()))
    return False
