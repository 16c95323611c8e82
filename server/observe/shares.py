"""What each of several API processes has counted, and the sums of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client.core import Metric
from prometheus_client.metrics_core import METRIC_TYPES
from prometheus_client.registry import Collector

ADAPTERS = "lora_requests_info"  # of the metric whose labels are lists of names, and whose value is the time


class Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    name: str
    help: str
    type: str
    samples: list[Sample]


Page = list[Family]


class Shares(Collector):
    """`own`: of this process; `others`: pages of the other processes, and of those that are gone."""

    def __init__(self) -> None:
        self.own: list[Callable[[], Iterable[Metric]]] = []
        self.others: list[Page] = []

    def page(self) -> Page:
        """Of this process."""
        return [
            Family(metric.name, metric.documentation, metric.type,
                   [Sample(sample.name, sample.labels, sample.value) for sample in metric.samples])
            for collect in self.own for metric in collect()
        ]  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        for family in summed([self.page(), *self.others]):
            assert family.type in METRIC_TYPES
            metric = Metric(family.name, family.help, family.type)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


def lasting(page: Page) -> Page:
    """Without gauges: of a process that says nothing, what it counted holds, and what it was like does not."""
    return [family for family in page if family.type != "gauge"]


def summed(pages: Iterable[Page]) -> Page:
    """Sample by sample, in the order of the first page that has it."""
    families: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for page in pages:
        for family in page:
            families.setdefault(family.name, family)
            values = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                values[key] = values.get(key, 0.0) + sample.value
    found = [
        Family(family.name, family.help, family.type,
               [Sample(name, dict(labels), value) for (name, labels), value in sums[family.name].items()])
        for family in families.values()
    ]  # fmt: skip
    return [_united(family) if family.name.endswith(ADAPTERS) else family for family in found]


def _united(family: Family) -> Family:
    """The names that any process has; the moment is this one's, whose sample is the first."""
    if not family.samples:
        return family
    first = family.samples[0]
    labels = {
        label: value
        if label == "max_lora"
        else ",".join(sorted({name for sample in family.samples for name in sample.labels[label].split(",") if name}))
        for label, value in first.labels.items()
    }
    return Family(family.name, family.help, family.type, [Sample(first.name, labels, time.time())])
