"""`vserve bench`: the numbers against hand-computed ones, and real client processes against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vserve.engine.errors import ConfigError
from vserve.server.cli.bench import load, serve
from vserve.server.cli.bench.arrivals import arrival_times, split
from vserve.server.cli.bench.client import Job, Target, TimedRequest, run_job
from vserve.server.cli.bench.datasets import CustomDataset, PrefixRepetitionDataset, RandomDataset, Vocabulary
from vserve.server.cli.bench.event_stream import ConnectionPool, EventStream, StreamResult
from vserve.server.cli.bench.report import measure, print_report, summary, to_json
from vserve.server.cli.main import main


def rng() -> np.random.Generator:
    return np.random.default_rng(random.randrange(1 << 30))


# ---- statistics ----


def three_results() -> list[StreamResult]:
    return [
        StreamResult(0, 100.0, [100.5, 100.75, 101.0, 101.5], 101.75, prompt_tokens=10, completion_tokens=5),
        StreamResult(1, 101.0, [101.25], 101.5, prompt_tokens=20, completion_tokens=1),
        StreamResult(2, 101.0, [], 102.0, error="HTTP 500: boom"),
    ]


def test_metrics_are_the_hand_computed_ones():
    metrics = measure(three_results(), [7, 7, 7], 100.0, {"ttft": 0.5, "tpot": 0.2})
    assert metrics.duration == 2.0
    assert metrics.completed == 2
    assert metrics.errors == ["HTTP 500: boom"]
    assert (metrics.input_tokens, metrics.output_tokens, metrics.num_events) == (30, 6, 5)
    assert metrics.request_throughput == 1.0
    assert metrics.output_throughput == 3.0
    assert metrics.total_throughput == 18.0
    assert metrics.events_per_token == pytest.approx(5 / 6)
    assert metrics.latencies["ttft"] == [0.5, 0.25]
    assert metrics.latencies["tpot"] == [0.25]  # (101.5 − 100.5) / (5 − 1); one token has none
    assert metrics.latencies["itl"] == [0.25, 0.25, 0.5]
    assert metrics.latencies["e2el"] == [1.5, 0.25]
    assert metrics.goodput == 0.5  # the first misses tpot, the second has none to miss
    assert measure(three_results(), [7, 7, 7], 100.0, {"ttft": 0.3}).goodput == 0.5
    assert measure(three_results(), [7, 7, 7], 100.0).goodput is None


def test_a_server_without_usage_counts_by_messages_and_prompt_lengths():
    metrics = measure([StreamResult(0, 1.0, [1.5, 2.0, 3.0], 3.0)], [11], 1.0)
    assert (metrics.input_tokens, metrics.output_tokens) == (11, 3)
    assert metrics.latencies["tpot"] == [0.75]


def test_percentiles_are_interpolated_linearly():
    table = summary([0.004, 0.001, 0.002, 0.003], [50, 90, 99.9])
    assert table == pytest.approx({"Mean": 2.5, "Median": 2.5, "P50": 2.5, "P90": 3.7, "P99.9": 3.997})
    assert summary([], [99]) == {"Mean": 0, "Median": 0, "P99": 0}


def test_the_report_has_the_labels_that_scripts_grep_for(capsys):
    metrics = measure(three_results(), [0, 0, 0], 100.0, {"ttft": 0.5})
    print_report(metrics, ["ttft", "tpot", "itl"], [99], rate=4, max_concurrency=8)
    out = capsys.readouterr().out
    values = dict(re.findall(r"^([A-Z].*?):\s+(\S+)\s*$", out, re.M))
    assert out.startswith("============ Serving Benchmark Result ============\n")
    assert list(values) == [
        "Successful requests", "Failed requests", "Maximum request concurrency", "Request rate configured (RPS)",
        "Benchmark duration (s)", "Total input tokens", "Total generated tokens", "Request throughput (req/s)",
        "Request goodput (req/s)", "Output token throughput (tok/s)", "Total Token throughput (tok/s)",
        "SSE events per token", "Mean TTFT (ms)", "Median TTFT (ms)", "P99 TTFT (ms)", "Mean TPOT (ms)",
        "Median TPOT (ms)", "P99 TPOT (ms)", "Mean ITL (ms)", "Median ITL (ms)", "P99 ITL (ms)",
    ]  # fmt: skip
    assert values["Total Token throughput (tok/s)"] == "18.00"
    assert values["Mean TTFT (ms)"] == "375.00"
    assert "1 failed: HTTP 500: boom" in out
    content = to_json(metrics, ["ttft"], [99])
    assert content["mean_ttft_ms"] == 375 and content["std_ttft_ms"] == 125
    assert content["p99_ttft_ms"] == pytest.approx(497.5)


# ---- arrivals ----


def test_all_at_once():
    assert arrival_times(5, math.inf, 1.0, rng()) == [0.0] * 5
    assert arrival_times(1, 3.0, 1.0, rng()) == [0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness):
    times = arrival_times(20_000, 8.0, burstiness, rng())
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert times[-1] == pytest.approx(19_999 / 8)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_split():
    assert split(10, 4) == [3, 3, 2, 2]
    requests = [TimedRequest(i, float(i), {}) for i in range(10)]
    jobs = load.share_out(Target("h", 1, "/"), requests, 4, 6)
    assert [job.max_concurrency for job in jobs] == [2, 2, 1, 1]
    assert [[request.index for request in job.requests] for job in jobs] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert len(load.share_out(Target("h", 1, "/"), requests, 4, 2)) == 2  # nobody may have a share of 0
    assert len(load.share_out(Target("h", 1, "/"), requests[:3], 8, None)) == 3


# ---- data ----


@pytest.fixture(scope="module")
def vocabulary(tiny_model) -> Vocabulary:
    return Vocabulary.load(str(tiny_model()))


def test_random_prompts_have_their_lengths_and_are_fresh(vocabulary):
    dataset = RandomDataset(vocabulary, rng(), input_len=30, output_len=7)
    prompts = dataset.sample(40)
    assert {(len(p.prompt), p.num_tokens, p.output_len) for p in prompts} == {(30, 30, 7)}
    assert len({tuple(p.prompt) for p in prompts + dataset.sample(40)}) == 80
    ids = {token for p in prompts for token in p.prompt}
    assert ids <= set(range(3, 300)) and len(ids) > 200  # the three special tokens are left out
    assert not {tuple(p.prompt) for p in RandomDataset(vocabulary, rng(), input_len=30, output_len=7).sample(5)} & {
        tuple(p.prompt) for p in prompts
    }
    seeded = [
        RandomDataset(vocabulary, np.random.default_rng(3), input_len=30, output_len=7).sample(5) for _ in range(2)
    ]
    assert seeded[0] == seeded[1]


def test_random_lengths_vary_within_the_ratio_and_share_a_prefix(vocabulary):
    dataset = RandomDataset(vocabulary, rng(), input_len=20, output_len=10, prefix_len=5, range_ratio=0.5)
    prompts = dataset.sample(500)
    assert {len(p.prompt) for p in prompts} == set(range(15, 36))
    assert {p.output_len for p in prompts} == set(range(5, 16))
    assert len({tuple(p.prompt[:5]) for p in prompts}) == 1


def test_text_prompts_tokenise_to_about_their_length(vocabulary, tiny_models):
    tokenizer = tiny_models.tiny_tokenizer()
    for prompt in RandomDataset(vocabulary, rng(), input_len=40, output_len=7, text=True).sample(10):
        assert isinstance(prompt.prompt, str)
        assert len(tokenizer(prompt.prompt)["input_ids"]) == prompt.num_tokens
        assert 30 <= prompt.num_tokens <= 50


def test_prefixes_are_used_equally_often(vocabulary):
    dataset = PrefixRepetitionDataset(
        vocabulary, rng(), prefix_len=16, suffix_len=4, num_prefixes=3, output_len=2
    )  # fmt: skip
    prompts = dataset.sample(12)
    counts: dict[Any, int] = {}
    for prompt in prompts:
        assert len(prompt.prompt) == prompt.num_tokens == 20
        key = tuple(prompt.prompt[:16])
        counts[key] = counts.get(key, 0) + 1
    assert sorted(counts.values()) == [4, 4, 4]
    assert len({tuple(p.prompt[16:]) for p in prompts}) == 12


def test_custom_prompts(tmp_path):
    lines = [{"prompt": "a", "output_tokens": 3}, {"prompt": [1, 2], "output_tokens": 4},
             {"messages": [{"role": "user", "content": "b"}], "output_tokens": 5}]  # fmt: skip
    path = tmp_path / "data.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    dataset = CustomDataset(path, rng(), output_len=-1, shuffle=False)
    assert [(p.prompt, p.output_len, p.num_tokens) for p in dataset.sample(4)] == [
        ("a", 3, None), ([1, 2], 4, 2), ([{"role": "user", "content": "b"}], 5, None), ("a", 3, None),
    ]  # fmt: skip
    assert dataset.sample(1)[0].prompt == [1, 2]  # goes on where it stopped
    assert {p.output_len for p in CustomDataset(path, rng(), output_len=9).sample(3)} == {9}


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": ""}', '{"prompt": [1, "a"]}', '{"prompt": "a"}', ""])
def test_custom_files_that_cannot_be_used(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"data\.jsonl"):
        CustomDataset(path, rng(), output_len=-1)


# ---- one stream ----

CHOICE = b'data: {"choices":[{"index":0,"text":"\\"usage\\": x","finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


class Transport:
    aborted = False

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None:
        self.aborted = True


async def receive(*pieces: bytes, lost: bool = False) -> tuple[StreamResult, bool]:
    """The result of a stream that arrives in these pieces, and whether the connection can be used again."""
    stream, result = EventStream(), StreamResult(0, stamps=[])
    stream.connection_made(Transport())  # type: ignore[arg-type]
    sending = asyncio.create_task(stream.send(b"", result))
    await asyncio.sleep(0)
    for piece in pieces:
        stream.data_received(piece)
    if lost:
        stream.connection_lost(None)
    await asyncio.wait_for(sending, 60)
    return result, stream.reusable


def test_a_stream_is_read_whatever_pieces_it_comes_in():
    body = [CHOICE[:20], CHOICE[20:] + CHOICE, b": ping\n\n", USAGE.replace(b"\n", b"\r\n"), DONE]
    whole = HEAD + chunked(*body)
    for pieces in ([whole], [bytes([byte]) for byte in whole], [whole[:97], whole[97:]]):
        result, reusable = asyncio.run(receive(*pieces))
        assert result.error is None and reusable
        assert len(result.stamps) == 2 and result.stamps == sorted(result.stamps)
        assert (result.prompt_tokens, result.completion_tokens) == (3, 2)
        assert result.end >= result.stamps[-1]


@pytest.mark.parametrize(
    ("answer", "lost", "error"),
    [
        (b'HTTP/1.1 400 Bad\r\ncontent-length: 30\r\n\r\n{"error":{"message":"no, no"}}', False, "HTTP 400: no, no"),
        (b'HTTP/1.1 503 x\r\nconnection: close\r\n\r\n{"error":{"message":"later"}}', True, "HTTP 503: later"),
        (HEAD + chunked(CHOICE), False, "the stream ended without [DONE]"),
        (HEAD + chunked(USAGE, DONE), False, "the answer has no message with choices"),
        (HEAD + chunked(CHOICE, b'data: {"error":{"message":"it broke"}}\n\n', DONE), False, "it broke"),
        (HEAD + chunked(CHOICE)[:-9], True, "the connection was lost in the middle of the answer"),
        (HEAD + chunked(b"data: {nonsense\n\n"), False, "cannot read the answer: "),
        (b"nonsense\r\n\r\n", False, "cannot read the answer: "),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_the_results_error(answer, lost, error):
    result, _ = asyncio.run(receive(answer, lost=lost))
    assert result.error is not None and result.error.startswith(error)


# ---- a scripted server ----

REFUSED = [299, 1]  # of two tokens: no random prompt of these tests is so short


class ScriptedServer:
    """Streams max_tokens messages, `delay` seconds before each; the prompt REFUSED is refused. From the second request
    on, nobody is answered until `together` have asked: clients on a busy machine begin when they get a core."""

    def __init__(self, root: str, delay: float = 0.0, together: int = 1) -> None:
        self.root = root
        self.delay = delay
        self.together = together
        self.met = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []
        self.active = self.peak = self.num_connections = 0
        self.keep_alive = True
        self.busy = b""  # what the next requests but the first (the probe) are told instead of an answer
        self.num_busy = 0  # so many of them
        self.pages: Iterator[str] = iter(())  # of /metrics

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                if head.startswith("GET"):
                    models = json.dumps({"data": [{"id": "tiny", "root": self.root}]}).encode()
                    if "/metrics" in head:
                        models = next(self.pages, "").encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(models), models))
                    continue
                size = re.search(r"content-length: (\d+)", head)
                assert size is not None
                await self.answer(json.loads(await reader.readexactly(int(size[1]))), writer)
                if not self.keep_alive:
                    break  # without a word, as a server does whose patience with idle connections ends
        writer.close()

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        prompt, count = body.get("prompt"), body.get("max_tokens") or body.get("max_completion_tokens")
        if prompt == REFUSED:
            error = b'{"error":{"message":"not this one"}}'
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%s" % (len(error), error))
            return
        if self.num_busy and len(self.bodies) > 1:
            self.num_busy -= 1
            error = b'{"error":{"message":"too busy"}}'
            writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (self.busy, len(error), error))
            return
        self.active += 1
        self.peak = max(self.peak, self.active)
        writer.write(HEAD)
        if self.peak >= self.together:
            self.met.set()
        if len(self.bodies) > 1:
            await asyncio.wait_for(self.met.wait(), 60)
        for _ in range(count):
            await asyncio.sleep(self.delay)
            writer.write(chunked(CHOICE)[:-5])
        self.active -= 1
        usage = {"prompt_tokens": len(prompt) if prompt else 1, "completion_tokens": count}
        writer.write(chunked(b'data: {"choices":[],"usage":%s}\n\n' % json.dumps(usage).encode(), DONE))
        await writer.drain()


@contextlib.contextmanager
def running(server: ScriptedServer) -> Iterator[int]:
    """The port that it listens on, on a thread of its own."""
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listening.close()


@pytest.fixture
def root(tiny_model) -> str:
    return str(tiny_model())


def bench(*arguments: object) -> int:
    return main(["bench", *map(str, arguments), "--disable-tqdm"])


@pytest.mark.parametrize(
    ("busy", "options", "failed", "seconds"),
    [
        (b"429 Too Many Requests\r\nretry-after: 1\r\nretry-after-ms: 300", (), 0, 0.3),
        (b"503 Service Unavailable\r\nRetry-After: 1", (), 0, 1.0),
        (b"429 Too Many Requests\r\nretry-after: 9", ("--retry-timeout-sec", 5), 3, 0.0),
        (b"429 Too Many Requests\r\nretry-after-ms: 9", ("--retry-timeout-sec", 0), 3, 0.0),
        (b"429 Too Many Requests", (), 3, 0.0),
        (b"500 Internal Server Error\r\nretry-after: 1", (), 3, 0.0),
    ],
)
def test_bench_serve_comes_back_when_a_busy_server_says(root, tmp_path, capsys, busy, options, failed, seconds):
    server = ScriptedServer(root)
    server.busy, server.num_busy = busy, 3
    with running(server) as port:
        code = bench("serve", "--port", port, "--num-prompts", 4, "--random-input-len", 8, "--random-output-len", 2,
                     "--num-clients", 1, "--save-result", "--save-detailed", "--result-filename", tmp_path / "found",
                     *options)  # fmt: skip
    out, found = capsys.readouterr().out, json.loads((tmp_path / "found").read_text())
    assert (code, found["failed"], found["completed"]) == (1 if failed else 0, failed, 4 - failed)
    assert found["retries"] == 3 - failed and ("Retries (server too busy):" in out) == (not failed)
    assert sum(ttft is not None and ttft >= seconds for ttft in found["ttfts"]) >= 3 - failed
    assert found["duration"] >= seconds


def test_bench_serve_asks_for_adapters_in_turns(root, capsys):
    server = ScriptedServer(root)
    with running(server) as port:
        code = bench("serve", "--port", port, "--num-prompts", 4, "--random-input-len", 8, "--random-output-len", 2,
                     "--num-clients", 1, "--lora-modules", "one", "two")  # fmt: skip
    assert code == 0
    assert sorted(body["model"] for body in server.bodies[1:]) == ["one", "one", "two", "two"]


def drafts_page(drafts: int, tokens: int, accepted: list[int]) -> str:
    """Of two engines, in Prometheus's text."""
    labels = 'model_name="tiny",engine="0"'
    lines = [
        f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts - 1}.0",
        'vllm:spec_decode_num_drafts_total{engine="1",model_name="tiny"} 1.0',
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {tokens}.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {sum(accepted)}.0",
        f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e9",
    ]
    for place, count in enumerate(accepted):
        lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {count}.0')
    return "\n".join(["# HELP vllm:spec_decode_num_drafts_total Times.", *lines, ""])


