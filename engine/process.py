"""The engine process, started by the API process as `python -m vserve.engine.process --fd N` (a socket pair)."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

from . import faults, logs
from .config import ConfigError, EngineConfig
from .connection import Connection
from .kernel_cache import use_kernel_cache
from .messages import EngineStart, Failure, FromEngine, Heartbeat, Progress, ToEngine
from .precompile import Precompile
from .prefetch import Prefetch

logger = logging.getLogger(__name__)

HEARTBEAT = 1.0  # seconds between two
LAST_WORDS = 5.0  # seconds for the API process to read them


async def run_engine(
    config: EngineConfig, send: Callable[[FromEngine], None], attach: Callable[[Callable[[ToEngine], None]], None]
) -> None:
    """Loads, says EngineInfo, and steps until a Shutdown. `attach` receives the function that takes messages.

    Raises ConfigError or ModelError for what the user can mend, anything else for what the user cannot.
    """
    loop = asyncio.get_running_loop()

    def report(progress: Progress) -> None:  # called on the worker's thread
        loop.call_soon_threadsafe(send, progress)
        faults.hit_phase(progress.phase)

    def before_memory() -> None:
        if prefetch is not None:
            prefetch.stop()
        if precompile is not None:
            precompile.wait()

    use_kernel_cache()
    # Both work while torch is imported and the weights are copied.
    prefetch = Prefetch.start(config.model) if config.load_format != "dummy" else None
    precompile = Precompile.start(config)
    try:
        # torch takes seconds: on a thread, so that the heart beats and the first Progress leaves
        await asyncio.to_thread(importlib.import_module, ".worker", __package__)
        from .executor import Executor
        from .loop import EngineLoop
        from .worker import Worker

        worker = await asyncio.to_thread(Worker, config, report, before_memory)
    finally:  # also of an engine that cannot start: this process may live on
        if prefetch is not None:
            prefetch.stop()
        if precompile is not None:
            precompile.kill()
    executor = Executor(worker.runner, num_threads=worker.num_threads)
    engine = EngineLoop(
        worker.scheduler_config, executor, send, seed=config.seed, shares_thread=config.engine_in_process
    )
    faults.arm_engine(engine)
    attach(engine.submit)
    send(worker.info)
    try:
        await engine.run()
    finally:
        engine.masks.close()
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
    loop = asyncio.get_running_loop()

    def beat() -> None:
        connection.send(Heartbeat())
        loop.call_later(HEARTBEAT, beat)

    beat()
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
        message = " ".join((str(error) if expected else f"{type(error).__name__}: {error}").split())
        connection.send(Failure(message))
        code = 1
    await connection.finish(LAST_WORDS)
    return code


def die_with_parent(parent: int) -> None:
    """Asks Linux to kill this process when process `parent`, which started it, ends, however it ends."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before
            os._exit(0)


def dump_stacks_on_signal() -> None:
    """SIGUSR1 and fatal signals write the stacks of all threads to stderr, also while the GIL is held."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
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
    try:
        import uvloop

        code = uvloop.run(serve(sock))
    except ImportError:
        code = asyncio.run(serve(sock))
    logs.flush()
    os._exit(code)  # threads that wait for a device must not keep a finished process alive


if __name__ == "__main__":
    main()
