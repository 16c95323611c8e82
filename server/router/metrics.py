"""The router's own page /metrics: what went where, and how it ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..histogram import Histogram
from .backend import Backend

PREFIX = "vserve_router_"
FIRST_BYTE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)


class RouterMetrics(Collector):
    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self.answers: Counter[tuple[str, str]] = Counter()  # (server, status class)
        self.retries: Counter[tuple[str, str]] = Counter()  # (server that was given up, reason)
        self.broken: Counter[str] = Counter()  # server → answers that it began and did not end
        self.first_byte = Histogram(FIRST_BYTE)

    def collect(self) -> Iterator[Metric]:
        for name, help, value in (
            ("server_healthy", "1 while the server takes requests.", lambda backend: backend.takes),
            ("server_requests_open", "Requests that it is answering.", lambda backend: backend.num_open),
            ("server_waiting_tokens", "Tokens of prompts that it has not begun to answer, about.",
             lambda backend: backend.waiting_tokens),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(PREFIX + name, help, labels=["server"])
            for backend in self._backends:
                gauge.add_metric([backend.url], value(backend))
            yield gauge
        for name, help, label, counts in (
            ("answers", "Answers passed on, by status.", "status", self.answers),
            ("retries", "Requests that went on to another server, by reason.", "reason", self.retries),
        ):
            family = CounterMetricFamily(PREFIX + name, help, labels=["server", label])
            for labels, count in counts.items():
                family.add_metric(labels, count)
            yield family
        broken = CounterMetricFamily(PREFIX + "broken_answers", "Answers begun and not ended.", labels=["server"])
        for backend in self._backends:
            broken.add_metric([backend.url], self.broken[backend.url])
        yield broken
        histogram = HistogramMetricFamily(PREFIX + "time_to_first_byte_seconds", "Arrival to first byte.", labels=[])
        histogram.add_metric([], self.first_byte.buckets(), self.first_byte.sum)
        yield histogram
