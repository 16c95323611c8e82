"""talk to a running server, several turns"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..options.hint import did_you_mean
from . import talk
from .talk import Connection, TalkError
from .terminal import printable, styled

COMMANDS = {
    "/clear": "forget what was said",
    "/system TEXT": "another system prompt, and forget what was said",
    "/again": "another answer to the last message",
    "/model [NAME]": "which models and adapters the server has, or another one from here on",
    "/set [NAME VALUE]": f"how answers are sampled: {', '.join(talk.SAMPLING)}",
    "/save FILE": "keep what was said",
    "/load FILE": "go on with what was kept",
    '"""': "begins a message of several lines, and ends it",
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

    def save(self, file: str) -> int:
        """The messages, as a request has them, for whoever can read this user's files. How many. Raises TalkError."""
        try:
            path = Path(file).expanduser()
            text = json.dumps(
                {"model": self.connection.model, "messages": self._messages}, ensure_ascii=False, indent=1
            )
            path.touch(mode=0o600)
            path.write_text(text + "\n")
        except OSError as error:
            raise TalkError(f"cannot write {file or 'a file without a name'}: {error.strerror}") from None
        return len(self._messages)

    def load(self, file: str) -> int:
        """As `save` has written them. How many. Raises TalkError, and then nothing has changed."""
        try:
            messages = json.loads(Path(file).expanduser().read_text())["messages"]
            for message in messages:
                if message["role"] not in ("system", "user", "assistant") or not isinstance(message["content"], str):
                    raise ValueError
        except OSError as error:
            raise TalkError(f"cannot read {file or 'a file without a name'}: {error.strerror}") from None
        except (ValueError, LookupError, TypeError):
            raise TalkError(f"{file} holds no conversation: /save writes one") from None
        self._messages = messages
        return len(messages)

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
                if terminal and text.startswith("/") and "\n" not in text:
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
    """Whether it was the one that leaves. Raises TalkError."""
    name, _, rest = text.strip().partition(" ")
    rest, connection = rest.strip(), conversation.connection
    if name in ("/exit", "/quit", "/bye"):
        return True
    if name == "/clear":
        conversation.clear()
    elif name == "/system":
        conversation.set_system(rest)
    elif name == "/again":
        conversation.say_again()
    elif name == "/model":
        names = connection.models()
        if rest and rest not in names:
            raise TalkError(f"the server has no model {rest!r}{did_you_mean(rest, names)}: it has {', '.join(names)}")
        connection.model = rest or connection.model
        print("\n".join(f"{'*' if name == connection.model else ' '} {printable(name)}" for name in names))
    elif name == "/set":
        if rest:
            setting, _, value = rest.partition(" ")
            connection.set(setting, value.strip())
        print(", ".join(f"{name} {value}" for name, value in connection.sampling.items()) or "as the server has it")
    elif name == "/save":
        print(f"{conversation.save(rest)} messages are in {rest}")
    elif name == "/load":
        print(f"{conversation.load(rest)} messages were said so far")
    else:
        if name not in ("/help", "/?"):
            known = [command.partition(" ")[0] for command in COMMANDS]
            print(f"there is no {printable(name)}{did_you_mean(name, known)}")
        print("\n".join(f"  {command:<18}{help}" for command, help in COMMANDS.items()))
    return False