def test_bench_serve_measures_a_server(root, tmp_path, capsys):
    server = ScriptedServer(root, delay=0.02, together=5)
    server.pages = iter((drafts_page(2, 8, [1, 1]), drafts_page(6, 20, [4, 2, 2])))
    with running(server) as port:
        code = bench(
            "serve", "--port", port, "--input-len", 12, "--output-len", 5, "--num-prompts", 20, "--max-concurrency", 5,
            "--num-clients", 2, "--ignore-eos", "--extra-body", '{"top_k": 3}', "--goodput", "ttft:1", "e2el:60000",
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "25,99", "--save-result",
            "--save-detailed", "--result-dir", tmp_path, "--result-filename", "r.json", "--metadata", "card=none",
        )  # fmt: skip
    assert code == 0
    assert server.peak == 5  # 3 of one client, 2 of the other
    probe, *bodies = server.bodies
    assert probe["prompt"] not in [body["prompt"] for body in bodies]
    assert len(bodies) == len({tuple(body["prompt"]) for body in bodies}) == 20
    for body in bodies:
        assert len(body.pop("prompt")) == 12
        assert body == {
            "model": "tiny", "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
            "max_tokens": 5, "ignore_eos": True, "top_k": 3,
        }  # fmt: skip
    out = capsys.readouterr().out
    assert re.search(r"^Successful requests: +20 *$", out, re.M)
    assert re.search(r"^Total generated tokens: +100 *$", out, re.M)
    assert re.search(r"^SSE events per token: +1\.00 *$", out, re.M)
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["card"]) == (20, 0, "none")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (240, 100)
    assert result["output_throughput"] == pytest.approx(100 / result["duration"])
    # Of what the server's counters gained: 4 drafts of 12 tokens in all, 3, 1 and 2 of which held by position.
    assert re.search(r"^Acceptance length: +2\.50 *$", out, re.M) and re.search(r"^Drafts: +4 *$", out, re.M)
    assert result["spec_decode_acceptance_rate"] == 50 and result["spec_decode_accepted_tokens"] == 6
    assert result["spec_decode_per_position_acceptance_rates"] == [0.75, 0.25, 0.5]
    assert result["request_goodput"] == 0  # no first token within a millisecond
    # At least what the server waits; between two tokens it may seem less, where the client has read both at once.
    assert result["mean_ttft_ms"] >= 20 and result["mean_e2el_ms"] >= 5 * 20
    gaps = [1000 * gap for itls in result["itls"] for gap in itls]
    assert len(gaps) == 20 * 4 and result["p25_itl_ms"] == pytest.approx(np.percentile(gaps, 25))
    tpots = [1000 * statistics.fmean(itls) for itls in result["itls"]]
    assert result["median_tpot_ms"] == pytest.approx(statistics.median(tpots), rel=0.01)
    assert result["duration"] >= 20 / 5 * 5 * 0.02  # five at a time, five tokens each
    assert len(result["ttfts"]) == len(result["itls"]) == 20
    assert result["mean_itl_ms"] == pytest.approx(
        1000 * statistics.fmean(gap for itls in result["itls"] for gap in itls)
    )


