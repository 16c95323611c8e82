"""serve a model over HTTP"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import stat
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from ... import __version__
from ...engine.config import ConfigError, EngineConfig
from ...engine.messages import Progress
from ..config import ServerConfig
from ..engine_client import EngineClient, EngineDeadError
from .flags import add_flags, read_flags

if TYPE_CHECKING:
    from ..tokenizer import TextModel

logger = logging.getLogger("vserve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig, ServerConfig)


def run(arguments: argparse.Namespace) -> int:
    try:
        engine_config, server_config = read_flags(arguments)
        sock = _bind(server_config)
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=server_config.log_level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)
    main = _serve(engine_config, server_config, sock)
    try:
        import uvloop

        return uvloop.run(main)
    except ImportError:
        return asyncio.run(main)
    except KeyboardInterrupt:
        return 130


def _bind(config: ServerConfig) -> socket.socket:
    """Takes the port before the model is loaded: a port in use is said at once, not after minutes."""
    if config.uds is not None:
        return _bind_uds(config.uds)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error}); choose another with --port or --host"
        ) from None
    return sock


def _bind_uds(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            sock.connect(path)
            raise ConfigError(f"--uds {path!r}: another server listens on it; stop that one or name another path")
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)  # left by a server that was killed; any other file is not ours to remove
        sock.bind(path)
    except OSError as error:
        raise ConfigError(f"cannot listen on --uds {path!r} ({error}); name a path in a folder you can write") from None
    return sock


async def _serve(engine_config: EngineConfig, server_config: ServerConfig, sock: socket.socket) -> int:
    started = time.monotonic()
    client = EngineClient(engine_config)
    signals = Signals()
    progress = ProgressLine()
    client.progress_listeners.append(progress)
    text = asyncio.create_task(asyncio.to_thread(_load_text, engine_config, server_config))
    try:
        await client.start()
        model = await text
    except asyncio.CancelledError:
        progress.done()
        await client.close()
        _leave(f"stopped by {signals.received} while starting", 128 + (signals.received or signal.SIGTERM))
    except Exception as error:
        progress.done()
        await client.close()
        if not isinstance(error, EngineDeadError | ConfigError):
            logger.error("start-up failed", exc_info=error)
        _leave(str(error), 1)
    progress.done()

    import uvicorn

    from ..app import create_app

    class Server(uvicorn.Server):
        """uvicorn's, but for its signal handlers, which end the process by the signal instead of exit code 0."""

        def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
            return contextlib.nullcontext()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            _announce(client, server_config, sock, time.monotonic() - started)

    app = create_app(client, server_config, model)
    server = Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, loop="none", lifespan="off", ws="none",
            timeout_graceful_shutdown=30,
        )
    )  # fmt: skip
    signals.server = server
    client.death_listeners.append(lambda _: setattr(server, "should_exit", True))
    gc.collect()
    gc.freeze()
    try:
        await server.serve(sockets=[sock])
    finally:
        await client.close()
        if server_config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(server_config.uds)
    if client.dead is not None:
        _leave(f"the engine died: {client.dead}", 1)
    return 0


class Signals:
    """SIGTERM and SIGINT: the first ends the server in order (or its start), the second at once."""

    def __init__(self) -> None:
        self.server: Any = None  # uvicorn's, once there is one
        self.received: signal.Signals | None = None
        self._last = 0.0
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def _receive(self, number: signal.Signals) -> None:
        # Ctrl-C under make or a shell script arrives twice, from the terminal and from the parent: that is one signal.
        repeated, self._last = time.monotonic() - self._last < 1.0, time.monotonic()
        if repeated:
            return
        if self.server is None:
            self._task.cancel()
        elif self.server.should_exit:
            self.server.force_exit = True
        else:
            self.server.should_exit = True
        self.received = number


def _leave(cause: str, code: int) -> NoReturn:
    """Ends the process with the cause as its last line: a thread still importing must neither delay nor outtalk it."""
    logging.disable()
    print(f"vserve: {cause}", file=sys.stderr, flush=True)
    os._exit(code)


def _load_text(engine: EngineConfig, server: ServerConfig) -> TextModel:
    from ..tokenizer import load_text_model  # imports transformers: on a thread, while the engine starts

    return load_text_model(engine.model, server, engine.revision)


def _announce(client: EngineClient, config: ServerConfig, sock: socket.socket, seconds: float) -> None:
    info = client.info
    phases = ", ".join(f"{name} {spent:.1f}" for name, spent in info.startup_seconds.items())
    if config.uds is not None:
        url, curl = f"unix:{config.uds}", f"--unix-socket {config.uds} http://localhost"
    else:
        host = "localhost" if config.host in ("0.0.0.0", "::", "127.0.0.1") else config.host
        url = curl = f"http://{host}:{sock.getsockname()[1]}"
    name = config.served_model_name[0]
    print(
        f"vserve {__version__} serves {name} on {info.device} in {info.dtype}, context {info.max_model_len} tokens; "
        f"ready in {seconds:.1f} s ({phases})\n"
        f"{url}   try:\n"
        f"  curl {curl}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}\'',
        flush=True,
    )


class ProgressLine:
    """One line on a terminal that says how far start-up is; plain log lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._phase = ""
        self._shown = 0.0

    def __call__(self, progress: Progress) -> None:
        if not self._terminal:
            if progress.phase != self._phase:
                logger.info("starting: %s", progress.phase)
            self._phase = progress.phase
            return
        now = time.monotonic()
        if progress.phase == self._phase and progress.done < progress.total and now - self._shown < 0.05:
            return
        self._phase, self._shown = progress.phase, now
        text = f"starting: {progress.phase}"
        if progress.total:
            share = progress.done / progress.total
            bar = "█" * int(30 * share) + "░" * (30 - int(30 * share))
            text += f" {bar} {share:4.0%}  {progress.done / 1e9:.1f} of {progress.total / 1e9:.1f} GB"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._terminal and self._phase:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self._phase = ""
