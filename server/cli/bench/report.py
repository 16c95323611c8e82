"""What the measured requests amount to, in vLLM's words."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .event_stream import StreamResult

TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


@dataclass(frozen=True)
class ServingMetrics:
    """Seconds and tokens. TTFT: from sending to the first message with choices; ITL: gaps between such messages;
    TPOT: (last − first message) / (output tokens − 1); end-to-end: from sending to the last such message."""

    duration: float
    completed: int
    errors: list[str]  # one a failed request
    input_tokens: int
    output_tokens: int
    num_events: int
    latencies: Mapping[str, Sequence[float]]  # by the names of TITLES
    num_good: int | None  # requests that meet every limit, where limits were given
    num_retries: int = 0  # of requests that a busy server had refused

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.duration

    @property
    def total_throughput(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.duration

    @property
    def goodput(self) -> float | None:
        return None if self.num_good is None else self.num_good / self.duration

    @property
    def events_per_token(self) -> float:
        return self.num_events / self.output_tokens if self.output_tokens else 0.0


def measure(
    results: Sequence[StreamResult],
    prompt_lengths: Sequence[int | None],
    start: float,
    limits: Mapping[str, float] | None = None,
) -> ServingMetrics:
    """`start`: time.monotonic() of the run; `limits`: seconds by metric; a prompt's length counts where the server did
    not say one."""
    good = [result for result in results if result.error is None]
    latencies = {
        "ttft": [result.ttft for result in good],
        "tpot": [tpot for result in good if (tpot := result.tpot) is not None],
        "itl": [gap for result in good for gap in result.itls],
        "e2el": [result.latency for result in good],
    }
    num_good = None
    if limits is not None:
        num_good = sum(all(_value(result, name) <= limit for name, limit in limits.items()) for result in good)
    return ServingMetrics(
        duration=max((result.end for result in results), default=start) - start,
        completed=len(good),
        errors=[result.error for result in results if result.error is not None],
        input_tokens=sum(
            (prompt_lengths[result.index] or 0) if result.prompt_tokens is None else result.prompt_tokens
            for result in good
        ),
        output_tokens=sum(result.output_tokens for result in good),
        num_events=sum(len(result.stamps) for result in good),
        latencies=latencies,
        num_good=num_good,
        num_retries=sum(result.num_retries for result in results),
    )


def _value(result: StreamResult, name: str) -> float:
    """A request of one token has no time per output token: it meets any limit."""
    values: dict[str, Callable[[], float | None]] = {
        "ttft": lambda: result.ttft, "tpot": lambda: result.tpot, "e2el": lambda: result.latency,
    }  # fmt: skip
    return values[name]() or 0.0


def print_report(
    metrics: ServingMetrics,
    shown: Sequence[str],
    percentiles: Sequence[float],
    *,
    rate: float | None = None,
    max_concurrency: int | None = None,
) -> None:
    """`shown`: names of TITLES in order; `percentiles`: 0 to 100; `rate`: requests per second, where it is limited."""

    def line(label: str, value: float | int) -> None:
        print(f"{label:<40} {value if isinstance(value, int) else f'{value:.2f}':<10}")

    print(f"{' Serving Benchmark Result ':=^50}")
    line("Successful requests:", metrics.completed)
    if metrics.errors:
        line("Failed requests:", len(metrics.errors))
    if metrics.num_retries:
        line("Retries (server too busy):", metrics.num_retries)
    if max_concurrency is not None:
        line("Maximum request concurrency:", max_concurrency)
    if rate is not None:
        line("Request rate configured (RPS):", float(rate))
    line("Benchmark duration (s):", metrics.duration)
    line("Total input tokens:", metrics.input_tokens)
    line("Total generated tokens:", metrics.output_tokens)
    line("Request throughput (req/s):", metrics.request_throughput)
    if metrics.goodput is not None:
        line("Request goodput (req/s):", metrics.goodput)
    line("Output token throughput (tok/s):", metrics.output_throughput)
    line("Total Token throughput (tok/s):", metrics.total_throughput)
    line("SSE events per token:", metrics.events_per_token)
    for name in shown:
        title, short = TITLES[name]
        values = metrics.latencies[name]
        print(f"{title:-^50}")
        for statistic, milliseconds in summary(values, percentiles).items():
            line(f"{statistic} {short} (ms):", milliseconds)
    print("=" * 50)
    for error, count in collections.Counter(metrics.errors).most_common():
        print(f"{count} failed: {error}")


def summary(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, Median, P99, … in milliseconds; percentiles are interpolated linearly. 0 where there is no value."""
    values = values or [0.0]
    table = {"Mean": statistics.fmean(values), "Median": statistics.median(values)}
    table |= {f"P{percentile:g}": float(np.percentile(values, percentile)) for percentile in percentiles}
    return {name: 1000 * value for name, value in table.items()}


def to_json(metrics: ServingMetrics, shown: Sequence[str], percentiles: Sequence[float]) -> dict[str, Any]:
    """vLLM's keys."""
    content: dict[str, Any] = {
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": len(metrics.errors),
        "retries": metrics.num_retries,
        "total_input_tokens": metrics.input_tokens,
        "total_output_tokens": metrics.output_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_throughput,
        "sse_events_per_token": metrics.events_per_token,
        "errors": dict(collections.Counter(metrics.errors)),
    }
    for name in shown:
        values = metrics.latencies[name]
        for statistic, milliseconds in summary(values, percentiles).items():
            content[f"{statistic.lower()}_{name}_ms"] = milliseconds
        content[f"std_{name}_ms"] = 1000 * float(np.std(values)) if values else 0.0
    return content