def test_bench_serve_keeps_the_arrival_times_and_reports_failures(root, tmp_path, capsys, monkeypatch, settles_within):
    planned: list[float] = []

    def plan(*given):
        planned[:] = arrival_times(*given)
        return planned

    monkeypatch.setattr(serve, "arrival_times", plan)
    data = tmp_path / "data.jsonl"
    prompts = [REFUSED if i == 3 else [5, i] for i in range(10)]
    data.write_text(
        "\n".join(json.dumps({"prompt": prompt, "output_tokens": 1 + i}) for i, prompt in enumerate(prompts))
    )

    def latest() -> float:
        """Seconds that a request started after its time."""
        server = ScriptedServer(root)
        with running(server) as port:
            code = bench(
                "serve", "--base-url", f"http://127.0.0.1:{port}", "--dataset-name", "custom", "--dataset-path", data,
                "--output-len", -1, "--num-prompts", 10, "--request-rate", 8, "--num-clients", 3, "--disable-shuffle",
                "--num-warmups", 2, "--save-result", "--save-detailed", "--result-dir", tmp_path,
                "--result-filename", "r",
            )  # fmt: skip
        assert code == 1
        out = capsys.readouterr().out
        assert re.search(r"^Successful requests: +9 *$", out, re.M)
        assert "1 failed: HTTP 400: not this one" in out
        result = json.loads((tmp_path / "r").read_text())
        assert result["request_errors"] == [""] * 3 + ["HTTP 400: not this one"] + [""] * 6
        assert result["output_lens"] == [1, 2, 3, 0, 5, 6, 7, 8, 9, 10]
        assert len(server.bodies) == 1 + 2 + 10  # the probe and two warm-ups
        assert planned == sorted(planned) and planned[-1] == pytest.approx(9 / 8)
        # Not compared with each other: two of three processes may swap arrivals that are a millisecond apart.
        late = [start - at for start, at in zip(result["start_times"], planned, strict=True)]
        assert min(late) > -0.002, "event loops keep time in whole milliseconds"
        return max(late)

    # Late by no more than a busy machine makes them: each client's share at its own rate would come 2.2 s late.
    assert settles_within(2, latest)


