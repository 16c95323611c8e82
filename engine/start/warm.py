"""Kernels compiled before anybody waits for them: a start up to its last graph, on made-up weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..link.messages import Progress
from ..options.config import EngineConfig
from .kernel_cache import CacheSize, use_kernel_cache
from .precompile import Precompile


@dataclass(frozen=True)
class Warmed:
    device: str
    folder: Path  # the cache
    before: CacheSize
    after: CacheSize
    phases: dict[str, float]  # seconds
    seconds: float  # in all


def warm(config: EngineConfig, report: Callable[[Progress], None]) -> Warmed:
    """Compiles what a server with these options will run on this card; of the model only its config.json is read.

    Kernels are compiled for the card that torch sees, so there has to be one: which tiles and which variants a step
    takes is asked of it. Raises ConfigError.
    """
    started = time.monotonic()
    if config.device == "cpu":
        raise ConfigError("--device cpu: nothing is compiled for the CPU, so there is nothing to warm")
    folder = use_kernel_cache()
    report(Progress("imports"))
    import torch

    from ..describe.model_source import resolve_model_path
    from .engine import Engine

    if not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no card here, and kernels are compiled on the kind of card that will run them: run `vserve "
            "warm` there, with the folder or volume of the deployment's cache (VSERVE_CACHE)"
        )
    path = resolve_model_path(config.model, config.revision, config.download_dir, "dummy", config.trust_remote_code)
    config = dataclasses.replace(config, model=str(path), load_format="dummy")
    before = CacheSize.of(folder)
    helpers = Precompile.start(config)
    try:
        engine = Engine(config, report, helpers.wait if helpers is not None else lambda: None)
    finally:
        if helpers is not None:
            helpers.kill()
    info = engine.info
    seconds = time.monotonic() - started
    return Warmed(info.device, folder, before, CacheSize.of(folder), info.startup_seconds, seconds)
