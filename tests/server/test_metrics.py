"""/metrics: the names are frozen, the numbers are the clients'."""

from __future__ import annotations

import contextlib
import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vserve.engine.link.messages import EngineStats
from vserve.server.app import create_app
from vserve.server.histogram import Histogram
from vserve.server.observe.metrics import PHASE, TOKEN, TTFT, Metrics
from vserve.server.options.config import ServerConfig

# Dashboards and alerts are built on these: a name may be added here, never changed or removed.
OWN = ("model_name", "engine")
METRICS = {
    "vllm:num_requests_running": "gauge", "vllm:num_requests_waiting": "gauge", "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:kv_blocks": "gauge", "vllm:kv_blocks_free": "gauge", "vllm:engine_healthy": "gauge",
    "vllm:prompt_tokens_per_second": "gauge", "vllm:generation_tokens_per_second": "gauge",
    "vllm:num_preemptions": "counter", "vllm:prefix_cache_queries": "counter", "vllm:prefix_cache_hits": "counter",
    "vllm:corrupted_requests": "counter", "vllm:engine_steps": "counter", "vllm:engine_restarts": "counter",
    "vllm:engine_stalls": "counter", "vllm:cudagraph_misses": "counter", "vllm:late_kernel_compilations": "counter",
    "vllm:step_device_seconds": "counter", "vllm:step_host_seconds": "counter", "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter", "vllm:generation_tokens": "counter", "vllm:log_lines_lost": "counter",
    "vllm:grammar_cache_hits": "counter", "vllm:grammar_cache_misses": "counter",
    "vllm:grammar_compile_failures": "counter", "vllm:engine_invariant_violations": "counter",
    "vllm:requests_with_unknown_fields": "counter",
    **dict.fromkeys((f"vllm:{name}" for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_prefill_kv_computed_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
        "request_params_max_tokens", "request_params_n", "request_num_preemptions", "iteration_tokens_total",
        "grammar_compile_seconds", "tokenizer_queue_seconds",
    )), "histogram"),
}  # fmt: skip
LABELLED = {
    "vllm:num_requests_waiting_by_reason": ("gauge", (*OWN, "reason")),
    "vllm:startup_phase_seconds": ("gauge", (*OWN, "phase")),
    "vllm:memory_bytes": ("gauge", (*OWN, "purpose")),
    "vllm:cache_config_info": (
        "gauge", (
            "block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype", "kv_cache_memory_bytes",
            "kv_cache_size_tokens", "kv_cache_max_concurrency", "engine",
        ),
    ),
    "vllm:prompt_tokens_by_source": ("counter", (*OWN, "source")),
    "vllm:request_success": ("counter", (*OWN, "finished_reason")),
    "vllm:requests_rejected": ("counter", (*OWN, "reason")),
    "vllm:requests_aborted": ("counter", (*OWN, "reason")),
    "vllm:requests_timed_out": ("counter", (*OWN, "reason")),
    "http_requests": ("counter", ("handler", "method", "status")),
    "http_refused_connections": ("counter", ("reason",)),
    "http_request_duration_seconds": ("histogram", ("handler", "method")),
    "http_request_duration_highr_seconds": ("histogram", ()),
    "http_request_size_bytes": ("summary", ("handler",)),
    "http_response_size_bytes": ("summary", ("handler",)),
}  # fmt: skip

VLLM_BUCKETS = {
    "time_to_first_token_seconds": [.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40,
                                    80, 160, 640, 2560],
    "inter_token_latency_seconds": [.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80],
    "e2e_request_latency_seconds": [.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
                                    7680],
    "iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
    "request_params_n": [1, 2, 5, 10, 20],
    "request_prompt_tokens": [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000],
}  # fmt: skip