def test_bench_serve_over_chat_sends_text(root, capsys):
    server = ScriptedServer(root)
    with running(server) as port:
        assert bench("serve", "--backend", "openai-chat", "--port", port, "--num-prompts", 3, "--input-len", 6,
                     "--output-len", 2, "--num-clients", 1) == 0  # fmt: skip
    for body in server.bodies[1:]:
        (message,) = body["messages"]
        assert message["role"] == "user" and isinstance(message["content"], str) and message["content"]
        assert body["max_completion_tokens"] == 2


def test_kept_connections_are_used_again_and_stale_ones_replaced(root):
    async def three(port: int) -> list[StreamResult]:
        pool = ConnectionPool("127.0.0.1", port, tls=False)
        results = [StreamResult(i, stamps=[]) for i in range(3)]
        for result in results:
            await pool.stream(Target("127.0.0.1", port, "/").request({"prompt": [1], "max_tokens": 2}), result)
        pool.close()
        return results

    for keep_alive, expected in ((True, 1), (False, 3)):
        server = ScriptedServer(root)
        server.keep_alive = keep_alive
        with running(server) as port:
            results = asyncio.run(three(port))
        assert [result.error for result in results] == [None] * 3
        assert server.num_connections == expected


def test_nobody_there_is_every_requests_error():
    job = Job(Target("127.0.0.1", 9, "/"), [TimedRequest(i, 0.0, {}) for i in range(2)])
    report = asyncio.run(run_job(job, time.monotonic(), lambda result: None))
    assert all(result.error is not None and result.end >= result.start for result in report.results)


