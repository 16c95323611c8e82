"""What `LLM.get_metrics` returns: counters of /metrics, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.samples import Sample

from ..observe.exposition import EngineCollector


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # with its prefix, as vllm:num_requests_running
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int] = field(default_factory=dict)  # observations up to each bound


def read(collector: EngineCollector) -> Iterator[Metric]:
    for family in (*collector.collect(), *collector.requests()):
        if family.type == "histogram":
            yield from _histograms(family.name, family.samples)
            continue
        for name, labels, value, *_ in family.samples:
            name = name.removesuffix("_total") if family.type == "counter" else name
            yield Counter(name, labels, int(value)) if family.type == "counter" else Gauge(name, labels, value)


def _histograms(name: str, samples: Sequence[Sample]) -> Iterator[Histogram]:
    buckets: dict[str, int] = {}
    count = 0
    for sample_name, labels, value, *_ in samples:
        if sample_name.endswith("_bucket"):
            buckets[labels["le"]] = int(value)
        elif sample_name.endswith("_count"):
            count = int(value)
        elif sample_name.endswith("_sum"):
            yield Histogram(name, labels, count, value, buckets)
            buckets = {}