def scrape(client: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    page = client.get("/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def value(samples: dict[Any, float], name: str, **labels: str) -> float:
    """The sum over all samples of that name with these labels."""
    found = [v for (n, ls), v in samples.items() if n == name and set(labels.items()) <= ls]
    assert found, name
    return sum(found)


def test_names_types_and_labels(client: Any, engine: Any, app: Any) -> None:
    client.chat()
    app.state.server.refused("header_timeout")
    frozen = {name: (kind, OWN) for name, kind in METRICS.items()} | LABELLED
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        if not family.name.startswith(("process_", "python_")):
            assert family.documentation.endswith(".")
            found[family.name] = (family.type, {frozenset(sample.labels) - {"le"} for sample in family.samples})
    assert found == {name: (kind, {frozenset(labels)}) for name, (kind, labels) in frozen.items()}
    samples = scrape(client)
    assert all(dict(labels).get("engine", "0") == "0" for _, labels in samples)
    assert all(dict(labels).get("model_name", "test") == "test" for _, labels in samples)
    assert value(samples, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100", engine="0") == 1
    sizes = {"kv_cache_memory_bytes": "20", "kv_cache_size_tokens": "1600", "kv_cache_max_concurrency": "12.50"}
    assert value(samples, "vllm:cache_config_info", **sizes) == 1
    assert value(samples, "vllm:memory_bytes", purpose="weights") == 10
    assert value(samples, "vllm:startup_phase_seconds", phase="load") == 1.5


def test_buckets_are_a_superset(client: Any) -> None:
    client.chat()
    samples = scrape(client)
    for name, wanted in VLLM_BUCKETS.items():
        bounds = {dict(labels)["le"] for n, labels in samples if n == f"vllm:{name}_bucket"}
        assert {str(float(bound)) for bound in wanted} | {"+Inf"} <= bounds
    for bounds in (TTFT, TOKEN, PHASE):
        assert list(bounds) == sorted(set(bounds)) and sum(bound < 0.3 for bound in bounds) >= 7


def test_prefix(engine: Any, text_model: Any) -> None:
    from prometheus_client import generate_latest

    app = create_app(engine, ServerConfig(metrics_prefix="vserve_"), text_model)
    page = generate_latest(app.state.server.metrics_page.registry).decode()
    assert "vserve_num_requests_running{" in page and "vllm:" not in page


def test_counts_are_the_clients(client: Any, engine: Any, say: Any) -> None:
    """Prompt and generation tokens to the token, over everything that a client can ask for."""
    usages = [client.chat().json()["usage"], client.complete(prompt=["Hello", "Hi"], n=3).json()["usage"]]
    for n in (1, 3):
        raw = client.chat(stream=True, n=n, max_tokens=3, stream_options={"include_usage": True}).text
        import json

        usages.append(json.loads(raw.split("\n\n")[-3][6:])["usage"])
    engine.script = say("one two three four five six")
    for engine.delay in (0.0, -1.0):  # a stop string throws away what the engine generated after it
        usages.append(client.complete(stop="three", max_tokens=100).json()["usage"])
    client.complete(n=0)  # refused: counts nowhere
    samples = scrape(client)
    assert value(samples, "vllm:prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert value(samples, "vllm:generation_tokens_total") == sum(u["completion_tokens"] for u in usages)
    assert value(samples, "vllm:prompt_tokens_cached_total") == sum(
        u["prompt_tokens_details"]["cached_tokens"] for u in usages
    )
    num_choices, num_prompts = 1 + 6 + 1 + 3 + 2, 1 + 2 + 1 + 1 + 2
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 4
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == num_choices - 4
    assert value(samples, "vllm:request_success_total", finished_reason="abort") == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_generation_tokens", "request_params_max_tokens", "request_decode_time_seconds"):  # fmt: skip
        assert value(samples, f"vllm:{name}_count") == num_choices
    for name in ("request_prompt_tokens", "request_params_n", "request_max_num_generation_tokens"):
        assert value(samples, f"vllm:{name}_count") == num_prompts
    assert value(samples, "vllm:request_prompt_tokens_sum") == value(samples, "vllm:prompt_tokens_total")
    assert value(samples, "vllm:request_generation_tokens_sum") == value(samples, "vllm:generation_tokens_total")
    assert value(samples, "vllm:request_params_n_sum") == 1 + 3 + 3 + 1 + 3 + 1 + 1
    assert value(samples, "http_requests_total", handler="/v1/chat/completions", method="POST", status="2xx") == 3
    assert value(samples, "http_requests_total", handler="/v1/completions", status="4xx") == 1
    assert value(samples, "http_response_size_bytes_sum", handler="/v1/chat/completions") > 1000


def test_engine_state(client: Any, engine: Any) -> None:
    client.chat()
    samples = scrape(client)
    assert value(samples, "vllm:num_preemptions_total") == 3
    assert value(samples, "vllm:prefix_cache_queries_total") == 50
    assert value(samples, "vllm:prefix_cache_hits_total") == 20
    assert value(samples, "vllm:step_device_seconds_total") == 1.25
    assert value(samples, "vllm:iteration_tokens_total_count") == engine.num_outputs
    assert value(samples, "vllm:kv_blocks_free") == 100 and value(samples, "vllm:kv_cache_usage_perc") == 0


def test_drafts_by_the_names_that_vllm_bench_reads(client: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "spec_decode" not in client.get("/metrics").text
    monkeypatch.setitem(engine.info.settings, "speculative_config", '{"method": "ngram"}')
    engine.past_stats = EngineStats(num_drafts=3, num_draft_tokens=6, num_accepted_tokens=(2, 1))
    engine.stats = EngineStats(num_drafts=4, num_draft_tokens=28, num_accepted_tokens=(4, 3, 1))
    samples = scrape(client)
    assert value(samples, "vllm:spec_decode_num_drafts_total") == 7
    assert value(samples, "vllm:spec_decode_num_draft_tokens_total") == 34
    assert value(samples, "vllm:spec_decode_num_accepted_tokens_total") == 11
    by_position = [value(samples, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=p) for p in "012"]
    assert by_position == [6, 4, 1]


def test_experts_of_a_mixture(client: Any, engine: Any) -> None:
    assert "expert" not in client.get("/metrics").text
    engine.past_stats = EngineStats(expert_tokens=(3, 0, 1), expert_imbalance=9.0)
    engine.stats = EngineStats(expert_tokens=(10, 20, 30), expert_imbalance=1.5)
    samples = scrape(client)
    assert [value(samples, "vllm:expert_tokens_total", expert=e) for e in "012"] == [13, 20, 31]
    assert value(samples, "vllm:expert_imbalance") == 1.5
    assert "rank_expert_tokens" not in client.get("/metrics").text
    engine.info = msgspec.structs.replace(engine.info, experts={"ranks": 3})
    samples = scrape(client)
    assert [value(samples, "vllm:rank_expert_tokens_total", rank=rank) for rank in "012"] == [13, 20, 31]


def test_recurrent_states(client: Any, engine: Any) -> None:
    assert "vllm:state_" not in client.get("/metrics").text
    engine.past_stats = EngineStats(
        num_state_slots=40, num_state_slots_used=9, num_state_snapshots=7, num_state_restores=1,
        num_restored_tokens=64, num_state_exports=3, num_skipped_state_exports=2,
    )  # fmt: skip
    engine.stats = EngineStats(
        num_state_slots=40, num_state_slots_used=5, num_state_snapshots=4, num_state_restores=10,
        num_restored_tokens=640, num_state_exports=30, num_skipped_state_exports=20,
    )  # fmt: skip
    samples = scrape(client)
    for name, expected in {
        "slots": 40, "slots_used": 5, "snapshots": 4, "restores_total": 11, "restored_tokens_total": 704,
        "exports_total": 33, "exports_skipped_total": 22,
    }.items():  # fmt: skip
        assert value(samples, f"vllm:state_{name}") == expected


def test_pictures_that_the_engine_looks_at(client: Any, engine: Any) -> None:
    assert "vllm:enco" not in client.get("/metrics").text
    engine.past_stats = EngineStats(
        num_encoder_tokens=90, num_encoder_tokens_used=80, encoder_queries=7, encoder_hits=3, num_encoded_patches=400
    )
    engine.stats = EngineStats(
        num_encoder_tokens=90, num_encoder_tokens_used=20, encoder_queries=70, encoder_hits=30, num_encoded_patches=4000
    )
    samples = scrape(client)
    for name, expected in {
        "encoder_cache_tokens": 90, "encoder_cache_tokens_used": 20, "encoder_cache_queries_total": 77,
        "encoder_cache_hits_total": 33, "encoded_patches_total": 4400,
    }.items():  # fmt: skip
        assert value(samples, f"vllm:{name}") == expected


def test_an_engine_that_loads_has_said_nothing_of_itself(client: Any, engine: Any) -> None:
    """EngineClient has no `info` until it is ready: the page is there all the same."""
    loading = copy.copy(engine)
    del loading.info
    engine.engines.append(loading)
    assert client.get("/metrics").status_code == 200


def test_two_models_have_their_series(client: Any, engine: Any, app: Any) -> None:
    page, second = app.state.server.metrics_page, Metrics(engine, app.state.server.config)
    page.add(second, engine, "second")
    second.finished_requests["stop"] += 3
    client.chat()
    samples = scrape(client)
    for model, count in (("test", 1), ("second", 3)):
        assert value(samples, "vllm:request_success_total", model_name=model, finished_reason="stop") == count
        assert value(samples, "vllm:time_to_first_token_seconds_count", model_name=model) == (model == "test")
    text = client.get("/metrics").text
    assert text.count("# TYPE vllm:request_success_total ") == 1


def test_reasons_are_there_before_the_first_case(client: Any) -> None:
    """An alert on an increase would miss the first one of a series that begins at one."""
    samples = scrape(client)
    for name, reasons in (
        ("requests_rejected", ("queued_requests", "queued_tokens", "loading", "draining", "engine_down")),
        ("requests_aborted", ("disconnect", "cancel", "timeout", "error")),
        ("requests_timed_out", ("request", "queue", "write")),
        ("request_success", ("stop", "length", "abort", "error")),
    ):
        for reason in reasons:
            label = "finished_reason" if name == "request_success" else "reason"
            assert value(samples, f"vllm:{name}_total", **{label: reason}) == 0


def test_rejected_by_reason(client: Any, engine: Any, app: Any) -> None:
    app.state.server.draining = True
    assert client.chat().status_code == 503
    app.state.server.draining, engine.ready = False, False
    assert client.chat().status_code == 503
    engine.down = "out of luck"
    assert client.chat().status_code == client.complete().status_code == 503
    samples = scrape(client)
    for reason, count in (("draining", 1), ("loading", 1), ("engine_down", 2), ("queued_requests", 0)):
        assert value(samples, "vllm:requests_rejected_total", reason=reason) == count


def test_aborted_by_reason_adds_up(client: Any, engine: Any, app: Any, say: Any) -> None:
    """Each choice that did not finish has one reason, and is an abort among the ended requests."""
    state = app.state.server
    engine.script = say("one two three four five six seven", ends=False)

    async def give_up(end: Any) -> None:
        from vserve.engine.link.sampling_params import SamplingParams
        from vserve.server.generation.choice import Prompt
        from vserve.server.generation.generation import Generation

        prompts = [Prompt([3, 4, 5], SamplingParams(max_tokens=100))]
        generation = Generation(engine, state.metrics, state.model.tokenizer, prompts, arrival=0.0, n=2)
        await generation.submit()
        deltas = generation.deltas()
        await anext(deltas)
        end(generation)
        with contextlib.suppress(StopAsyncIteration):
            while generation.abort_reason == "cancel":
                await anext(deltas)
        generation.close()

    client.run(give_up(lambda generation: None))
    client.run(give_up(lambda generation: generation.cancel()))
    client.run(give_up(lambda generation: setattr(generation, "abort_reason", "timeout")))
    # Their engine died, and others serve; of the last two, one was elsewhere.
    client.run(give_up(lambda generation: [choice.mailbox.fail("gone") for choice in generation.choices]))
    client.run(give_up(lambda generation: generation.choices[1].mailbox.fail("gone")))
    samples = scrape(client)
    for reason, count in {"disconnect": 2, "cancel": 2, "timeout": 2, "error": 1}.items():
        assert value(samples, "vllm:requests_aborted_total", reason=reason) == count
    assert value(samples, "vllm:request_success_total", finished_reason="abort") == 7
    assert value(samples, "vllm:request_success_total", finished_reason="error") == 3
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 0


def test_a_new_engine_does_not_turn_counters_back(client: Any, engine: Any) -> None:
    client.chat()
    before = scrape(client)
    engine.ready = False
    down = scrape(client)
    assert value(down, "vllm:engine_healthy") == 0 and value(down, "vllm:num_requests_running") == 0
    engine.past_stats, engine.stats, engine.num_outputs = engine.stats, EngineStats(), 0
    engine.ready, engine.epoch, engine.num_restarts = True, 2, 1
    assert value(scrape(client), "vllm:engine_steps_total") == value(before, "vllm:engine_steps_total")
    client.chat()
    after = scrape(client)
    for name in ("engine_steps", "num_preemptions", "prefix_cache_hits", "step_device_seconds"):
        assert value(after, f"vllm:{name}_total") == 2 * value(before, f"vllm:{name}_total")
    assert value(after, "vllm:engine_restarts_total") == 1 and value(after, "vllm:engine_healthy") == 1


def test_preemptions_of_a_request(client: Any, engine: Any, text_model: Any) -> None:
    client.chat()

    def script(request: Any) -> list[list[int]]:
        engine._open[request.id].num_preemptions = 3
        return [[5], [2]]

    engine.script = script
    client.chat()
    samples = scrape(client)
    assert value(samples, "vllm:request_num_preemptions_sum") == 3
    assert value(samples, "vllm:request_num_preemptions_bucket", le="0.0") == 1


def test_grammars(client: Any, app: Any) -> None:
    """The service's own counts, once there is one; series of the same buckets before."""
    before = {key for key in scrape(client) if "grammar" in key[0]}
    service = app.state.server.grammars
    service.compile_seconds.observe(0.3)
    service.num_hits, service.num_misses, service.num_failures = 5, 4, 3
    samples = scrape(client)
    assert before == {key for key in samples if "grammar" in key[0]}
    for name, count in (("cache_hits", 5), ("cache_misses", 4), ("compile_failures", 3)):
        assert value(samples, f"vllm:grammar_{name}_total") == count
    assert value(samples, "vllm:grammar_compile_seconds_sum") == 0.3


def test_throughput(client: Any, engine: Any, app: Any, monkeypatch: pytest.MonkeyPatch, say: Any) -> None:
    """Tokens over the interval in which they came; an idle time before it does not dilute it."""
    from vserve.server.observe import throughput

    now = [1000.0]
    monkeypatch.setattr(throughput, "time", SimpleNamespace(monotonic=lambda: now[0]))
    metrics = app.state.server.metrics
    metrics.throughput.rates()
    engine.script = say("one two three", ends=False)
    client.chat(max_tokens=1)
    now[0] += 10.0
    metrics.generation_tokens += 70
    metrics.prompt_tokens += 300
    client.chat(max_tokens=1)
    samples = scrape(client)
    # the last step of the interval comes before its own tokens are counted
    assert value(samples, "vllm:generation_tokens_per_second") == pytest.approx(7, abs=0.5)
    assert value(samples, "vllm:prompt_tokens_per_second") > 25
    now[0] += 60.0
    assert value(scrape(client), "vllm:generation_tokens_per_second") == 0
    client.chat(max_tokens=1)
    assert value(scrape(client), "vllm:generation_tokens_per_second") == pytest.approx(7, abs=0.5)


def test_a_streamed_token_costs_two_calls(client: Any, engine: Any, say: Any) -> None:
    """Of all code that counts, logs and traces, a token runs two functions, and a step two listeners: no more."""
    watched = ("metrics", "histogram", "exposition", "request_log", "tracing", "throughput", "logs")
    files = {f"{name}.py" for name in watched}
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        path = Path(frame.f_code.co_filename)
        calls += event == "call" and path.name in files and path.parent.name in ("observe", "server", "engine")

    totals = {}
    for num_tokens in (20, 60):
        engine.script = lambda _, n=num_tokens: [[40 + i % 20] for i in range(n)]
        client.chat(stream=True, max_tokens=num_tokens)
        calls = 0
        sys.setprofile(count)
        try:
            client.chat(stream=True, max_tokens=num_tokens)
        finally:
            sys.setprofile(None)
        totals[num_tokens] = calls
    # more_output and its observe a token; _step, its observe and the throughput's _step a step
    assert totals[60] - totals[20] == 40 * (2 + 3), totals
    assert totals[20] - 20 * 5 < 60, totals  # once a request


def test_labels_are_bounded(client: Any) -> None:
    """Neither paths nor methods that a client invents become labels."""
    for i in range(20):
        client.get(f"/{i}")
        client.get(f"/v1/models/{i}")
        client.request(f"M{i}", "/v1/models")
    handlers = {dict(labels)["handler"] for name, labels in scrape(client) if name == "http_requests_total"}
    assert len(handlers) <= 3
    methods = {dict(labels)["method"] for name, labels in scrape(client) if name == "http_requests_total"}
    assert methods == {"GET", "OTHER"}


def test_openmetrics_when_asked(client: Any) -> None:
    response = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    assert client.get("/metrics").headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("asked", ["text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0;q=0.9,*/*",
    "application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5",
    "application/openmetrics-text;version=1.0.0;escaping=underscores,text/plain;version=1.0.0;escaping=underscores",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0", ""])  # fmt: skip
def test_every_scraper_sees_the_same_names(client: Any, asked: str) -> None:
    """The library would give Prometheus 2 names without the colon."""
    page = client.get("/metrics", headers={"accept": asked}).text
    assert "\nvllm:num_requests_running{" in page and "vllm_" not in page


@pytest.mark.parametrize("observed", [0.0, 0.5, 1.0, 1.5, 2.0, 9.0])
def test_histogram(observed: float) -> None:
    histogram = Histogram((1, 2))
    histogram.observe(observed, 3)
    assert histogram.buckets() == [("1.0", 3.0 * (observed <= 1)), ("2.0", 3.0 * (observed <= 2)), ("+Inf", 3.0)]
    assert histogram.sum == 3 * observed
