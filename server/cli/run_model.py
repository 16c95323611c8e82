"""chat with a model: downloads it where it is not here, serves it, ends the server with the conversation"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from ...engine.errors import ConfigError
from ...engine.options.config import EngineConfig
from ..options.config import ServerConfig
from . import chat, servers
from .flags import add_flags, read_flags

EXAMPLES = ("vserve run Qwen/Qwen3-0.6B", "vserve run Qwen/Qwen3-0.6B 'What is 12 + 30?' --max-model-len 8K")
_ADDRESS = re.compile(r"(https?://\S+)")
_OWN = ("text", "system_prompt", "no_history")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system-prompt", metavar="TEXT", help="how the model should behave")
    parser.add_argument("--keep", action="store_true", help="leave the server running; `vserve stop` ends it")
    parser.add_argument("--no-history", action="store_true", help="neither read nor keep the file of past input")
    add_flags(parser, EngineConfig, ServerConfig)
    parser.add_argument("text", nargs="*", default=[], metavar="TEXT", help="one message, one answer, no more")


def run(arguments: argparse.Namespace) -> int:
    """Returns what `vserve chat` does; where the server does not start, its own exit code."""
    try:
        engine, server = read_flags(arguments)
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    wanted = {engine.model, *server.served_model_name}
    if server.uds is not None:
        print("vserve: --uds is for `vserve serve`: a chat needs a port", file=sys.stderr)
        return 2
    for running in servers.find():
        if running.state == "ready" and running.port and (names := [name for name in running.models if name in wanted]):
            return chat.run(_chatting(arguments, f"{running.address}/v1", server, names[0]))
    log = _log_file() if arguments.keep else None
    for number in (signal.SIGTERM, signal.SIGHUP):  # a terminal that closes: the server has a session of its own
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    process, goes_on = start(_for_server(arguments), log), False
    try:
        url = _address(process)
        if url is None:
            code = process.wait()
            print(log.read_text() if log is not None else "", end="", file=sys.stderr)
            return code
        goes_on = arguments.keep  # not one that never came to answer
        code = chat.run(_chatting(arguments, f"{url}/v1", server))
        if arguments.keep:
            print(f"the server goes on at {url}, its log is {log}: `vserve stop {url.rpartition(':')[2]}` ends it")
        return code
    finally:
        if not goes_on or process.poll() is not None:
            process.terminate()
            process.wait()


def _log_file() -> Path:
    """Of a server that outlives this command."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "vserve"
    state.mkdir(parents=True, exist_ok=True)
    return state / f"run-{os.getpid()}.log"


def start(words: list[str], log: Path | None) -> subprocess.Popen[str]:
    """`vserve serve` with these words, on this machine alone and on any free port unless they say another. `log`: where
    it says what it has to say; None: here."""
    given = {word.partition("=")[0] for word in words}
    for option, value in (("--host", "127.0.0.1"), ("--port", "0"), ("--log-level", "warning")):
        if option not in given:
            words = [*words, option, value]
    command = [sys.executable, "-m", "vserve.server.cli.main", "serve", *words]
    # A session of its own: Ctrl-C ends an answer of the chat, not the server.
    if log is None:
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with log.open("w") as stream:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True, start_new_session=True)


def _for_server(arguments: argparse.Namespace) -> list[str]:
    """The words of this command line that `vserve serve` understands too."""
    found, left = [], iter(sys.argv[2:])
    texts = list(arguments.text)
    for word in left:
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-")  # as the parser has it
        if name == "--system-prompt":
            if not equals:
                next(left, None)
        elif name not in ("--keep", "--no-history"):
            found.append(word)
    for text in reversed(texts):
        del found[len(found) - 1 - found[::-1].index(text)]
    return [word for word in found if word != "--"]


def _address(process: subprocess.Popen[str]) -> str | None:
    """Where it answers, once it does; None: it has ended before."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := _ADDRESS.match(line):
            threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
            return found[1]
    return None


def _drain(stream: IO[str]) -> None:
    for _ in stream:
        pass


def _chatting(
    arguments: argparse.Namespace, url: str, server: ServerConfig, model: str | None = None
) -> argparse.Namespace:
    """What `vserve chat` would have been given."""
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    given = parser.parse_args(["--url", url])
    for name in _OWN:
        setattr(given, name, getattr(arguments, name))
    given.model_name = model
    given.api_key = next((line.key for line in server.key_lines("api_key")), None)
    return given
