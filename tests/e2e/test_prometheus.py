"""Prometheus itself, with the configuration that is shipped, against a server; every dashboard panel answers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

DOCKER = Path(__file__).parents[2] / "docker"
RULES = DOCKER / "prometheus" / "rules.yml"
DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "vserve.json").read_text())

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed: apt-get install prometheus (.ci/run does)",
)

# What the dashboards that come with vLLM ask for.
VLLM_DASHBOARDS = (
    *(f"vllm:{name}_{part}" for part in ("bucket", "sum", "count") for name in (
        "e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds",
    )),
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_count",
    "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:request_decode_time_seconds_sum", "vllm:request_prefill_time_seconds_sum",
    "vllm:request_queue_time_seconds_sum", "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum", "vllm:request_success_total",
)  # fmt: skip


def drive(url: str, seconds: float) -> None:
    """Chats, streamed and not, a refused request now and then, until the time is over."""
    end = time.monotonic() + seconds

    def work(n: int) -> None:
        with httpx.Client(base_url=url, timeout=240) as client:
            while time.monotonic() < end:
                body = {"messages": [{"role": "user", "content": f"What is 12 + {n}?"}], "stream": bool(n % 2)}
                assert client.post("/v1/chat/completions", json=body).status_code == 200
                assert client.post("/v1/completions", json={"prompt": "Hello", "n": 0}).status_code == 400

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


@pytest.fixture(scope="module")
def prometheus(demo_server: Any, reserve_port: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Scrapes the demo server each second; its URL."""
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copytree(DOCKER / "prometheus", folder, dirs_exist_ok=True)
    config = folder / "prometheus.yml"
    text = config.read_text()
    for pattern, value in (
        (r"vserve:8000", demo_server.url.removeprefix("http://")),
        (r"scrape_interval: \w+", "scrape_interval: 1s"),
        (r"evaluation_interval: \w+", "evaluation_interval: 1s"),
    ):
        text, count = re.subn(pattern, value, text)
        assert count == 1
    config.write_text(text)
    port = reserve_port()
    process = subprocess.Popen(
        ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=error",
         f"--web.listen-address=127.0.0.1:{port}"],
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: httpx.get(f"{url}/-/ready").status_code == 200)
        wait_for(lambda: [t["health"] for t in get(url, "targets")["activeTargets"]] == ["up"])
        drive(demo_server.url, 4)
        wait_for(lambda: all(rule["health"] == "ok" for rule in rules(url)))
        yield url
    finally:
        process.kill()
        process.wait(10)


def wait_for(condition: Callable[[], bool], seconds: float = 120, missing: object = "") -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end, missing
        time.sleep(0.2)


def get(url: str, path: str, **parameters: str) -> Any:
    answer = httpx.get(f"{url}/api/v1/{path}", params=parameters, timeout=240).json()
    assert answer["status"] == "success", (parameters, answer)
    return answer["data"]


def rules(url: str) -> list[dict[str, Any]]:
    return [rule for group in get(url, "rules")["groups"] for rule in group["rules"]]


def series(url: str, expression: str) -> list[dict[str, Any]]:
    return get(url, "query", query=expression)["result"]


