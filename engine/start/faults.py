"""Faults on purpose, so that tests can watch what becomes of them: VSERVE_FAULT=step:123:oom.

A fault is place:when:kind, or place:when:kind:rank for another rank than 0; several are separated by commas. They are
refused unless VSERVE_ALLOW_FAULTS=1 is set too.
No code asks whether faults are on: the function that is to fail is wrapped once, when the engine has started.

    phase:NAME       start-up has come to this phase (imports, weights, memory, warm-up, graphs, …)
    step:N           the N-th forward pass since then
    sample:N         the sampling of the N-th step
    schedule:N       the N-th plan that the scheduler is asked for
    add:N            the N-th request that the scheduler is given
    grammar:N        the N-th mask that a grammar is asked for
    detokenize:N     the N-th token that the API process turns into text
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..step.encoder_runner import EncoderRunner
    from ..step.runner import ModelRunner
    from .loop import EngineLoop

PLACES = ("phase", "step", "sample", "schedule", "add", "grammar", "detokenize")
KINDS = ("error", "oom", "lost", "nan", "hang", "block", "exit", "kill", "segv")
rank = 0  # of this process


@dataclass(frozen=True)
class Fault:
    place: str
    when: str  # the phase's name, or the number of the call, from 1
    kind: str
    rank: int = 0


def planned() -> list[Fault]:
    """What the environment asks for of this rank. Raises ConfigError when it must not, or asks for nonsense."""
    text = os.environ.get("VSERVE_FAULT", "")
    if not text:
        return []
    if os.environ.get("VSERVE_ALLOW_FAULTS") != "1":
        raise ConfigError("VSERVE_FAULT makes the server fail on purpose: unset it, or set VSERVE_ALLOW_FAULTS=1 too")
    faults = []
    for item in text.split(","):
        place, when, kind, at = [*item.split(":"), "", "", "0"][:4]
        known = place in PLACES and kind in KINDS and (at or "0").isdigit()
        if not known or not (when if place == "phase" else when.isdigit()):
            raise ConfigError(
                f"VSERVE_FAULT has {item!r}: write place:when:kind or place:when:kind:rank, "
                f"places {', '.join(PLACES)}, kinds {', '.join(KINDS)}"
            )
        faults.append(Fault(place, when, kind, int(at or "0")))
    return [fault for fault in faults if fault.rank == rank]


def hit_phase(name: str) -> None:
    for fault in planned():
        if fault.place == "phase" and fault.when == name:
            _strike(fault)


def arm_engine(engine: EngineLoop, runner: ModelRunner | EncoderRunner) -> None:
    from ..grammar.grammar import GrammarMatcher

    arm_runner(runner, engine)
    for owner, name, place in (
        (engine.scheduler, "schedule", "schedule"),
        (engine.scheduler, "add", "add"),
        (GrammarMatcher, "fill", "grammar"),
    ):
        arm(owner, name, place, engine)


def arm_runner(runner: ModelRunner | EncoderRunner, engine: EngineLoop | None = None) -> None:
    """`engine`: of rank 0. The others follow what it samples."""
    arm(runner, "execute", "step", engine)
    arm(runner, "sample" if engine is not None else "follow", "sample", engine)


def arm(owner: Any, name: str, place: str, engine: EngineLoop | None = None) -> None:
    """The calls of `owner.name` that have a fault planned fail; without one, nothing is touched."""
    faults = {int(fault.when): fault for fault in planned() if fault.place == place}
    if not faults:
        return
    function: Callable[..., Any] = getattr(owner, name)
    calls = 0

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        fault = faults.get(calls)
        if fault is not None and fault.kind == "nan":
            result = function(*args, **kwargs)
            _poison(owner)
            return result
        if fault is not None:
            _strike(fault, engine)
        return function(*args, **kwargs)

    setattr(owner, name, wrapper)


def _strike(fault: Fault, engine: EngineLoop | None = None) -> NoReturn:
    import torch

    if fault.kind == "oom":
        raise torch.OutOfMemoryError(f"out of memory (injected at {fault.place} {fault.when})")
    if fault.kind == "lost":
        _lose_device(engine)
    if fault.kind == "hang":
        while True:
            time.sleep(3600)
    if fault.kind == "block":  # with the GIL, once the other threads have said what they had to say
        time.sleep(0.5)
        while True:
            ctypes.PyDLL(None).pause()
    if fault.kind == "exit":
        os._exit(3)
    if fault.kind in ("kill", "segv"):
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSEGV)
    raise RuntimeError(f"injected at {fault.place} {fault.when}")


def _lose_device(engine: EngineLoop | None) -> None:
    """As after an illegal access: everything that touches the device fails from here on."""
    import torch

    def synchronize(*_: object) -> NoReturn:
        raise RuntimeError("CUDA error: an illegal memory access was encountered (injected)")

    setattr(torch.cuda, "synchronize", synchronize)  # noqa: B010
    if engine is not None:
        engine.executor.asynchronous = True  # type: ignore[attr-defined]


def _poison(runner: ModelRunner) -> None:
    """The step's first sample sees NaN instead of what the model computed."""
    import torch

    assert runner._launched is not None
    with torch.inference_mode():
        runner._launched.hidden[:1] = float("nan")
