"""What chat and complete share: the connection to a running server, sampling flags, and an answer that appears."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from ..options.hint import did_you_mean
from .terminal import printable, styled

SAMPLING: dict[str, tuple[type, str]] = {
    "temperature": (float, "0: always the likeliest token"),
    "top_p": (float, "sample among the likeliest tokens of this share"),
    "top_k": (int, "sample among so many tokens"),
    "min_p": (float, "leave out tokens this much less likely than the likeliest"),
    "presence_penalty": (float, "against tokens that the answer has already"),
    "frequency_penalty": (float, "against tokens that the answer has often"),
    "repetition_penalty": (float, "against tokens that prompt or answer have; 1: none"),
    "max_tokens": (int, "longest answer"),
    "seed": (int, "the same answer again"),
}
KEY_VARIABLES = ("VSERVE_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")
HISTORY_LENGTH = 1000
_QUOTES = '"""'


class TalkError(Exception):
    """The server cannot be reached, or refuses. One line: what is wrong, and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", default="http://localhost:8000/v1", help="of the API (default: %(default)s)")
    group.add_argument("--api-key", metavar="KEY", help=f"default: the variable {', '.join(KEY_VARIABLES)}")
    group.add_argument("--model-name", metavar="NAME", help="default: the first that the server lists")
    group.add_argument("--cacert", metavar="FILE", help="of the authority that has signed the server's certificate")
    group = parser.add_argument_group("sampling", "default: the server's")
    for name, (kind, help) in SAMPLING.items():
        metavar = "N" if kind is int else "X"
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=help)
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be repeated")
    parser.add_argument("--no-history", action="store_true", help="neither read nor keep the file of past input")


def key_of(arguments: argparse.Namespace) -> str | None:
    """--api-key, else that of the first variable that has one."""
    key: str | None = arguments.api_key
    return key or next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)


def add_text(parser: argparse.ArgumentParser, quick: str) -> None:
    """What is said once, by either name; without it there are many turns."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("text", nargs="*", default=[], metavar="TEXT", help="the same as --quick")
    group.add_argument("-q", "--quick", metavar="TEXT", help=quick)


def said_once(arguments: argparse.Namespace) -> str | None:
    return " ".join(arguments.text) if arguments.text else arguments.quick


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in (*SAMPLING, "stop")}
    return {name: value for name, value in given.items() if value is not None}


@dataclass
class Answer:
    text: str = ""
    stopped: bool = False  # by Ctrl-C
    ttft: float | None = None  # seconds
    seconds: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """One line for the person who waits."""
        parts = ["stopped"] if self.stopped else []
        tokens = self.usage.get("completion_tokens")
        if tokens is not None:
            parts.append(f"{tokens} tokens in {self.seconds:.2f} s")
        if self.ttft is not None:
            parts.append(f"first after {self.ttft * 1000:.0f} ms")
        return ", ".join(parts)


