"""point a coding agent at a server: prints what to set, or starts it so"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from . import servers, talk
from .talk import KEY_VARIABLES, Connection, TalkError

EXAMPLES = ("vserve connect claude", "vserve connect codex --start", "vserve connect aider --url http://host:8000/v1")
TAKES_REST = True  # words for the agent
_NO_KEY = "none"  # what a server without keys is sent, for agents that want one


@dataclass
class Agent:
    """How one is started: the words of its command and the variables that it reads."""

    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def claude(root: str, model: str, key: str) -> Agent:
    """https://code.claude.com/docs/en/llm-gateway: it asks /v1/messages."""
    return Agent(["claude"], {
        "ANTHROPIC_BASE_URL": root, "ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    })  # fmt: skip


def codex(root: str, model: str, key: str) -> Agent:
    """It asks /v1/responses."""
    provider = f'{{name="vserve", base_url="{root}/v1", wire_api="responses", env_key="VSERVE_API_KEY"}}'
    settings = ['model_provider="vserve"', f"model_providers.vserve={provider}"]
    words = [word for setting in settings for word in ("-c", setting)]
    return Agent(["codex", *words, "-m", model], {"VSERVE_API_KEY": key})


def opencode(root: str, model: str, key: str) -> Agent:
    provider = {
        "npm": "@ai-sdk/openai-compatible", "name": "vserve", "options": {"baseURL": f"{root}/v1", "apiKey": key},
        "models": {model: {}},
    }  # fmt: skip
    config = {"provider": {"vserve": provider}, "model": f"vserve/{model}"}
    return Agent(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def aider(root: str, model: str, key: str) -> Agent:
    return Agent(["aider", "--model", f"openai/{model}"], {"OPENAI_API_BASE": f"{root}/v1", "OPENAI_API_KEY": key})


AGENTS: dict[str, tuple[Callable[[str, str, str], Agent], str]] = {
    "claude": (claude, "npm install -g @anthropic-ai/claude-code"),
    "codex": (codex, "npm install -g @openai/codex"),
    "opencode": (opencode, "npm install -g opencode-ai"),
    "aider": (aider, "pip install aider-chat"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("agent", choices=list(AGENTS))
    parser.add_argument("--start", action="store_true", help="start it; words behind -- go to it")
    group = parser.add_argument_group("server")
    group.add_argument("--url", help="of the API (default: the server that runs here)")
    group.add_argument("--api-key", metavar="KEY", help=f"default: the variable {', '.join(KEY_VARIABLES)}")
    group.add_argument("--model-name", metavar="NAME", help="default: the first that the server lists")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 where there is no server or no such program. With --start it becomes the agent."""
    make, install = AGENTS[arguments.agent]
    try:
        url = arguments.url or _running()
        for name in (*talk.SAMPLING, "stop"):
            setattr(arguments, name, None)
        arguments.url = url
        model = Connection(arguments).model
    except TalkError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    key = talk.key_of(arguments)
    agent = make(url.rstrip("/").removesuffix("/v1"), model, key or _NO_KEY)
    command = [*agent.command, *arguments.rest]
    if not arguments.start:
        for name, value in agent.variables.items():
            hidden = value.replace(key, "YOUR-KEY") if key else value  # what is printed stays in logs
            print(f"export {name}={shlex.quote(hidden)}")
        print(shlex.join(command))
        return 0
    if shutil.which(command[0]) is None:
        print(f"vserve: {command[0]} is not installed: `{install}`", file=sys.stderr)
        return 1
    sys.stdout.flush()
    os.execvpe(command[0], command, {**os.environ, **agent.variables})


def _running() -> str:
    """The URL of the one server that runs here. Raises TalkError."""
    found = [one for one in servers.find() if one.port]
    if not found:
        raise TalkError("no server of yours runs here: start one with `vserve MODEL`, or name one with --url")
    if len(found) > 1:
        names = ", ".join(f"{one.address}/v1 ({', '.join(one.models)})" for one in found)
        raise TalkError(f"{len(found)} servers run here: {names}; name one with --url")
    host = urlsplit(found[0].address)
    return f"{host.scheme}://{host.netloc}/v1"
