"""What the person who starts the server reads: how far it is, and where it listens."""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from typing import Any

from ... import __version__
from ...engine.link import logs
from ...engine.link.messages import EngineInfo, Progress
from ..options.config import ServerConfig
from ..options.http import ENVIRONMENT
from .download_line import Download

logger = logging.getLogger("vserve")
DOWNLOAD = "download"  # a phase that may take hours
LOGGED_EVERY = 30.0  # seconds, of a download where there is no terminal


class ProgressLine:
    """One line on a terminal that says how far start-up is; plain log lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._phase = ""
        self._shown = 0.0
        self._download = Download()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if not self._terminal:
            if progress.phase != self._phase:
                logger.info("starting: %s", progress.phase)
            elif progress.phase == DOWNLOAD and now - self._shown >= LOGGED_EVERY:
                logger.info("%s", self._download.line(progress.done, progress.total))
            else:
                return
            self._phase, self._shown = progress.phase, now
            return
        if progress.phase == self._phase and progress.done < progress.total and now - self._shown < 0.05:
            return
        self._phase, self._shown = progress.phase, now
        text = f"starting: {progress.phase}"
        if progress.phase == DOWNLOAD and progress.done:
            text = self._download.line(progress.done, progress.total)
        elif progress.total:
            share = progress.done / progress.total
            bar = "█" * int(30 * share) + "░" * (30 - int(30 * share))
            unit, name = (1e9, "GB") if progress.total >= 1e8 else (1e6, "MB")
            text += f" {bar} {share:4.0%}  {progress.done / unit:.1f} of {progress.total / unit:.1f} {name}"
        print(f"{logs.CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._terminal and self._phase:
            print(logs.CLEAR_LINE, end="", file=sys.stderr, flush=True)
        self._phase = ""

    def ready(
        self, info: EngineInfo, config: ServerConfig, sock: socket.socket, seconds: float, chats: bool = True
    ) -> None:
        spent = info.startup_seconds
        spent = {"imports": seconds - sum(spent.values())} | spent  # the engine counts from when it can
        phases = ", ".join(f"{name} {part:.1f}" for name, part in spent.items() if part >= 0.05)
        scheme = "http" if config.ssl_certfile is None else "https"
        if config.uds is not None:
            url, curl = f"unix:{config.uds}", f"--unix-socket {shlex.quote(config.uds)} {scheme}://localhost"
        else:
            host = "localhost" if config.host in ("0.0.0.0", "::", "127.0.0.1") else config.host
            url = curl = f"{scheme}://{host}:{sock.getsockname()[1]}"
        name = config.served_model_name[0]
        logs.say(
            f"vserve {__version__} serves {name}{purpose(info)} on {info.device} in {info.dtype}, context "
            f"{info.max_model_len} tokens; ready in {seconds:.1f} s ({phases})\n"
            f"{url}   try:\n"
            f"  {example(config, curl, name, chats, info.tasks)}"
        )


def purpose(info: EngineInfo) -> str:
    """What it is for, where that is not text."""
    if "generate" in info.tasks:
        return ""
    labels = f" of {len(info.labels)} label{'s' * (len(info.labels) > 1)}" if info.labels else ""
    return f" ({', '.join(info.tasks)}{labels}; no text)"


def example(config: ServerConfig, address: str, name: str, chats: bool, tasks: Sequence[str] = ("generate",)) -> str:
    """A command that this very server answers, with its lock and its certificate, and in words that its model knows.
    The key is named, not shown: what is printed stays in logs."""
    asked: dict[str, Any]
    if "generate" not in tasks:
        path, asked = ("/v1/embeddings" if "embed" in tasks else "/classify"), {"input": "Hello!"}
    elif chats:
        path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    else:
        path, asked = "/v1/completions", {"prompt": "Hello", "max_tokens": 32}
    words = [f"curl {address}{path}"]
    if config.ssl_certfile is not None:
        words.append(f"--cacert {shlex.quote(config.ssl_certfile)}")
        if config.ssl_cert_reqs == ssl.CERT_REQUIRED:
            words.append("--cert YOURS.pem")
    if any((config.api_key, config.api_key_file, *map(os.environ.get, ENVIRONMENT["api_key"]))):
        words.append('-H "authorization: Bearer $VSERVE_API_KEY"')
    words.append("-H 'content-type: application/json'")
    body = json.dumps({"model": name, **asked}, ensure_ascii=False)
    return f"{' '.join(words)} \\\n    -d {shlex.quote(body)}"
