"""A rank's process, started by its engine's as `python -m vserve.engine.start.rank_process --fd N` (a socket pair)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import logging
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..link import logs
from ..link.logs import die_with_parent, dump_stacks_on_signal
from ..link.messages import Failure
from ..options.config import EngineConfig
from ..ranks.hang import INTERVAL, Effort, Starting, pulse, stepping
from ..ranks.messages import Channel, Execute, Follow, ForgetAdapters, Join, ReadAdapter, Settle, ToRank
from . import faults
from .precompile import use_kernel_cache

if TYPE_CHECKING:
    from ..step.runner import ModelRunner

logger = logging.getLogger(__name__)

STAY = 10.0  # seconds that a rank which has failed waits for its end: others would fail when its connections break


class Pulses:
    """Tell how far this rank has come, on a thread of their own: it goes on while the main one waits."""

    def __init__(self, channel: Channel) -> None:
        self.effort: Effort = Starting()
        self._channel = channel
        threading.Thread(target=self._run, name="vserve-pulse", daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the engine is gone, and this process with it
            while True:
                self._channel.send(pulse(self.effort))
                time.sleep(INTERVAL)


def follow(channel: Channel, runner: ModelRunner) -> None:
    """Runs what the engine sends until it says to leave."""
    store = None
    if runner.adapters is not None:
        from ..ranks.adapters import RankStore

        store = RankStore(runner.adapters.store, channel, runner.device)
    while True:
        message = channel.receive()
        if isinstance(message, Execute):
            runner.execute(message.plan)
        elif isinstance(message, Follow):
            runner.follow(message.postponed, message.cuts, message.masked)
        elif isinstance(message, Settle):
            runner.settle()
        elif isinstance(message, ReadAdapter):
            assert store is not None, "rank 0 serves adapters, and this rank does not"
            store.read(message)
        elif isinstance(message, ForgetAdapters):
            assert store is not None
            store.forget(message)
        else:
            return


def run(channel: Channel, threads: int = 0) -> int:
    """Returns the exit code. `threads`: of its host, where that is another than rank 0's; 0: as the options say."""
    try:
        start = channel.receive()
        assert isinstance(start, Join)
        config = EngineConfig(**start.options)
        config = dataclasses.replace(config, cpu_threads=threads or config.cpu_threads)
        faults.rank = start.seat.rank
        pulses = Pulses(channel)
        use_kernel_cache()
        from ..step.runner import ModelRunner
        from .rank import Rank

        rank = Rank(config, lambda reached: faults.hit_phase(reached.phase), seat=start.seat)
        runner = rank.runner
        assert isinstance(runner, ModelRunner), "encoders are not divided"
        faults.arm_runner(runner)
        gc.collect()
        gc.freeze()
        pulses.effort = stepping(runner, threading.main_thread())
        follow(channel, runner)
        return 0
    except EOFError:
        return 0  # without its engine there is nobody to serve
    except Exception as error:
        expected = isinstance(error, ConfigError)
        if not expected:
            logger.error("the rank failed", exc_info=error)
        message = " ".join((str(error) if expected else f"{type(error).__name__}: {error}").split())
        with contextlib.suppress(OSError):
            channel.send(Failure(message))
            time.sleep(STAY)
        return 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--cpu-threads", type=int, default=0)
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args()
    if arguments.parent:  # not under a profiler
        die_with_parent(arguments.parent)
    dump_stacks_on_signal()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the engine decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    # Rank 0 says what all of them do; of the others only what goes wrong is told.
    level = "DEBUG" if arguments.log_level.upper() == "DEBUG" else "ERROR"
    logs.configure(level, arguments.log_format, f"rank {arguments.rank}")
    code = run(Channel(socket.socket(fileno=arguments.fd), ToRank), arguments.cpu_threads)
    logs.flush()
    os._exit(code)  # libraries wait at their exit for ranks that are gone


if __name__ == "__main__":
    main()