def test_what_the_user_can_mend_is_one_line(root, capsys):
    for arguments, code, message in (
        (["--output-len", 0], 2, "--output-len is 0: it must be at least 1"),
        (["--request-rate", 0], 2, "--request-rate is 0.0: it must be above 0"),
        (["--goodput", "itl:3"], 2, "--goodput has 'itl:3'"),
        (["--metric-percentiles", "99,x"], 2, "--metric-percentiles is '99,x'"),
        (["--percentile-metrics", "ttft,x"], 2, "--percentile-metrics has 'x'"),
        (["--dataset-name", "custom"], 2, "name it with --dataset-path"),
        (["--base-url", "ftp://x"], 2, "--base-url is 'ftp://x'"),
        (["--port", 9, "--ready-check-timeout-sec", 0.4], 1, "no server at http://127.0.0.1:9/v1/models"),
        (["--port", 9, "--ready-check-timeout-sec", 0, "--model", "x", "--tokenizer", "/nowhere"], 2, "--tokenizer"),
    ):
        assert bench("serve", *arguments) == code
        *waits, line = capsys.readouterr().err.strip().splitlines()
        assert message in line, line
        assert len(waits) == (0.4 in arguments), waits  # there it says what it waits for


def test_a_dead_client_process_is_said(monkeypatch):
    monkeypatch.setattr(load.sys, "executable", "/bin/false")
    with pytest.raises(load.BenchError, match="ended before the start"):
        load.measure_load([Job(Target("127.0.0.1", 9, "/"), [])])


