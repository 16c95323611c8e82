"""The engine process, started by the API process as `python -m vserve.engine.start.process --fd N` (a socket pair)."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack

from ..errors import ConfigError
from ..files.prefetch import Prefetch
from ..grammar import grammar_libraries
from ..link import logs
from ..link.clients import FIRST, Clients
from ..link.connection import Connection
from ..link.logs import die_with_parent, dump_stacks_on_signal
from ..link.messages import AddRequest, EngineStart, Failure, FromEngine, Heartbeat, Progress, ToEngine
from ..options.config import EngineConfig
from ..options.kv_events_settings import settings
from ..ranks.messages import Asked, Word
from ..ranks.peers import Peers, RankLost, share_of_threads
from ..schedule.kv_events import Publisher
from . import faults
from .precompile import Precompile, use_kernel_cache

logger = logging.getLogger(__name__)

HEARTBEAT = 1.0  # seconds between two
LAST_WORDS = 5.0  # seconds for the API process to read them
GUESTS_LAST_WORDS = 1.0  # and for those beside it: one that hangs must not hold up the next engine


Send = Callable[[FromEngine], None]
Submit = Callable[[ToEngine], None]
Attach = Callable[[Submit], None]


async def run_engine(config: EngineConfig, send: Send, attach: Attach) -> None:
    """Loads, says EngineInfo, and steps until a Shutdown. `attach` receives the function that takes messages.

    Raises ConfigError or ModelError for what the user can mend, RankLost, anything else for what the user cannot.
    """
    use_kernel_cache()
    config = share_of_threads(config)
    peers = Peers(config)
    try:
        await peers.start()
        if (launched := peers.launched) is not None:
            send, attach = heard_by(launched.say, send, attach)
        await run_rank_zero(config, peers, send, attach)
    except BaseException:
        peers.close(patience=0.0)  # they wait for rank 0, and read nothing
        raise
    peers.close()


def heard_by(say: Callable[[Word], None], send: Send, attach: Attach) -> tuple[Send, Attach]:
    """`send` and `attach` of an engine of which others hear as well."""

    def send_and_say(message: FromEngine) -> None:
        send(message)
        say(message)

    def attach_heard(submit: Submit) -> None:
        def heard(message: ToEngine) -> None:
            if isinstance(message, AddRequest):
                say(Asked.of(message))
            submit(message)

        attach(heard)

    return send_and_say, attach_heard


async def run_rank_zero(config: EngineConfig, peers: Peers, send: Send, attach: Attach) -> None:
    """As `run_engine`, whose other ranks have been started."""
    loop = asyncio.get_running_loop()

    def report(progress: Progress) -> None:  # called on the thread that starts the engine
        loop.call_soon_threadsafe(send, progress)
        faults.hit_phase(progress.phase)

    def before_memory() -> None:
        if prefetch is not None:
            prefetch.stop()
        if precompile is not None:
            precompile.wait()

    # Both work while torch is imported and the weights are copied.
    prefetch = Prefetch.start(config.model) if config.load_format != "dummy" else None
    precompile = Precompile.start(config)
    try:
        # torch takes seconds: on a thread, so that the heart beats and the first Progress leaves
        await asyncio.to_thread(importlib.import_module, ".engine", __package__)
        from .engine import Engine
        from .loop import EngineLoop

        # Beside the weights, so that the first grammar does not do it while others wait for their tokens.
        loading = asyncio.create_task(asyncio.to_thread(grammar_libraries.load))
        engine = await peers.beside(asyncio.to_thread(Engine, config, report, before_memory, peers.seat))
        await loading
    finally:  # also of an engine that cannot start: this process may live on
        if prefetch is not None:
            prefetch.stop()
        if precompile is not None:
            precompile.kill()
    with ExitStack() as leaving:
        executor = engine.executor(peers)
        leaving.callback(executor.close)
        steps = EngineLoop(
            engine.settings, executor, send, vocab_size=engine.settings.vocab_size, seed=config.seed,
            shares_thread=config.engine_in_process, adapters=engine.adapter_store,
            other_adapters=peers.stores if len(peers) else None,
        )  # fmt: skip
        leaving.callback(steps.masks.close)
        if steps.adapters is not None:
            leaving.callback(steps.adapters.close)
        if (published := settings(config.kv_events_config)) is not None:
            publisher = Publisher(published)
            leaving.callback(publisher.close)
            steps.publish(publisher)
        faults.arm_engine(steps, engine.rank.runner)
        attach(steps.submit)
        send(engine.info)
        await peers.beside(steps.run())


async def serve(sock: socket.socket, listener: socket.socket | None = None) -> int:
    """Returns the exit code. `listener`: where further clients come."""
    configured: asyncio.Future[EngineConfig] = asyncio.get_running_loop().create_future()
    submit: Submit | None = None
    early: list[ToEngine] = []
    clients: Clients | None = None

    def receive(message: EngineStart | ToEngine) -> None:
        if isinstance(message, EngineStart):
            configured.set_result(EngineConfig(**message.options))
        elif clients is not None:
            clients.take(FIRST, message)
        else:
            take(message)

    def take(message: ToEngine) -> None:
        if submit is not None:
            submit(message)
        else:
            early.append(message)

    def attach(function: Submit) -> None:
        nonlocal submit
        gc.collect()
        gc.freeze()  # what start-up made lives as long as the process: the collector need not look at it again
        submit = function
        for message in early:
            submit(message)

    # Without the API process there is nobody to serve; os._exit because a step may be running on another thread.
    connection = await Connection.open(sock, EngineStart | ToEngine, receive, lambda _: os._exit(0))
    loop = asyncio.get_running_loop()
    send: Send = connection.send
    clients = None
    if listener is not None:
        clients = Clients(connection.send, take)
        send = clients.send
        clients.server = await loop.create_unix_server(clients.accept, sock=listener)

    def beat() -> None:
        send(Heartbeat())
        loop.call_later(HEARTBEAT, beat)

    beat()
    try:
        config = await configured
        send(Progress("imports"))
        await run_engine(config, send, attach)
        code = 0
    except Exception as error:
        expected = isinstance(error, ConfigError | RankLost)
        if not expected:
            logger.error("engine process failed", exc_info=error)
        message = " ".join((str(error) if expected else f"{type(error).__name__}: {error}").split())
        send(Failure(message, isinstance(error, ConfigError)))
        code = 1
    guests = [] if clients is None else [clients.finish(GUESTS_LAST_WORDS)]
    await asyncio.gather(connection.finish(LAST_WORDS), *guests)
    return code


async def serve_and_exit(sock: socket.socket, listener: socket.socket | None) -> None:
    """Does not return: a loop waits at its end for threads, which may wait for a device or a rank for ever."""
    code = 1
    try:
        code = await serve(sock, listener)
    except Exception as error:
        logger.error("the engine process cannot say its last words", exc_info=error)
    logs.flush()
    os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--clients-fd", type=int)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    dump_stacks_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API process decides when this one ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # also where a container sends it to every process
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as systemd may
    logs.configure(arguments.log_level, arguments.log_format, "engine")
    sock = socket.socket(fileno=arguments.fd)
    sock.setblocking(False)
    listener = None if arguments.clients_fd is None else socket.socket(fileno=arguments.clients_fd)
    try:
        import uvloop

        uvloop.run(serve_and_exit(sock, listener))
    except ImportError:
        asyncio.run(serve_and_exit(sock, listener))


if __name__ == "__main__":
    main()
