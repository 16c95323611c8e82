"""When requests arrive."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds after the start at which each of `count` requests is sent, ascending, the first at 0.

    `rate`: requests per second; inf = all at once. Gaps are gamma distributed with shape `burstiness` and mean
    1 / rate: 1 is a Poisson process, less comes in bursts, more is evener. The last request comes at (count − 1) / rate
    exactly: runs at one rate then differ in the order of the gaps, not in the load, as in vLLM's benchmark.
    """
    if math.isinf(rate) or count < 2:
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), count - 1)
    total = gaps.sum()
    if total > 0:
        gaps *= (count - 1) / rate / total
    return [0.0, *np.cumsum(gaps).tolist()]


def split(total: int, parts: int) -> list[int]:
    """`total` as `parts` whole numbers that differ by one at most, the larger first."""
    share, rest = divmod(total, parts)
    return [share + (i < rest) for i in range(parts)]
