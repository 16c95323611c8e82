"""Traces, as a collector on the loopback gets them; and what a collector that is not there costs: nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(ThreadingHTTPServer):
    """Speaks OTLP over HTTP, as far as a sender can tell."""

    daemon_threads = True

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.paths: set[str] = set()
        super().__init__(("127.0.0.1", 0), self.Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def find(self, request_id: str) -> Any:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for span in list(self.spans):
                if attributes(span).get("gen_ai.request.id") == request_id:
                    return span
            time.sleep(0.1)
        raise AssertionError(f"no span of {request_id} among {len(self.spans)}")

    class Handler(BaseHTTPRequestHandler):
        server: Collector

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.server.paths.add(self.path)
            message = trace_service.ExportTraceServiceRequest.FromString(body)
            for resource in message.resource_spans:
                self.server.services |= {
                    a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
                }
                for scope in resource.scope_spans:
                    self.server.spans += scope.spans
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def chat(url: str, request_id: str, **more: Any) -> httpx.Response:
    headers = {"x-request-id": request_id, **more.pop("headers", {})}
    body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=240)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def traced(serve: Any, collector: Collector) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms between exports, instead of five seconds
        with serve("--otlp-traces-endpoint", collector.url) as server:
            yield server.url


@pytest.mark.slow
def test_span_of_a_request(traced: str, collector: Collector) -> None:
    before = time.time_ns()
    answer = chat(traced, "one", n=2, max_tokens=7, temperature=0.5, top_p=0.9).json()
    span = collector.find("one")
    found = attributes(span)
    assert span.name == "llm_request" and span.kind == 2  # server
    assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
    assert len(span.parent_span_id) == 0
    assert collector.services == {"vserve"} and collector.paths == {"/v1/traces"}
    usage = answer["usage"]
    assert found["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert found["gen_ai.usage.num_sequences"] == found["gen_ai.request.n"] == 2
    assert found["gen_ai.request.max_tokens"] == 7 and found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.top_p"] == 0.9 and found["gen_ai.response.model"] == answer["model"]
    assert found["http.route"] == "/v1/chat/completions" and found["http.response.status_code"] == 200
    phases = [found[f"gen_ai.latency.time_in_{name}"] for name in ("queue", "model_prefill", "model_decode")]
    assert all(seconds >= 0 for seconds in phases)
    inference = found["gen_ai.latency.time_in_model_inference"]
    assert inference == pytest.approx(phases[1] + phases[2])
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert found["gen_ai.latency.e2e"] == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9)


@pytest.mark.slow
def test_callers_trace_is_continued(traced: str, collector: Collector) -> None:
    chat(traced, "child", stream=True, headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"})
    chat(traced, "forged", headers={"traceparent": "00-nonsense-1"})
    chat(traced, "unsampled", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    span = collector.find("child")
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "a=b")
    assert collector.find("forged").trace_id.hex() != TRACE
    chat(traced, "last")
    collector.find("last")
    assert not [s for s in collector.spans if attributes(s)["gen_ai.request.id"] == "unsampled"]  # the caller's choice


@pytest.mark.slow
def test_refused_requests_have_spans_too(traced: str, collector: Collector) -> None:
    chat(traced, "refused", n=0)
    span = collector.find("refused")
    assert span.name == "POST /v1/chat/completions" and attributes(span)["http.response.status_code"] == 400
    assert span.status.code == 0  # the caller's mistake, not the server's


@pytest.mark.slow
@pytest.mark.parametrize("collector_is", ["gone", "silent"])
def test_no_request_notices_a_lost_collector(serve: Any, collector_is: str) -> None:
    """Gone: refuses connections. Silent: accepts them, and never answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if collector_is == "silent":
            sock.listen(100)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with serve("--otlp-traces-endpoint", url) as server:
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda i: chat(server.url, f"r{i}", max_tokens=3), range(40)))
            assert {answer.status_code for answer in answers} == {200}
            server.process.terminate()
            assert server.wait() == 0


def test_missing_extra_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from vserve.engine.errors import ConfigError
    from vserve.server.options.config import ServerConfig

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "opentelemetry" in name else real(name))
    with pytest.raises(ConfigError, match=r"pip install 'vserve\[otel\]'"):
        ServerConfig(otlp_traces_endpoint="http://localhost:4318")
    assert ServerConfig().otlp_traces_endpoint is None


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", ""])
def test_bad_endpoint(endpoint: str) -> None:
    from vserve.engine.errors import ConfigError
    from vserve.server.options.config import ServerConfig

    with pytest.raises(ConfigError, match="http://"):
        ServerConfig(otlp_traces_endpoint=endpoint)
