"""Runs plans and delivers their results on the event loop; waiting neither polls nor holds the GIL."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import torch

from ..link.plan import StepPlan, StepResult
from .encoder_runner import EncoderRunner
from .mask import TokenMask
from .runner import ModelRunner


class Executor(Protocol):
    """Runs steps somewhere, in order. A step is two calls: `execute` launches the forward pass, `sample` what follows.

    Each of them raises what the launch raises.
    """

    def execute(self, plan: StepPlan) -> None:
        """Starts a step. `sample` must follow before the next one."""
        ...

    def sample(self, mask: TokenMask | None = None) -> None:
        """The results come from `result`, oldest first."""
        ...

    def result(self) -> Awaitable[StepResult]:
        """Of the oldest step in flight. Raises what the step raised."""
        ...

    async def wait(self, seconds: float) -> bool:
        """Whether the oldest step in flight was over within that time."""
        ...

    def recover(self, error: Exception) -> None:
        """After a step has raised `error`. Raises RuntimeError where none can follow it."""
        ...

    def close(self) -> None: ...


class ThreadExecutor:
    """On one rank, in this process.

    On a GPU both calls launch on the loop's thread and a second thread blocks on the step's event. On the CPU, where
    launching is computing, the second thread does it all, once `sample` has been called.
    """

    def __init__(self, runner: ModelRunner | EncoderRunner, *, num_threads: int | None = None) -> None:
        self.runner = runner
        self.asynchronous = runner.device.type == "cuda"
        self.num_threads = num_threads
        self._plan: StepPlan | None = None  # executed, not sampled
        self._futures: deque[asyncio.Future[StepResult]] = deque()
        self._work: queue.SimpleQueue[tuple[Callable[[], StepResult], asyncio.Future[StepResult]] | None] = (
            queue.SimpleQueue()
        )
        self.thread = threading.Thread(target=self._run, name="vserve-executor", daemon=True)
        self.thread.start()

    def execute(self, plan: StepPlan) -> None:
        if self.asynchronous and plan.rows:
            self.runner.execute(plan)
        elif plan.adapters:
            assert isinstance(self.runner, ModelRunner) and self.runner.adapters is not None
            self.runner.adapters.take(plan)
        self._plan = plan

    def sample(self, mask: TokenMask | None = None) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None, "sample() without execute()"
        future = asyncio.get_running_loop().create_future()
        if not plan.rows:  # legal: it only keeps its place in the order
            self._futures.append(future)
            future.set_result(StepResult(plan.step, []))
            return
        if self.asynchronous:
            work: Callable[[], StepResult] = self.runner.sample(mask).wait
        else:

            def work() -> StepResult:
                self.runner.execute(plan)
                return self.runner.sample(mask).wait()

        self._futures.append(future)
        self._work.put((work, future))

    @property
    def newest(self) -> asyncio.Future[StepResult]:
        """Of the step sampled last."""
        return self._futures[-1]

    def result(self) -> asyncio.Future[StepResult]:
        return self._futures.popleft()

    async def wait(self, seconds: float) -> bool:
        done, _ = await asyncio.wait([self._futures[0]], timeout=seconds)
        return bool(done)

    def recover(self, error: Exception) -> None:
        if self.asynchronous:
            try:
                torch.cuda.synchronize()
            except Exception as lost:
                raise RuntimeError(f"the GPU is lost ({lost}); restart vserve") from error

    def close(self) -> None:
        self._work.put(None)
        self.thread.join(timeout=5)

    def _counted(self, result: StepResult) -> StepResult:
        runner = self.runner
        if not runner.num_graph_misses and not runner.num_late_compilations:
            return result
        return msgspec.structs.replace(
            result, num_graph_misses=runner.num_graph_misses, num_late_compilations=runner.num_late_compilations
        )

    def _run(self) -> None:
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)  # OpenMP keeps this number per thread
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                result: StepResult | BaseException = self._counted(work())
            except BaseException as error:
                result = error
            try:
                future.get_loop().call_soon_threadsafe(_deliver, future, result)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more


def _deliver(future: asyncio.Future[StepResult], result: StepResult | BaseException) -> None:
    if future.cancelled():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
