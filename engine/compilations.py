"""Kernels that are compiled after the engine is ready: each holds up all requests."""

from __future__ import annotations

import triton


class LateCompilations:
    def __init__(self) -> None:
        self._found: list[int] = []

    def __len__(self) -> int:
        return len(self._found)

    def count(self) -> None:
        """From here on every kernel should be ready."""
        found = self._found  # not self: Triton keeps the hook longer than its runner is wanted

        def compiled(**_: object) -> None:
            found.append(1)

        triton.knobs.runtime.jit_post_compile_hook = compiled
