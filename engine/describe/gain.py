"""What more ranks, or more stages, would bring to the cache: for those whose requests do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..options.speculation import drafts_by_model
from .divide import MOST, kv_share, sizes

if TYPE_CHECKING:
    from ..options.config import EngineConfig
    from .model_config import ModelConfig


class Gain(NamedTuple):
    option: str  # the field of EngineConfig that brings it; "": none does
    size: int  # what to set that to
    times: float  # how many times as many tokens the cache then holds; 0.0: it holds none now
    left: int  # bytes of the cache, on each card


def more_cards(model: ModelConfig, config: EngineConfig, weights: int, cache: int) -> Gain:
    """More ranks; more stages where the model cannot be divided further. weights, cache: see more_ranks."""
    found = more_ranks(model, config.tensor_parallel_size, weights, cache, config.enable_expert_parallel)
    if found[0]:
        return Gain("tensor_parallel_size", *found)
    if not drafts_by_model(config.speculative_config):  # which it does beside a whole model only
        found = more_stages(model, config.pipeline_parallel_size, weights, cache)
    return Gain("pipeline_parallel_size" if found[0] else "", *found)


def more_ranks(model: ModelConfig, now: int, weights: int, cache: int, expert_parallel: bool) -> tuple[int, float, int]:
    """The next number of ranks that can share the model, how many times as many tokens the cache would then hold (0.0
    where it holds none now), and its bytes on each; (0, 0.0, 0) where there is no such number. weights, cache: bytes of
    a rank now, the latter may be below 0.
    """
    size = next((size for size in sizes(model, expert_parallel) if size > now), 0)
    if not size or (left := cache + weights - weights * now // size) <= 0:
        return 0, 0.0, 0
    times = left / cache * _token_elements(model, now) / _token_elements(model, size) if cache > 0 else 0.0
    return size, round(times, 1), left


def more_stages(model: ModelConfig, now: int, weights: int, cache: int) -> tuple[int, float, int]:
    """As more_ranks, of stages: the fewest that bring room. Each has its own layers, and the cache of these alone."""
    if model.foreign is not None or not model.causal:
        return 0, 0.0, 0
    for count in range(now + 1, min(len(model.layers), MOST) + 1):
        if (left := cache + weights - weights * now // count) > 0:
            return count, round(left / cache * count / now, 1) if cache > 0 else 0.0, left
    return 0, 0.0, 0


def _token_elements(model: ModelConfig, size: int) -> int:
    """Of keys and values on one of so many ranks."""
    return sum(kv_share(model, index, size).token_elements for index in range(len(model.layers)))
