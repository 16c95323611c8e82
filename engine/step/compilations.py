"""Kernels that are compiled after the engine is ready: each holds up all requests."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import triton

logger = logging.getLogger(__name__)


@dataclass
class _Times:
    num: int = 0
    seconds: float = 0.0
    begun: float | None = None  # time.monotonic() of the one that is being compiled


class LateCompilations:
    def __init__(self) -> None:
        """Of an engine that starts now: what an earlier one of this process has Triton count, is over."""
        self._times = _Times()
        triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_post_compile_hook = None

    def __len__(self) -> int:
        return self._times.num

    @property
    def seconds(self) -> float:
        """That they have taken so far."""
        begun = self._times.begun
        return self._times.seconds + (0.0 if begun is None else time.monotonic() - begun)

    def count(self) -> None:
        """From here on every kernel should be ready."""
        times = self._times  # not self: Triton keeps the hooks longer than their runner is wanted

        def begin(**_: object) -> None:
            times.begun = time.monotonic()

        def compiled(*, fn: Any, **_: object) -> None:
            spent = 0.0 if times.begun is None else time.monotonic() - times.begun
            times.num += 1
            times.seconds += spent
            times.begun = None
            logger.warning("%s was not ready, and every request waited %.2f s for it: please report it", fn.name, spent)

        triton.knobs.runtime.jit_cache_hook = begin
        triton.knobs.runtime.jit_post_compile_hook = compiled