def expressions() -> list[str]:
    """Of the dashboard, its variables set to All."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    found = [e.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$model_name", ".*") for e in found]
    found = [e.removesuffix(" or vector(0)") for e in found]  # which would answer for a name that is gone
    assert len(found) > 50 and not any("$" in expression for expression in found)
    return found


@pytest.mark.slow
def test_shipped_configuration_works(prometheus: str, demo_server: Any) -> None:
    def target() -> Any:
        (found,) = get(prometheus, "targets")["activeTargets"]
        return found

    wait_for(lambda: (target()["health"], target()["lastError"]) == ("up", ""))  # a scrape has a second
    assert target()["scrapeUrl"] == f"{demo_server.url}/metrics"
    found = rules(prometheus)
    assert len(found) == RULES.read_text().count("expr:")
    assert {rule["lastError"] for rule in found if "lastError" in rule} <= {""}
    assert {rule["name"] for rule in found if rule.get("state") == "firing"} == set()
    for rule in found:
        if rule["type"] == "recording":
            wait_for(lambda rule=rule: bool(series(prometheus, rule["name"])))


@pytest.mark.slow
def test_every_panel_answers(prometheus: str, demo_server: Any) -> None:
    missing = expressions()

    def all_answer() -> bool:
        missing[:] = [expression for expression in missing if not series(prometheus, expression)]
        return not missing

    wait_for(all_answer, missing=missing)
    for expression in (
        "sum(rate(vllm:generation_tokens_total[1m]))", "sum(rate(vllm:request_success_total[1m]))",
        'sum(rate(http_requests_total{status="4xx"}[1m]))', "sum(rate(vllm:step_host_seconds_total[1m]))",
    ):  # fmt: skip
        while not float(series(prometheus, expression)[0]["value"][1]) > 0:  # of the last minute
            drive(demo_server.url, 1)
    for variable in ("instance", "model_name"):
        assert get(prometheus, f"label/{variable}/values", **{"match[]": "vllm:num_requests_running"})


@pytest.mark.slow
def test_vllm_dashboards_find_their_names(prometheus: str) -> None:
    wait_for(lambda: all(series(prometheus, name) for name in VLLM_DASHBOARDS), missing=VLLM_DASHBOARDS)


@pytest.mark.slow
def test_counters_are_the_clients(prometheus: str, demo_server: Any) -> None:
    """What Prometheus has is what clients were told, to the token."""
    before = page(demo_server.url)
    usages = []
    for i in range(3):
        body = {"messages": [{"role": "user", "content": f"What is 4 + {i}?"}], "n": 2, "max_tokens": 5}
        usages.append(httpx.post(f"{demo_server.url}/v1/chat/completions", json=body, timeout=240).json()["usage"])
    after = page(demo_server.url)
    fields = {"vllm:prompt_tokens_total": "prompt_tokens", "vllm:generation_tokens_total": "completion_tokens"}
    for name, field in fields.items():
        told = sum(usage[field] for usage in usages)
        assert after[name] - before[name] == told
        wait_for(lambda name=name: float(series(prometheus, name)[0]["value"][1]) == after[name])


def page(url: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.split("{")[0]] = found.get(name.split("{")[0], 0.0) + float(value)
    return found


def test_promtool_likes_the_page(demo_server: Any) -> None:
    """What is left is vLLM's naming, which dashboards rely on."""
    text = httpx.get(f"{demo_server.url}/metrics").text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=240)
    complaints = [line for line in done.stderr.splitlines() if "should not contain ':'" not in line]
    assert complaints == ['vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix']


@pytest.mark.parametrize("kind, file", [("config", "prometheus.yml"), ("rules", "rules.yml")])
def test_promtool_likes_the_files(kind: str, file: str) -> None:
    command = ["promtool", "check", kind, str(DOCKER / "prometheus" / file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


LABELS = 'instance="a:1",model_name="m"'
TROUBLE = {  # alert → series that set it off, in promtool's notation, a sample a minute
    "VserveDown": [('up{job="vserve",instance="a:1"}', "0x30")],
    "VserveEngineUnhealthy": [(f"vllm:engine_healthy{{{LABELS}}}", "0x30")],
    "VserveEngineRestarted": [(f"vllm:engine_restarts_total{{{LABELS}}}", "0x20 1x10")],
    "VserveRejecting": [(f'vllm:requests_rejected_total{{{LABELS},reason="queued_requests"}}', "0+9x30")],
    "VserveQueueing": [
        (f"vllm:num_requests_waiting{{{LABELS}}}", "5x30"), (f"vllm:kv_cache_usage_perc{{{LABELS}}}", "0.99x30"),
    ],
    "VservePreempting": [(f"vllm:num_preemptions_total{{{LABELS}}}", "0+60x30")],
    "VserveSlowFirstToken": [
        (f'vllm:time_to_first_token_seconds_bucket{{{LABELS},le="20"}}', "0x30"),
        (f'vllm:time_to_first_token_seconds_bucket{{{LABELS},le="40"}}', "0+60x30"),
        (f'vllm:time_to_first_token_seconds_bucket{{{LABELS},le="+Inf"}}', "0+60x30"),
    ],
    "VserveErrors": [
        ('http_requests_total{instance="a:1",status="5xx"}', "0+10x30"),
        ('http_requests_total{instance="a:1",status="2xx"}', "0+50x30"),
    ],
    "VserveCorruptedRequests": [(f"vllm:corrupted_requests_total{{{LABELS}}}", "0x20 1x10")],
    "VserveLosesLogLines": [(f"vllm:log_lines_lost_total{{{LABELS}}}", "0x20 7x10")],
}  # fmt: skip


def test_alerts_fire(tmp_path: Path) -> None:
    """Each one on the trouble that it is made for, and only that one."""
    assert sorted(TROUBLE) == sorted(re.findall(r"alert: (\w+)", RULES.read_text()))
    quiet = {"up": ('up{job="vserve",instance="a:1"}', "1x30")}
    tests = []
    for alert, trouble in TROUBLE.items():
        inputs = [*trouble, *([quiet["up"]] if alert != "VserveDown" else [])]
        tests.append({
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in inputs],
            "promql_expr_test": [{
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "25m",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}],
            }],
        })  # fmt: skip
    file = tmp_path / "test.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