def _is_here(url: str) -> bool:
    """Whether it names this machine, which no proxy of the environment has to be asked for."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return False


class Connection:
    def __init__(self, arguments: argparse.Namespace) -> None:
        """Raises TalkError where there is no server."""
        key = key_of(arguments)
        self.url = arguments.url.rstrip("/")
        headers = {"authorization": f"Bearer {key.strip()}"} if key else {}
        try:
            proxied, cacert = not _is_here(self.url), getattr(arguments, "cacert", None)
            trusted = True if cacert is None else ssl.create_default_context(cafile=os.path.expanduser(cacert))
            self._http = httpx.Client(
                headers=headers, timeout=httpx.Timeout(10, read=None), trust_env=proxied, verify=trusted
            )
        except OSError as error:
            raise TalkError(f"--cacert {cacert} cannot be used ({error.strerror or error})") from None
        except (ValueError, ImportError) as error:  # the latter: a proxy that speaks SOCKS, for which httpx needs more
            raise TalkError(f"cannot use these settings ({error})") from None
        self.sampling = sampling(arguments)
        self.model = arguments.model_name or self.models()[0]

    def set(self, name: str, value: str) -> None:
        """Another way to sample from here on; an empty value: the server's. Raises TalkError."""
        kind = SAMPLING.get(name.replace("-", "_"))
        if kind is None:
            raise TalkError(f"there is no setting {name!r}{did_you_mean(name, SAMPLING)}: {', '.join(SAMPLING)}")
        try:
            self.sampling.pop(name.replace("-", "_"), None)
            if value:
                self.sampling[name.replace("-", "_")] = kind[0](value)
        except ValueError:
            raise TalkError(f"{name} {value!r} is no number") from None

    def models(self) -> list[str]:
        """The names that the server has, one at least. Raises TalkError."""
        try:
            response = self._http.get(f"{self.url}/models", timeout=30)
            if response.status_code != 200:
                raise TalkError(_refusal(response))
            names = [str(model["id"]) for model in response.json()["data"]]
            return [names[0], *names[1:]]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TalkError(self._unreachable(error)) from None
        except (ValueError, LookupError, TypeError):
            raise TalkError(f"{self.url}/models lists no model; check --url, which ends in /v1") from None

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        """Prints the answer while it comes. Ctrl-C ends the answer, not the program. Raises TalkError."""
        body = {
            "model": self.model,
            **self.sampling,
            **body,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer, begun = Answer(), time.monotonic()
        try:
            for kind, text in self._pieces(path, body, answer):
                if answer.ttft is None:
                    answer.ttft = time.monotonic() - begun
                if kind == "text":  # before it is shown: what was seen is kept, whenever Ctrl-C comes
                    answer.text += text
                _show(text, dim=kind == "reasoning")
        except KeyboardInterrupt:  # leaving the stream has closed the connection, and the server stops too
            answer.stopped = True
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TalkError) as error:
            if answer.ttft is not None:
                print()
            if isinstance(error, TalkError):
                raise
            if isinstance(error, ValueError):
                raise TalkError(f"{self.url} sends what is no event stream; check --url, which ends in /v1") from None
            raise TalkError(self._unreachable(error)) from None
        answer.seconds = time.monotonic() - begun
        return answer

    def _pieces(self, path: str, body: dict[str, Any], answer: Answer) -> Iterator[tuple[str, str]]:
        """("text" or "reasoning", a piece of it)."""
        with self._http.stream("POST", f"{self.url}/{path}", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise TalkError(_refusal(response))
            for line in _lines(response):
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if error := event.get("error"):
                    raise TalkError(str(error.get("message", error) if isinstance(error, dict) else error))
                answer.usage = event.get("usage") or answer.usage
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
                        yield "reasoning", reasoning
                    if text := delta.get("content") or choice.get("text"):
                        yield "text", text

    def _unreachable(self, error: Exception) -> str:
        what = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in what:
            return f"the certificate of {self.url} is not trusted: name its authority with --cacert"
        return f"cannot reach {self.url} ({what}): start a server with `vserve`, or name one with --url"


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """httpx would break them at Unicode's line separators too, which JSON may hold."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines


def _refusal(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        message = response.text[:200] or "(no body)"
    if response.status_code == 401:
        return f"the server answers 401, for it wants a key that it knows: give --api-key, or set {KEY_VARIABLES[0]}"
    return f"the server answers {response.status_code}: {printable(str(message))}"


def _show(text: str, dim: bool) -> None:
    if sys.stdout.isatty():
        text = printable(text)
    print(styled(text, "dim", sys.stdout) if dim else text, end="", flush=True)


def finish(answer: Answer) -> None:
    """Ends the line; on a terminal, also says how fast it was."""
    print()
    if sys.stdout.isatty():
        print(styled(answer.summary(), "dim", sys.stdout))


@contextlib.contextmanager
def past_input(name: str, keep: bool) -> Iterator[None]:
    """Line editing at the prompt, with what was typed in earlier sessions."""
    try:
        import readline
    except ImportError:  # some Pythons are built without
        yield
        return
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(state) / "vserve" / f"{name}_history"
    if not keep or not sys.stdin.isatty():
        yield
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LENGTH)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)


def inputs(prompt: str) -> Iterator[str]:
    """What a person types, or the lines of stdin. A line that ends with \\ goes on in the next; three quotes begin and
    end several. Ends with Ctrl-D."""
    terminal, quoted = sys.stdin.isatty(), False
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines or quoted else prompt) if terminal else "")
        except EOFError:
            if terminal:
                print()
            elif lines:
                yield "\n".join(lines)
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("\n(Ctrl-D leaves)")
            lines, quoted = [], False
            continue
        if terminal and (quoted or line.lstrip().startswith(_QUOTES)):
            line = line if quoted else line.lstrip()[len(_QUOTES) :]
            quoted = not line.rstrip().endswith(_QUOTES)
            lines += [line] if quoted else [line.rstrip()[: -len(_QUOTES)]]
            if quoted:
                continue
            line = lines.pop()
        elif line.endswith("\\"):
            lines.append(line[:-1])
            continue
        text, lines = "\n".join([*lines, line]), []
        if text.strip():
            yield text
