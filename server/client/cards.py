"""Which cards the process of each engine sees."""

from __future__ import annotations

import os

from ...engine.errors import ConfigError
from ...engine.options.config import EngineConfig


def engine_environments(config: EngineConfig) -> list[dict[str, str]]:
    """Of each engine's process: which cards it sees, one for each of its ranks. Raises ConfigError where
    CUDA_VISIBLE_DEVICES names too few."""
    size, visible = config.data_parallel_size, os.environ.get("CUDA_VISIBLE_DEVICES")
    if config.device == "cpu" or (size == 1 and visible is None) or config.distributed_executor_backend == "ray":
        return [{} for _ in range(size)]  # Ray deals out its own
    each, needed = config.ranks_per_node, config.num_ranks
    cards = [str(index) for index in range(needed)] if visible is None else [c for c in visible.split(",") if c.strip()]
    if visible is not None and cards and len(cards) < needed:
        ranks = f" of {each} ranks ({config.divided_by})" if each > 1 else ""
        raise ConfigError(
            f"--data-parallel-size {size}: CUDA_VISIBLE_DEVICES={visible} names {len(cards)} cards, and each engine"
            f"{ranks} needs {'one' if each == 1 else each}: name more, or lower it"
        )
    seen = [",".join(cards[first : first + each]) for first in range(0, needed, each)]
    return [{"CUDA_VISIBLE_DEVICES": names} for names in seen] if cards else [{} for _ in range(size)]
