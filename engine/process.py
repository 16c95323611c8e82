"""The engine process, started by the API process as `python -m vserve.engine.process --fd N` (a socket pair)."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

from .config import ConfigError, EngineConfig
from .connection import Connection
from .messages import EngineStart, Failure, FromEngine, Progress, ToEngine

logger = logging.getLogger(__name__)


async def run_engine(
    config: EngineConfig, send: Callable[[FromEngine], None], attach: Callable[[Callable[[ToEngine], None]], None]
) -> None:
    """Loads, says EngineInfo, and steps until a Shutdown. `attach` receives the function that takes messages.

    Raises ConfigError or ModelError for what the user can mend, anything else for what the user cannot.
    """
    from .executor import Executor  # torch is imported here: the first Progress is sent before it
    from .loop import EngineLoop
    from .worker import Worker

    loop = asyncio.get_running_loop()

    def report(progress: Progress) -> None:  # called on the worker's thread
        loop.call_soon_threadsafe(send, progress)

    worker = await asyncio.to_thread(Worker, config, report)
    executor = Executor(worker.runner, num_threads=worker.num_threads)
    engine = EngineLoop(worker.scheduler_config, executor, send, seed=config.seed)
    attach(engine.submit)
    send(worker.info)
    try:
        await engine.run()
    finally:
        executor.close()


async def serve(sock: socket.socket) -> int:
    """Returns the exit code."""
    configured: asyncio.Future[EngineConfig] = asyncio.get_running_loop().create_future()
    submit: Callable[[ToEngine], None] | None = None
    early: list[ToEngine] = []

    def receive(message: EngineStart | ToEngine) -> None:
        if isinstance(message, EngineStart):
            configured.set_result(EngineConfig(**message.options))
        elif submit is not None:
            submit(message)
        else:
            early.append(message)

    def attach(function: Callable[[ToEngine], None]) -> None:
        nonlocal submit
        gc.collect()
        gc.freeze()  # what start-up made lives as long as the process: the collector need not look at it again
        submit = function
        for message in early:
            submit(message)

    # Without the API process there is nobody to serve; os._exit because a step may be running on another thread.
    connection = await Connection.open(sock, EngineStart | ToEngine, receive, lambda _: os._exit(0))
    try:
        config = await configured
        connection.send(Progress("imports"))
        await run_engine(config, connection.send, attach)
        code = 0
    except Exception as error:
        from .model_config import ModelError

        expected = isinstance(error, ConfigError | ModelError)
        if not expected:
            logger.error("engine process failed", exc_info=error)
        message = str(error) if expected else f"{type(error).__name__}: {error}"
        connection.send(Failure(message))
        code = 1
    await asyncio.sleep(0)  # lets the last frame be written
    connection.close()
    return code


def die_with_parent() -> None:
    """Asks Linux to kill this process when the API process ends, however it ends."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API process decides when this one ends
    logging.basicConfig(level=arguments.log_level, format="%(levelname)s %(message)s", stream=sys.stderr)
    sock = socket.socket(fileno=arguments.fd)
    sock.setblocking(False)
    try:
        import uvloop

        code = uvloop.run(serve(sock))
    except ImportError:
        code = asyncio.run(serve(sock))
    sys.stderr.flush()
    os._exit(code)  # threads that wait for a device must not keep a finished process alive


if __name__ == "__main__":
    main()
