"""uvicorn's server as all here run it: signals, logs and start-up are somebody else's."""

from __future__ import annotations

import contextlib
from typing import Any

import uvicorn
from starlette.types import ASGIApp


class Server(uvicorn.Server):
    def __init__(self, app: ASGIApp, *, last_bytes: float, **options: Any) -> None:
        """`last_bytes`: seconds that answers get to leave when it should exit; `options`: of uvicorn.Config."""
        super().__init__(
            uvicorn.Config(
                app, log_config=None, log_level="warning", access_log=False, loop="none", lifespan="off", ws="none",
                timeout_graceful_shutdown=int(last_bytes), **options,
            )
        )  # fmt: skip

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """uvicorn's handlers end the process by the signal instead of exit code 0."""
        return contextlib.nullcontext()