# ---- without a server ----


def test_bench_throughput_and_latency(root, tmp_path, capsys):
    engine = [root, "--engine-in-process", "--device", "cpu", "--cpu-threads", 1]
    path = tmp_path / "t.json"
    assert (
        bench("throughput", *engine, "--input-len", 20, "--output-len", 6, "--num-prompts", 7, "--output-json", path)
        == 0
    )
    result = json.loads(path.read_text())
    assert (result["num_requests"], result["num_prompt_tokens"], result["num_output_tokens"]) == (7, 140, 42)
    assert result["tokens_per_second"] == pytest.approx(182 / result["elapsed_time"])
    assert re.search(
        r"^Throughput: \S+ requests/s, \S+ total tokens/s, \S+ output tokens/s$", capsys.readouterr().out, re.M
    )
    path = tmp_path / "l.json"
    assert bench("latency", *engine, "--input-len", 5, "--output-len", 3, "--batch-size", 2, "--num-iters-warmup", 1,
                 "--num-iters", 3, "--output-json", path) == 0  # fmt: skip
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(statistics.fmean(result["latencies"]))
    assert result["percentiles"]["50"] == pytest.approx(statistics.median(result["latencies"]))
    assert "Avg latency: " in capsys.readouterr().out
    assert bench("throughput", *engine, "--input-len", 2000, "--num-prompts", 1) == 1
    assert "maximum context length" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_bench_startup_and_serve_with_a_real_server(root, tmp_path, capsys):
    path = tmp_path / "s.json"
    code = main(["bench", "startup", root, "--device", "cpu", "--cpu-threads", "1", "--num-iters-cold", "1",
                 "--num-iters-warmup", "0", "--num-iters-warm", "1", "--output-json", str(path)])  # fmt: skip
    assert code == 0
    result = json.loads(path.read_text())
    for one in (*result["cold"], *result["warm"]):
        assert 0 < one["health"] < one["first_token"] < 120
        assert 0 < sum(one["phases"].values()) < one["health"]
    assert "Command to first token (s):" in capsys.readouterr().out
    assert main(["bench", "startup", root + "-not-there", "--num-iters-warm", "0", "--num-iters-cold", "1"]) == 1
    assert "does not exist" in capsys.readouterr().err.splitlines()[-1]


def test_startup_gives_the_servers_flags_back():
    import argparse

    from vserve.server.cli.bench import startup

    parser = argparse.ArgumentParser()
    startup.add_arguments(parser)
    given = [
        "m",
        "--max-model-len",
        "64",
        "--no-enable-prefix-caching",
        "--enforce-eager",
        "--served-model-name",
        "a",
        "b",
    ]
    assert startup._flags(parser.parse_args(given)) == [
        "--max-model-len=64", "--no-enable-prefix-caching", "--enforce-eager", "--served-model-name", "a", "b",
    ]  # fmt: skip
    assert startup._get_status(Target("127.0.0.1", 9, "/")) is None  # nobody answers yet


def test_it_says_at_once_what_it_waits_for(capsys) -> None:
    began = time.monotonic()
    with pytest.raises(load.BenchError, match="no server at"):
        serve._listed_models(Target("127.0.0.1", 9, "/v1/completions"), began + 1.4)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, "once, however often it asks"
    assert re.match(r"vserve: waiting for http://127\.0\.0\.1:9/v1/models, for 1 s at most .*refused", said[0])
