"""Everything on /metrics, in one registry and one process. Names and labels are vLLM's, so its dashboards work.

The counts are plain numbers and lists, touched by the event loop alone: prometheus_client sees them at a scrape only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..engine.messages import EngineInfo, StepOutputs
from .histogram import Histogram

if TYPE_CHECKING:
    from .generation import Choice, Client, Generation

# vLLM's buckets, and finer ones below the first of them: a superset keeps histogram_quantile panels working.
TTFT = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
PHASE = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8,
    1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
LENGTH = tuple(m * 10**e for e in range(7) for m in (1, 2, 5) if m * 10**e <= 1_000_000)
FINISHED_REASONS = ("stop", "length", "abort", "error")


class Metrics(Collector):
    def __init__(self, client: Client, model_name: str, prefix: str = "vllm:", engine: str = "0") -> None:
        self._client = client
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": engine}
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.finished_requests = dict.fromkeys(FINISHED_REASONS, 0)
        self.time_to_first_token = Histogram(TTFT)
        self.inter_token_latency = Histogram(TOKEN)
        self.time_per_output_token = Histogram(TOKEN)
        self.e2e_latency = Histogram(PHASE)
        self.queue_time = Histogram(PHASE)
        self.inference_time = Histogram(PHASE)
        self.prefill_time = Histogram(PHASE)
        self.decode_time = Histogram(PHASE)
        self.request_prompt_tokens = Histogram(LENGTH)
        self.request_generation_tokens = Histogram(LENGTH)
        self.request_max_num_generation_tokens = Histogram(LENGTH)
        self.request_params_max_tokens = Histogram(LENGTH)
        self.request_params_n = Histogram(CHOICES)
        self.iteration_tokens = Histogram(ITERATION)
        client.stats_listeners.append(self._step)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """(the page, its content type) in the format that the scraper accepts."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    # ---- what happens ----

    def _step(self, message: StepOutputs) -> None:
        if message.stats.step_tokens:
            self.iteration_tokens.observe(message.stats.step_tokens)

    def first_output(self, generation: Generation, choice: Choice, now: float) -> None:
        self.time_to_first_token.observe(now - generation.arrival)
        if choice.index % generation.n == 0:  # a prompt counts once, as in the usage that the client reads
            self.prompt_tokens += len(choice.prompt.token_ids)
            self.prompt_tokens_cached += choice.num_cached_tokens

    def more_output(self, choice: Choice, now: float, num_tokens: int) -> None:
        assert choice.last_token is not None
        self.inter_token_latency.observe((now - choice.last_token) / num_tokens, num_tokens)

    def finished(self, generation: Generation, choice: Choice, last_of_prompt: bool) -> None:
        reason = choice.finish_reason
        assert reason is not None
        self.finished_requests[reason] += 1
        first, last = choice.first_token, choice.last_token
        if reason not in ("stop", "length") or first is None or last is None:
            return
        self.e2e_latency.observe(time.monotonic() - generation.arrival)
        if (scheduled := choice.first_scheduled) is not None:
            self.queue_time.observe(max(0.0, scheduled - choice.submitted))
            self.prefill_time.observe(first - scheduled)
            self.inference_time.observe(last - scheduled)
        self.decode_time.observe(last - first)
        if choice.num_tokens > 1:
            self.time_per_output_token.observe((last - first) / (choice.num_tokens - 1))
        self.request_generation_tokens.observe(choice.num_tokens)
        self.request_params_max_tokens.observe(choice.prompt.sampling.max_tokens)
        if last_of_prompt:
            prompt = choice.index // generation.n
            siblings = generation.choices[prompt * generation.n : (prompt + 1) * generation.n]
            self.request_prompt_tokens.observe(len(choice.prompt.token_ids))
            self.request_max_num_generation_tokens.observe(max(sibling.num_tokens for sibling in siblings))
            self.request_params_n.observe(generation.n)

    # ---- what a scrape sees ----

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats
        used = stats.num_blocks - stats.num_free_blocks
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.", used / max(1, stats.num_blocks))
        yield self._counter("num_preemptions", "Requests that were preempted.", stats.num_preemptions)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_hits)
        yield self._counter("engine_steps", "Steps of the engine.", stats.num_steps)
        yield self._counter(
            "cudagraph_misses", "Decode steps that no CUDA graph was captured for.", stats.num_graph_misses
        )
        yield self._counter(
            "late_kernel_compilations", "Kernels compiled after the engine was ready.", stats.num_late_compilations
        )
        yield self._counter("step_device_seconds", "Time that steps spent on the device.", stats.device_seconds)
        yield self._counter("step_host_seconds", "Time that steps spent on the host.", stats.host_seconds)
        yield self._counter("prompt_tokens", "Prompt tokens of requests that have begun to answer.", self.prompt_tokens)
        yield self._counter(
            "prompt_tokens_cached", "Prompt tokens that came from the prefix cache.", self.prompt_tokens_cached
        )
        yield self._counter("generation_tokens", "Tokens generated and delivered.", self.generation_tokens)
        yield self._counter("request_success", "Finished requests.", self.finished_requests.items(), "finished_reason")
        if self._client.ready:
            yield from self._settings(self._client.info)
        for name, help, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Time between tokens.", self.inter_token_latency),
            ("request_time_per_output_token_seconds", "Mean time a token, of a request.", self.time_per_output_token),
            ("e2e_request_latency_seconds", "Arrival to last token.", self.e2e_latency),
            ("request_queue_time_seconds", "Submission to first scheduling.", self.queue_time),
            ("request_inference_time_seconds", "First scheduling to last token.", self.inference_time),
            ("request_prefill_time_seconds", "First scheduling to first token.", self.prefill_time),
            ("request_decode_time_seconds", "First to last token.", self.decode_time),
            ("request_prompt_tokens", "Tokens of a prompt.", self.request_prompt_tokens),
            ("request_generation_tokens", "Tokens of an answer.", self.request_generation_tokens),
            (
                "request_max_num_generation_tokens",
                "Tokens of the longest of n answers.",
                self.request_max_num_generation_tokens,
            ),
            ("request_params_max_tokens", "max_tokens of requests.", self.request_params_max_tokens),
            ("request_params_n", "n of requests.", self.request_params_n),
            ("iteration_tokens_total", "Tokens computed in a step.", self.iteration_tokens),
        ):
            family = HistogramMetricFamily(self._prefix + name, help, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
            yield family

    def _settings(self, info: EngineInfo) -> Iterator[Metric]:
        stats = self._client.stats
        yield self._gauge("kv_blocks", "Blocks of the KV cache.", info.num_blocks)
        yield self._gauge(
            "kv_blocks_free",
            "Free blocks, those that still hold a cached prefix included.",
            stats.num_free_blocks if stats.num_blocks else info.num_blocks,  # no step has run yet
        )
        yield self._gauge("startup_phase_seconds", "Time that start-up took.", info.startup_seconds.items(), "phase")
        yield self._gauge("memory_bytes", "Memory that the engine planned.", info.memory.items(), "purpose")
        config = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "enable_prefix_caching": str(info.enable_prefix_caching),
            "cache_dtype": info.dtype,
        }
        name, labels = self._prefix + "cache_config_info", [*config, "engine"]
        family = GaugeMetricFamily(name, "Settings of the cache.", labels=labels)
        family.add_metric([*config.values(), self._labels["engine"]], 1)
        yield family

    def _gauge(self, name: str, help: str, value: float | Iterable[tuple[str, float]], label: str = "") -> Metric:
        return self._fill(GaugeMetricFamily, name, help, value, label)

    def _counter(self, name: str, help: str, value: float | Iterable[tuple[str, float]], label: str = "") -> Metric:
        return self._fill(CounterMetricFamily, name, help, value, label)

    def _fill(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        help: str,
        value: float | Iterable[tuple[str, float]],
        label: str,
    ) -> Metric:
        """A family with one sample, or with one for each value of `label`."""
        own = list(self._labels.values())
        if isinstance(value, int | float):
            family = kind(self._prefix + name, help, labels=list(self._labels))
            family.add_metric(own, value)
        else:
            family = kind(self._prefix + name, help, labels=[*self._labels, label])
            for label_value, number in value:
                family.add_metric([*own, label_value], number)
        return family
