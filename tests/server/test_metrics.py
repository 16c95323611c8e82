"""/metrics: the names are frozen, the numbers are the clients'."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vserve.server.app import create_app
from vserve.server.config import ServerConfig
from vserve.server.histogram import Histogram
from vserve.server.metrics import PHASE, TOKEN, TTFT

# Dashboards and alerts are built on these: a name may be added here, never changed or removed.
NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:kv_blocks",
    "vllm:kv_blocks_free", "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total", "vllm:engine_steps_total", "vllm:cudagraph_misses_total",
    "vllm:late_kernel_compilations_total", "vllm:step_device_seconds_total",
    "vllm:step_host_seconds_total", "vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:startup_phase_seconds", "vllm:memory_bytes",
    "vllm:cache_config_info",
    *(f"vllm:{name}_{part}" for part in ("bucket", "count", "sum") for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_max_num_generation_tokens", "request_params_max_tokens",
        "request_params_n", "iteration_tokens_total",
    )),
    "http_requests_total", "http_request_size_bytes_count", "http_request_size_bytes_sum",
    "http_response_size_bytes_count", "http_response_size_bytes_sum",
    *(f"{name}_{part}" for part in ("bucket", "count", "sum") for name in (
        "http_request_duration_seconds", "http_request_duration_highr_seconds",
    )),
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


def test_names_and_labels(client: Any) -> None:
    client.chat()
    samples = scrape(client)
    own = {name for name, _ in samples if not name.startswith(("process_", "python_"))}
    assert own == NAMES
    for name, labels in samples:
        if name.startswith("vllm:") and name != "vllm:cache_config_info":
            assert {("model_name", "test"), ("engine", "0")} <= labels
    assert value(samples, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100", engine="0") == 1
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
    page = generate_latest(app.state.server.metrics.registry).decode()
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


@pytest.mark.parametrize("observed", [0.0, 0.5, 1.0, 1.5, 2.0, 9.0])
def test_histogram(observed: float) -> None:
    histogram = Histogram((1, 2))
    histogram.observe(observed, 3)
    assert histogram.buckets() == [("1.0", 3.0 * (observed <= 1)), ("2.0", 3.0 * (observed <= 2)), ("+Inf", 3.0)]
    assert histogram.sum == 3 * observed
