"""A histogram of plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# seconds that compiling a grammar takes
COMPILE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Counts by bucket, for one thread: an observation costs a bisection, no lock and no label look-up."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        total, cumulative = 0, []
        for bound, count in zip((*map(float, self.bounds), float("inf")), self.counts, strict=True):
            total += count
            cumulative.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return cumulative
