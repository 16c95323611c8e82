"""A server process from its first second to its last: start, watch, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from ..engine.errors import ConfigError
from ..engine.link import logs
from ..engine.options.config import EngineConfig
from ..engine.start import faults
from .client.client import Client
from .client.mailbox import EngineDeadError, ShuttingDownError
from .client.meeting import Meeting
from .client.replicas import make_client
from .client.watchdog import Watchdogs
from .colleagues import ColleagueError, Colleagues
from .http.front_door import FrontDoor
from .http.page import load_page
from .http.server import Server
from .http.uvicorn_options import uvicorn_options
from .options.beside import of_first
from .options.config import ServerConfig
from .reporter import Reporter
from .text.beside import Beside, on_gpu

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .team import Team

logger = logging.getLogger("vserve")

LAST_BYTES = 2.0  # seconds that answers get to leave when nothing more is computed for them
# Ctrl-C under make or a shell script arrives twice, from the terminal and from the parent: that is one signal.
SAME_SIGNAL = 0.5
# The compiler of grammars is loaded in the first moment without a request, or so long after the start without one.
QUIET = 0.5  # seconds
WITHOUT_QUIET = 30.0


async def _tell_to_reload(colleagues: Colleagues) -> None:
    try:
        await colleagues.tell("/own/reload")
    except ColleagueError as error:
        logger.error("SIGUSR2: %s", error)


class Service:
    def __init__(
        self, engine_config: EngineConfig, config: ServerConfig, sources: dict[str, str], sock: socket.socket,
        reporter: Reporter, meeting: Meeting | None = None,
    ) -> None:  # fmt: skip
        """`meeting`: of several API processes."""
        self.config = config
        self._meeting = meeting
        self._is_first = meeting is None or meeting.is_first
        self.sources = sources  # of the settings that are no defaults
        self.sock = sock
        self._reporter = reporter
        self.client = make_client(engine_config, restarts=config.engine_restarts, scalable=True, meeting=meeting)
        self.beside = Beside.of(config, engine_config)
        self.clients: list[Client] = [self.client, *([self.beside.client] if self.beside is not None else [])]
        for client in self.clients:
            client.death_listeners.append(lambda _: setattr(self.server, "should_exit", True))
        self.front = FrontDoor(self.client, config.root_path, load_page() if config.ui else None)
        num_processes = 1 if meeting is None else meeting.board.num_seats
        options = uvicorn_options(config, self._refused, num_processes)
        self._tls: ssl.SSLContext | None = getattr(options["http"], "tls", None)
        self.server = Server(self.front, last_bytes=LAST_BYTES, **options)
        self.app: FastAPI | None = None  # once everything is loaded
        self._team: Team | None = None
        if meeting is not None:
            from .team import Team  # with FastAPI and numpy, for which one process alone does not wait

            self._team = Team(meeting, self.front, lambda: self.client.config, config, sources, sock, self._give_up)
        self._cause: str | None = None  # why the server cannot go on
        self._started = time.monotonic()
        self._signal: signal.Signals | None = None  # the first that was received
        self._signal_time = 0.0
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> NoReturn:
        """Ends the process, with the cause as the last line where there is a cause."""
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                asyncio.get_running_loop().add_signal_handler(number, self._receive, number, task)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._reload)
        if self._team is not None:
            self._team.start()
        loaded = asyncio.Event()
        serving = asyncio.create_task(self._serve(loaded))
        app = await self._start(serving)
        # Who has started an engine ends it.
        hang_timeout = self.config.hang_timeout if self._is_first else 0.0
        limits = {"stall_timeout": self.config.stall_timeout, "hang_timeout": hang_timeout}
        watching = [asyncio.create_task(Watchdogs(client, **limits).run()) for client in self.clients]
        try:
            async with app.router.lifespan_context(app):
                self.app = self.front.app = app
                if self._team is not None:
                    await self._team.meet(app)
                loaded.set()
                if self.config.ssl_certfile is not None:
                    app.state.server.reloads["certificates"] = self._reload_certificates
                gc.collect()
                gc.freeze()
                seconds = time.monotonic() - self._started
                chats = app.state.server.model.tokenizer.has_chat_template
                if not serving.done():
                    self._reporter.ready(self.client.info, self.config, self.sock, seconds, chats)
                warming = asyncio.create_task(self._warm())
                await serving
                warming.cancel()
        finally:
            for watchdog in watching:
                watchdog.cancel()
            if self._team is not None:
                await self._team.close()
            await self._close()
            self._unlink()
        if self._cause is not None:
            self._leave(self._cause, 1)
        for client in self.clients:
            if client.dead is not None:
                self._leave(f"the engine died: {client.dead}", 1)
        if self._signal is not None:
            logger.info("ended in order after %s", self._signal.name)
        self._leave(None, 0)

    async def _serve(self, loaded: asyncio.Event) -> None:
        """The first process answers probes while it loads; the others take part when they can."""
        if not self._is_first:
            await loaded.wait()
        await self.server.serve(sockets=[self.sock])

    def _give_up(self, cause: str) -> None:
        self._cause = cause
        self.server.should_exit = True

    def _refused(self, reason: str) -> None:
        if self.app is not None:
            self.app.state.server.refused(reason)

    # ---- start ----

    async def _start(self, serving: asyncio.Task[None]) -> FastAPI:
        """Returns when everything is loaded; meanwhile the port answers that it is not."""
        progress = self._reporter
        for client in self.clients:
            client.progress_listeners.append(progress)
        loading = asyncio.create_task(self._load())
        try:
            await asyncio.wait((loading, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and (error := serving.exception()) is not None:
                raise error
            app = await loading
        except asyncio.CancelledError:
            progress.done()
            await self._close()
            number = self._signal or signal.SIGTERM
            self._leave(f"stopped by {number.name} while starting", 128 + number)
        except Exception as error:
            progress.done()
            await self._close()
            cause = str(error)
            if not isinstance(error, EngineDeadError | ConfigError):
                logger.error("start-up failed", exc_info=error)
                cause = f"{type(error).__name__}: {error}"
            self._leave(cause, 1)
        progress.done()
        for client in self.clients:
            client.progress_listeners.remove(progress)
        return app

    async def _load(self) -> FastAPI:
        app = asyncio.create_task(asyncio.to_thread(self._make_app))
        engine = asyncio.create_task(self._start_engines())
        # Without a tokenizer nobody should wait for the weights, nor for their download.
        done, _ = await asyncio.wait((app, engine), return_when=asyncio.FIRST_EXCEPTION)
        if app not in done:
            await engine  # it failed: the tokenizer may take minutes to load
        made = await app
        await engine
        from .generation.embedding import check_dimensions  # made has imported it

        if self.beside is None:
            check_dimensions(made.state.server.model.pooling, self.client.info)
        else:  # whom --pooler-config is about
            check_dimensions(self.beside.model.pooling, self.beside.client.info)
        if self._is_first:
            await made.state.server.adapters.load_all(self.config.modules())
        return made

    async def _start_engines(self) -> None:
        """On a card one after the other: the first model's engine takes for its cache what the second's has left."""
        if self.beside is None:
            await self.client.start()
        elif on_gpu(self.client.config):
            await self.beside.start()
            await self.client.start()
        else:
            await asyncio.gather(self.beside.start(), self.client.start())

    async def _close(self) -> None:
        for client in self.clients:
            await client.close()

    def _make_app(self) -> FastAPI:
        """On a thread, while the engine starts: its imports and the tokenizer take seconds."""
        from ..engine.describe.reading import (
            check_described,  # before the tokenizer: what breaks config.json may break both
        )
        from .app import create_app
        from .text.detokenizer import Detokenizer
        from .text.model import load_text_model

        faults.arm(Detokenizer, "feed", "detokenize")
        engine = self.client.config
        config = of_first(self.config)
        model = load_text_model(engine.model, config, engine, lambda folder: check_described(folder, engine))
        if self.beside is not None:
            self.beside.load()
        return create_app(self.client, config, model, sources=self.sources, beside=self.beside, meeting=self._meeting)

    async def _warm(self) -> None:
        """Loads what the first structured output would wait for, without being in the way of the first answers."""
        assert self.app is not None
        if not self.config.warm_grammars or self.config.skip_tokenizer_init:
            return
        deadline = time.monotonic() + WITHOUT_QUIET
        quiet_since = time.monotonic()
        while time.monotonic() < min(deadline, quiet_since + QUIET):
            await asyncio.sleep(QUIET / 5)
            if self._num_running:
                quiet_since = time.monotonic()
        await self.app.state.server.grammars.warm()

    # ---- end ----

    def _receive(self, number: signal.Signals, task: asyncio.Task[int]) -> None:
        """SIGTERM, SIGINT and SIGHUP: the first ends the server in order (or its start), the second at once."""
        repeated, self._signal_time = time.monotonic() - self._signal_time < SAME_SIGNAL, time.monotonic()
        if repeated:
            return
        number = signal.Signals(number)
        if self._signal is None:
            self._signal = number
            if self._team is not None:
                self._team.end(number)
            if self.app is None:
                task.cancel()
            else:
                self._draining = asyncio.create_task(self._drain())
        else:
            if self._team is not None:
                self._team.kill()
            for client in self.clients:
                client.kill()
            self._leave(f"stopped at once by a second {number.name}", 128 + number)

    def _reload(self) -> None:
        """SIGUSR2."""
        if self.app is None:
            logger.warning("SIGUSR2 while starting: nothing is read again")
            return
        server = self.app.state.server
        try:
            server.reload()
            if server.colleagues is not None:
                self._telling = asyncio.create_task(_tell_to_reload(server.colleagues))
        except ConfigError as error:
            logger.error("SIGUSR2: %s; what this is about stays as it was", error)

    def _reload_certificates(self) -> None:
        """For connections from now on. Raises ConfigError."""
        config, context = self.config, self._tls
        config.check_tls()
        assert context is not None and config.ssl_certfile is not None
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, config.ssl_keyfile_password or "")

    async def _drain(self) -> None:
        """Nothing new begins; what runs gets `shutdown_timeout` to finish, and then an error as its last word."""
        assert self.app is not None and self._signal is not None
        for state in self.app.state.server.states:
            state.draining = True
        timeout = self.config.shutdown_timeout
        if self._num_running:
            logger.info(
                "%s: finishing %d requests, for %g s at most; a second signal ends them",
                self._signal.name, self._num_running, timeout,
            )  # fmt: skip
        await self._until_idle(timeout)
        if self._num_running:
            logger.warning("%d requests are cut off: --shutdown-timeout %g is over", self._num_running, timeout)
            over = ShuttingDownError("the server is shutting down")
            for client in self.clients:
                client.fail_all(over)
            self.app.state.server.lanes.fail(over)
            await self._until_idle(LAST_BYTES)
        self.server.should_exit = True

    @property
    def _num_running(self) -> int:
        """Requests, and what goes on without one: responses in the background."""
        assert self.app is not None
        return self.front.num_open + len(self.app.state.server.tasks)

    async def _until_idle(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._num_running and not any(client.dead for client in self.clients) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _leave(self, cause: str | None, code: int) -> NoReturn:
        """The cause is the last line: a thread that still imports, or tokenises, must neither delay nor outtalk it."""
        if self._team is not None:
            self._team.kill()
        self._unlink()
        logs.flush()
        logging.disable()
        if cause is not None:
            logs.write_line(2, f"vserve: {' '.join(cause.split())}")
        os._exit(code)

    def _unlink(self) -> None:
        if self.config.uds is not None and self._is_first:
            with contextlib.suppress(OSError):
                os.unlink(self.config.uds)


def run(
    engine_config: EngineConfig, config: ServerConfig, sources: dict[str, str], sock: socket.socket, reporter: Reporter,
    meeting: Meeting | None = None,
) -> int:  # fmt: skip

    async def main() -> NoReturn:
        await Service(engine_config, config, sources, sock, reporter, meeting).run()

    try:
        import uvloop

        return uvloop.run(main())
    except ImportError:
        return asyncio.run(main())
    except KeyboardInterrupt:  # before the handlers were in place
        print("vserve: stopped by SIGINT while starting", file=sys.stderr)
        return 130
