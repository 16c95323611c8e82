"""The page /metrics: one registry, one process. Names and labels are vLLM's, so its dashboards work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from ...engine.link.logs import num_lost_lines
from ...engine.link.messages import EngineInfo
from ..client.client import Client
from .metrics import EngineCounts, Metrics
from .shares import ADAPTERS, Shares


class MetricsPage:
    def __init__(self, metrics: Metrics, client: Client, model_name: str, prefix: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self.shares = Shares()
        collector = EngineCollector(metrics, client, model_name, prefix)
        self.shares.own.append(collector.requests)
        self._models = Models([collector])
        self.registry.register(self._models)
        self.registry.register(self.shares)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def add(self, metrics: Metrics, client: Client, model_name: str) -> None:
        """Another model behind the same address."""
        collector = EngineCollector(metrics, client, model_name, self._prefix)
        self._models.collectors.append(collector)
        self.shares.own.append(collector.requests)

    def render(self, accept: str) -> tuple[bytes, str]:
        """(the page, its content type) in the format that the scraper accepts."""
        if "application/openmetrics-text" not in accept:
            return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4
        # Where a scraper knows no UTF-8 names, as Prometheus 2, the library's own choice would replace the colon, too,
        # and no dashboard would find anything. Our names are fit for everybody as they are.
        return openmetrics.generate_latest(self.registry, openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST


class Models(Collector):
    """Of several models, each name once: their series differ by the label model_name."""

    def __init__(self, collectors: list[EngineCollector]) -> None:
        self.collectors = collectors

    def collect(self) -> Iterator[Metric]:
        if len(self.collectors) == 1:
            yield from self.collectors[0].collect()
            return
        families: dict[str, Metric] = {}
        for collector in self.collectors:
            for family in collector.collect():
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples += family.samples
        yield from families.values()


class EngineCollector(Collector):
    """Reads the counts at a scrape: between two scrapes, prometheus_client costs nothing.

    What an engine says of itself has a series for each. What is counted of requests has one, whose engine is "all"
    where there are several at the start: a sum over the label is right for both.
    """

    def __init__(self, metrics: Metrics, client: Client, model_name: str, prefix: str) -> None:
        self._metrics = metrics
        self._client = client
        self._prefix = prefix
        self._model_name = model_name
        self._labels = {"model_name": model_name, "engine": "0" if len(metrics.engines) == 1 else "all"}

    def collect(self) -> Iterator[Metric]:
        """What engines say of themselves."""
        yield from self._state()
        if any(hasattr(counts.engine, "info") for counts in self._metrics.engines):  # later ones may be loading now
            yield from self._settings()
        yield from self._engine_counters()

    def requests(self) -> Iterator[Metric]:
        """What this process counts: of several, the page has the sums."""
        prompt, generated = self._metrics.throughput.rates()
        yield self._gauge("prompt_tokens_per_second", "Prompt tokens computed, over the last seconds.", prompt)
        yield self._gauge("generation_tokens_per_second", "Tokens generated, over the last seconds.", generated)
        yield from self._request_counters()
        yield from self._histograms()
        if self._metrics.adapters is not None:
            yield self._adapters(*self._metrics.adapters())

    def _state(self) -> Iterator[Metric]:
        each = self._each_engine
        yield each("engine_healthy", "1 while the engine can serve.", is_healthy)
        yield each("num_requests_running", "Requests in the running batch.", lambda e: e.state().num_running)
        yield each("num_requests_waiting", "Requests waiting to be scheduled.", lambda e: e.state().num_waiting)
        yield each(
            "num_requests_waiting_by_reason", "Requests waiting, by what for.",
            lambda e: {"capacity": e.state().num_waiting, "deferred": 0}, "reason",  # nothing is waited for but room
        )  # fmt: skip
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the latter is what older gateways look for
            yield each(name, "Used share of the KV cache, 0 to 1.", cache_usage)

    def _adapters(self, running: list[str], waiting: list[str]) -> Metric:
        """As vLLM has it: the names are labels, and the value is the time."""
        labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        family = GaugeMetricFamily(self._prefix + ADAPTERS, "Adapters of requests, and when.", labels=labels)
        family.add_metric([str(self._client.config.adapter_slots), ",".join(waiting), ",".join(running)], time.time())
        return family

    def _settings(self) -> Iterator[Metric]:
        each = self._each_engine
        loaded = [counts for counts in self._metrics.engines if hasattr(counts.engine, "info")]
        yield each("kv_blocks", "Blocks of the KV cache.", lambda e: e.engine.info.num_blocks, among=loaded)
        yield each(
            "kv_blocks_free", "Free blocks, those that still hold a cached prefix included.",
            lambda e: e.state().num_free_blocks if e.state().num_blocks else e.engine.info.num_blocks,  # no step yet
            among=loaded,
        )  # fmt: skip
        yield each(
            "startup_phase_seconds",
            "Time that start-up took.",
            lambda e: e.engine.info.startup_seconds,
            "phase",
            loaded,
        )
        yield each("memory_bytes", "Memory that the engine planned.", lambda e: e.engine.info.memory, "purpose", loaded)
        names = list(cache_settings(loaded[0].engine.info))
        family = GaugeMetricFamily(
            self._prefix + "cache_config_info", "Settings of the cache.", labels=[*names, "engine"]
        )
        for counts in loaded:
            family.add_metric([*cache_settings(counts.engine.info).values(), counts.name], 1)
        yield family

    def _engine_counters(self) -> Iterator[Metric]:
        for name, help, total in (
            ("num_preemptions", "Preemptions of requests.", "num_preemptions"),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_queries"),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_hits"),
            ("corrupted_requests", "Requests ended by NaN logits.", "num_corrupted_requests"),
            ("engine_steps", "Steps of the engine.", "num_steps"),
            ("step_device_seconds", "Time that steps spent on the device.", "device_seconds"),
            ("step_host_seconds", "Time that steps spent on the host.", "host_seconds"),
            ("cudagraph_misses", "Decode steps that no CUDA graph was captured for.", "num_graph_misses"),
            ("late_kernel_compilations", "Kernels compiled after the engine was ready.", "num_late_compilations"),
            ("engine_invariant_violations", "Times that an idle engine's books were off.", "num_invariant_violations"),
        ):
            yield self._each_engine(name, help, partial(total_of, total), kind=CounterMetricFamily)
        yield from self._drafts()
        yield from self._experts()
        yield from self._recurrent_states()
        yield from self._encoder_cache()
        for name, help, attribute in (
            ("engine_restarts", "Engines that replaced one that died.", "num_restarts"),
            ("engine_stalls", "Times that no step ran though work waited.", "num_stalls"),
        ):
            yield self._each_engine(name, help, partial(count_of, attribute), kind=CounterMetricFamily)

    def _drafts(self) -> Iterator[Metric]:
        """By vLLM's names, which `vllm bench serve` reads. Without speculation nothing is there."""
        drafting = [
            counts
            for counts in self._metrics.engines
            if hasattr(counts.engine, "info") and counts.engine.info.settings.get("speculative_config")
        ]
        if not drafting:
            return
        for name, help, value, label in (
            ("num_drafts", "Times that drafts of a request were verified.", partial(total_of, "num_drafts"), ""),
            ("num_draft_tokens", "Tokens drafted and verified.", partial(total_of, "num_draft_tokens"), ""),
            ("num_accepted_tokens", "Of them, those that held.", accepted_tokens, ""),
            ("num_accepted_tokens_per_pos", "The same, by position.", EngineCounts.accepted_by_position, "position"),
        ):
            yield self._each_engine(f"spec_decode_{name}", help, value, label, among=drafting, kind=CounterMetricFamily)

    def _experts(self) -> Iterator[Metric]:
        """Of mixtures, once they have computed something. A series an expert, its layers together: some hundreds, where
        one for each layer would be thousands, of which only the balance is of interest, and that is a gauge."""
        mixtures = [counts for counts in self._metrics.engines if counts.tokens_by_expert()]
        if not mixtures:
            return
        yield self._each_engine(
            "expert_tokens", "Tokens that an expert got, all layers but the last together.",
            EngineCounts.tokens_by_expert, "expert", mixtures, CounterMetricFamily,
        )  # fmt: skip
        yield self._each_engine(
            "expert_imbalance", "Tokens of a layer's busiest expert over those of its average one, lately; 1 is even.",
            lambda counts: counts.state().expert_imbalance, among=mixtures,
        )  # fmt: skip
        if divided := [counts for counts in mixtures if counts.tokens_by_rank()]:
            yield self._each_engine(
                "rank_expert_tokens", "Tokens that the whole experts of a rank got, of which the fullest keeps the "
                "others waiting.", EngineCounts.tokens_by_rank, "rank", divided, CounterMetricFamily,
            )  # fmt: skip

    def _recurrent_states(self) -> Iterator[Metric]:
        """Of models that have any, once they have computed something."""
        recurrent = [counts for counts in self._metrics.engines if counts.state().num_state_slots]
        if not recurrent:
            return
        for name, help, value in (
            ("state_slots", "Slots of recurrent state.", lambda e: e.state().num_state_slots),
            ("state_slots_used", "Of them, those of running requests.", lambda e: e.state().num_state_slots_used),
            ("state_snapshots", "Of them, those that hold a cached prefix.", lambda e: e.state().num_state_snapshots),
        ):
            yield self._each_engine(name, help, value, among=recurrent)
        for name, help, total in (
            ("state_restores", "Requests that began with a snapshot.", "num_state_restores"),
            ("state_restored_tokens", "Tokens that they therefore did not compute.", "num_restored_tokens"),
            ("state_exports", "Snapshots written.", "num_state_exports"),
            ("state_exports_skipped", "Snapshots that no slot was free for.", "num_skipped_state_exports"),
        ):
            yield self._each_engine(name, help, partial(total_of, total), among=recurrent, kind=CounterMetricFamily)

    def _encoder_cache(self) -> Iterator[Metric]:
        """Of models that see pictures, once they have computed something."""
        seeing = [counts for counts in self._metrics.engines if counts.state().num_encoder_tokens]
        if not seeing:
            return
        for name, help, value in (
            ("encoder_cache_tokens", "Tokens of pictures that have room.", lambda e: e.state().num_encoder_tokens),
            ("encoder_cache_tokens_used", "Of them, those in use.", lambda e: e.state().num_encoder_tokens_used),
        ):
            yield self._each_engine(name, help, value, among=seeing)
        for name, help, total in (
            ("encoder_cache_queries", "Pictures that prompts came to.", "encoder_queries"),
            ("encoder_cache_hits", "Of them, those that had been looked at.", "encoder_hits"),
            ("encoded_patches", "Patches of pictures that were looked at.", "num_encoded_patches"),
        ):
            yield self._each_engine(name, help, partial(total_of, total), among=seeing, kind=CounterMetricFamily)

    def _request_counters(self) -> Iterator[Metric]:
        counter, metrics = self._counter, self._metrics
        cached = metrics.prompt_tokens_cached
        sources = {"local_compute": metrics.prompt_tokens - cached, "local_cache_hit": cached}
        yield counter("prompt_tokens", "Prompt tokens of requests that have begun to answer.", metrics.prompt_tokens)
        yield counter("prompt_tokens_cached", "Prompt tokens that came from the prefix cache.", cached)
        yield counter("prompt_tokens_by_source", "Prompt tokens, by where they came from.", sources.items(), "source")
        yield counter("generation_tokens", "Tokens generated and delivered.", metrics.generation_tokens)
        yield counter("request_success", "Ended requests.", metrics.finished_requests.items(), "finished_reason")
        for name, help, counts in (
            ("requests_rejected", "Requests turned away before they were queued.", metrics.rejected_requests),
            ("requests_aborted", "Requests given up before they were finished.", metrics.aborted_requests),
            ("requests_timed_out", "Requests that took too long, by which limit.", metrics.timed_out_requests),
        ):
            yield counter(name, help, counts.items(), "reason")
        yield counter(
            "requests_with_unknown_fields", "Requests with fields that change nothing.",
            metrics.unknown_fields.num_requests,
        )  # fmt: skip
        if metrics.adapter_requests:
            requests, tokens = metrics.adapter_requests.items(), metrics.adapter_tokens.items()
            yield counter("adapter_requests", "Ended requests of each adapter.", requests, "adapter")
            yield counter("adapter_generation_tokens", "Tokens generated for them.", tokens, "adapter")
        grammars = metrics.grammars
        yield counter("grammar_cache_hits", "Structured outputs whose grammar was compiled before.", grammars.num_hits)
        yield counter("grammar_cache_misses", "Structured outputs whose grammar was not.", grammars.num_misses)
        yield counter("grammar_compile_failures", "Grammars that were refused.", grammars.num_failures)
        if (pictures := metrics.pictures) is not None:
            cache = pictures.cache
            yield counter("mm_cache_queries", "Pictures that were looked for among decoded ones.", cache.num_queries)
            yield counter("mm_cache_hits", "Pictures that were found there.", cache.num_hits)
            yield counter("picture_failures", "Pictures that could not be decoded.", pictures.num_failures)
            restarts = pictures.processes.num_restarts
            yield counter("picture_process_restarts", "Decoding processes that replaced one that died.", restarts)
        yield counter("log_lines_lost", "Log lines that could not be written.", num_lost_lines())

    def _histograms(self) -> Iterator[Metric]:
        m = self._metrics
        of_pictures = (
            ()
            if m.pictures is None
            else (
                ("picture_queue_seconds", "Waiting for a process that decodes pictures.", m.picture_queue),
                ("picture_decode_seconds", "Decoding a picture, the waiting included.", m.pictures.decode_seconds),
            )
        )
        for name, help, histogram in (
            *of_pictures,
            ("time_to_first_token_seconds", "Arrival to first token.", m.time_to_first_token),
            ("inter_token_latency_seconds", "Time between tokens.", m.inter_token_latency),
            ("request_time_per_output_token_seconds", "Mean time a token, of a request.", m.time_per_output_token),
            ("e2e_request_latency_seconds", "Arrival to last token.", m.e2e_latency),
            ("request_queue_time_seconds", "Submission to first scheduling.", m.queue_time),
            ("request_inference_time_seconds", "First scheduling to last token.", m.inference_time),
            ("request_prefill_time_seconds", "First scheduling to first token.", m.prefill_time),
            ("request_decode_time_seconds", "First to last token.", m.decode_time),
            ("request_prompt_tokens", "Tokens of a prompt.", m.request_prompt_tokens),
            ("request_prefill_kv_computed_tokens", "Prompt tokens that no cache held.",
             m.request_prefill_kv_computed_tokens),
            ("request_generation_tokens", "Tokens of an answer.", m.request_generation_tokens),
            ("request_max_num_generation_tokens", "Tokens of the longest of n answers.",
             m.request_max_num_generation_tokens),
            ("request_params_max_tokens", "max_tokens of requests.", m.request_params_max_tokens),
            ("request_params_n", "n of requests.", m.request_params_n),
            ("request_num_preemptions", "Preemptions of a request.", m.request_num_preemptions),
            ("tokenizer_queue_seconds", "Waiting for a thread that tokenises.", m.tokenizer_queue),
            ("grammar_compile_seconds", "Compiling a grammar.", m.grammars.compile_seconds),
            ("iteration_tokens_total", "Tokens of a step: computed of prompts, and generated.", m.iteration_tokens),
        ):  # fmt: skip
            family = HistogramMetricFamily(self._prefix + name, help, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
            yield family

    # ---- families ----

    def _each_engine(
        self,
        name: str,
        help: str,
        value: Callable[[EngineCounts], float | Mapping[str, float]],
        label: str = "",
        among: Sequence[EngineCounts] | None = None,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily,
    ) -> Metric:
        """A family with a sample for each engine, or with one for each engine and value of `label`."""
        family = kind(self._prefix + name, help, labels=["model_name", "engine", *([label] if label else [])])
        for counts in self._metrics.engines if among is None else among:
            own, found = [self._model_name, counts.name], value(counts)
            if isinstance(found, Mapping):
                for label_value, number in found.items():
                    family.add_metric([*own, label_value], number)
            else:
                family.add_metric(own, found)
        return family

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


def is_healthy(counts: EngineCounts) -> bool:
    engine = counts.engine
    return engine.ready and engine.dead is None and engine.stalled is None


def total_of(name: str, counts: EngineCounts) -> float:
    return counts.totals()[name]


def accepted_tokens(counts: EngineCounts) -> float:
    return sum(counts.accepted_by_position().values())


def count_of(attribute: str, counts: EngineCounts) -> float:
    return getattr(counts.engine, attribute)


def cache_usage(counts: EngineCounts) -> float:
    stats = counts.state()
    return (stats.num_blocks - stats.num_free_blocks) / max(1, stats.num_blocks)


def cache_settings(info: EngineInfo) -> dict[str, str]:
    """The labels of vLLM's cache_config_info."""
    return {
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "enable_prefix_caching": str(info.enable_prefix_caching),
        "cache_dtype": info.dtype,
        "kv_cache_memory_bytes": str(info.memory.get("kv_cache", 0)),
        "kv_cache_size_tokens": str(info.num_kv_tokens),
        "kv_cache_max_concurrency": f"{info.num_kv_tokens / info.max_model_len:.2f}",
    }
