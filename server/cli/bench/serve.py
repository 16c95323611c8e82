"""measure a running server over HTTP"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ....engine.errors import ConfigError
from . import datasets
from .arrivals import arrival_times
from .client import Job, Target, TimedRequest, run_job
from .datasets import PROBE, BenchPrompt, Vocabulary
from .drafts import read_counts
from .event_stream import StreamResult, error_message
from .load import BenchError, measure_load, share_out, warn_of_slow_clients, write_json
from .report import TITLES, measure, print_report, to_json

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}


EXAMPLES = (
    "vserve bench serve --num-prompts 100 --request-rate 4",
    "vserve bench serve --base-url http://host:8000 --max-concurrency 16 --random-input-len 1024",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=sorted(ENDPOINTS), default="openai",
                        help="openai, vllm: completions; openai-chat: chat completions (default: openai)")  # fmt: skip
    server.add_argument("--base-url", metavar="URL", help="server, where not http://HOST:PORT")
    server.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="(default: 8000)")
    server.add_argument("--endpoint", metavar="PATH", help="(default: the backend's)")
    server.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE", help="sent with each request")
    server.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that the server lists)")
    server.add_argument("--lora-modules", nargs="+", metavar="NAME", help="adapters: requests ask for them in turns, "
                        "not for the model")  # fmt: skip
    server.add_argument("--tokenizer", metavar="NAME", help="folder or hub name of the tokenizer that gives random "
                        "prompts their vocabulary (default: the model's)")  # fmt: skip
    server.add_argument("--ready-check-timeout-sec", type=float, default=600, metavar="S",
                        help="wait so long for the server to answer; 0: do not check (default: 600)")  # fmt: skip
    datasets.add_arguments(parser, num_prompts=1000)
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=math.inf, metavar="X",
                      help="requests per second; inf: all at once (default: inf)")  # fmt: skip
    load.add_argument("--burstiness", type=float, default=1.0, metavar="X", help="shape of the gaps' gamma "
                      "distribution: 1 is Poisson, less has bursts (default: 1)")  # fmt: skip
    load.add_argument("--max-concurrency", type=int, metavar="N", help="most requests at a time, shared evenly by the "
                      "client processes (default: no limit)")  # fmt: skip
    load.add_argument("--num-clients", type=int, metavar="N",
                      help="client processes (default: 4, or the number of cores where that is less)")  # fmt: skip
    load.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests before the measurement")
    load.add_argument("--retry-timeout-sec", type=float, default=600, metavar="S", help="a request that a busy server "
                      "refuses (429, 503) is sent again when its Retry-After says, for so long; what it waits counts "
                      "as time to its first token; 0: it has failed (default: 600)")  # fmt: skip
    load.add_argument("--seed", type=int, metavar="N", help="of prompts and arrivals (default: another in each run)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--ignore-eos", action="store_true", help="generate until the output length")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0, greedy)")
    sampling.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON",
                          help="further fields of each request; they replace those of the same name")  # fmt: skip
    results = parser.add_argument_group("results")
    results.add_argument("--percentile-metrics", default="ttft,tpot,itl", metavar="LIST",
                         help="of ttft, tpot, itl, e2el (default: ttft,tpot,itl)")  # fmt: skip
    results.add_argument("--metric-percentiles", default="99", metavar="LIST", help="as in 25,50,99 (default: 99)")
    results.add_argument("--goodput", nargs="+", metavar="NAME:MS",
                         help="count requests that meet all of these: ttft, tpot, e2el in ms")  # fmt: skip
    results.add_argument("--save-result", action="store_true", help="write the results as JSON")
    results.add_argument("--save-detailed", action="store_true", help="with --save-result: also of each request")
    results.add_argument("--result-dir", type=Path, default=Path(), metavar="DIR")
    results.add_argument("--result-filename", metavar="FILE")
    results.add_argument("--metadata", nargs="*", default=[], metavar="NAME=VALUE", help="kept with the results")
    results.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    try:
        return _run(arguments)
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    except BenchError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    shown, percentiles, limits = _check(arguments)
    metadata = _pairs(arguments.metadata, "--metadata")
    target = _target(arguments)
    checking = arguments.ready_check_timeout_sec > 0
    deadline = time.monotonic() + arguments.ready_check_timeout_sec
    model, root = arguments.model, None
    if model is None or checking:
        listed = _listed_models(target, deadline)
        model = model or listed[0]["id"]
        root = next((entry.get("root") for entry in listed if entry["id"] == model), None)
    vocabulary = None
    if arguments.dataset_name != "custom":
        local = next((name for name in (model, root) if name and Path(name).is_dir()), None)
        vocabulary = Vocabulary.load(arguments.tokenizer or local or root or model)
    rng = np.random.default_rng(arguments.seed)
    dataset = datasets.make_dataset(arguments, rng, vocabulary, text=arguments.backend == "openai-chat")

    names = itertools.cycle(arguments.lora_modules or [model])

    def body(prompt: BenchPrompt) -> dict[str, Any]:
        return _body(arguments, next(names), prompt)

    if checking:
        # Words of its own: a prompt of the run would be in the server's prefix cache afterwards.
        _probe(target, body(BenchPrompt(PROBE, 1)), deadline)
    prompts = dataset.sample(arguments.num_prompts)
    if arguments.num_warmups:
        warm = [TimedRequest(i, 0.0, body(prompt)) for i, prompt in enumerate(dataset.sample(arguments.num_warmups))]
        warm_up = Job(target, warm, arguments.max_concurrency, arguments.retry_timeout_sec)
        report = asyncio.run(run_job(warm_up, time.monotonic(), lambda result: None))
        if errors := [result.error for result in report.results if result.error]:
            raise BenchError(f"{len(errors)} of {len(warm)} warm-up requests failed: {errors[0]}")
    arrivals = arrival_times(len(prompts), arguments.request_rate, arguments.burstiness, rng)
    requests = [TimedRequest(i, at, body(prompt)) for i, (at, prompt) in enumerate(zip(arrivals, prompts, strict=True))]
    jobs = share_out(target, requests, arguments.num_clients, arguments.max_concurrency, arguments.retry_timeout_sec)
    before = read_counts(target)
    start, reports = measure_load(jobs, progress=not arguments.disable_tqdm)
    drafts = read_counts(target).since(before)
    results = sorted((result for report in reports for result in report.results), key=lambda result: result.index)
    metrics = measure(results, [prompt.num_tokens for prompt in prompts], start, limits)
    rate = None if math.isinf(arguments.request_rate) else arguments.request_rate
    print_report(metrics, shown, percentiles, rate=rate, max_concurrency=arguments.max_concurrency)
    if drafts.drafts > 0:
        drafts.report()
    warn_of_slow_clients(reports)
    if arguments.save_result:
        content = {
            "date": datetime.now().strftime("%Y%m%d-%H%M%S"), "backend": arguments.backend, "model_id": model,
            "tokenizer_id": arguments.tokenizer or root or model, "num_prompts": len(prompts),
            "request_rate": rate or "inf", "burstiness": arguments.burstiness,
            "max_concurrency": arguments.max_concurrency, "num_clients": len(jobs), "seed": arguments.seed,
            **metadata, **to_json(metrics, shown, percentiles), **(drafts.to_json() if drafts.drafts > 0 else {}),
        }  # fmt: skip
        if arguments.save_detailed:
            content |= _details(results, [prompt.num_tokens for prompt in prompts], start)
        name = arguments.result_filename or "{backend}-{rate}qps-{model}-{date}.json".format(
            backend=arguments.backend, rate=rate or "inf", model=Path(model).name, date=content["date"]
        )
        write_json(arguments.result_dir / name, content)
    return 1 if metrics.errors else 0


# ---- options ----


def _check(arguments: argparse.Namespace) -> tuple[list[str], list[float], dict[str, float] | None]:
    """(metrics to show, percentiles, limits of a good request in seconds). Raises ConfigError."""
    datasets.check(arguments)
    for name, least in (("num_clients", 1), ("max_concurrency", 1), ("num_warmups", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be at least {least}")
    if not arguments.retry_timeout_sec >= 0:
        raise ConfigError(f"--retry-timeout-sec is {arguments.retry_timeout_sec}: it must be at least 0")
    for name in ("request_rate", "burstiness"):
        if not getattr(arguments, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: it must be above 0")
    if not isinstance(arguments.extra_body, dict):
        raise ConfigError(f"--extra-body is {json.dumps(arguments.extra_body)}: it must be a JSON object")
    shown = [name for name in arguments.percentile_metrics.split(",") if name]
    if unknown := [name for name in shown if name not in TITLES]:
        raise ConfigError(f"--percentile-metrics has {unknown[0]!r}: choose from {', '.join(TITLES)}")
    try:
        percentiles = [float(percentile) for percentile in arguments.metric_percentiles.split(",")]
        if not all(0 <= percentile <= 100 for percentile in percentiles):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--metric-percentiles is {arguments.metric_percentiles!r}: give numbers from 0 to 100, as in 50,99"
        ) from None
    if arguments.goodput is None:
        return shown, percentiles, None
    limits = {}
    for item in arguments.goodput:
        name, _, value = item.partition(":")
        try:
            limits[name] = float(value) / 1000
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput has {item!r}: give ttft, tpot or e2el and milliseconds, as in ttft:200")
    return shown, percentiles, limits


def _pairs(items: Sequence[str], name: str) -> dict[str, str]:
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"{name} has {item!r}: write NAME=VALUE")
        pairs[key] = value
    return pairs


def _target(arguments: argparse.Namespace) -> Target:
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    base = arguments.base_url or f"http://{host}:{arguments.port}"
    try:
        url = urllib.parse.urlsplit(base if "://" in base else f"http://{base}")
        port = url.port
    except ValueError:
        port, url = None, urllib.parse.urlsplit("")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"--base-url is {base!r}: give the server's address, as in http://127.0.0.1:8000")
    path = arguments.endpoint or ENDPOINTS[arguments.backend]
    headers = _pairs(arguments.header, "--header")
    if key := os.environ.get("OPENAI_API_KEY"):
        headers.setdefault("authorization", f"Bearer {key}")
    return Target(
        url.hostname, port or (443 if url.scheme == "https" else 80), url.path.rstrip("/") + "/" + path.lstrip("/"),
        url.scheme == "https", headers,
    )  # fmt: skip


def _body(arguments: argparse.Namespace, model: str, prompt: BenchPrompt) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model, "temperature": arguments.temperature, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    messages = isinstance(prompt.prompt, list) and isinstance(prompt.prompt[0], dict)
    if arguments.backend == "openai-chat":
        if isinstance(prompt.prompt, list) and not messages:
            raise ConfigError("openai-chat takes no token ids: use --backend openai for this file")
        body["messages"] = prompt.prompt if messages else [{"role": "user", "content": prompt.prompt}]
        body["max_completion_tokens"] = prompt.output_len
    else:
        if messages:
            raise ConfigError("the file has chat messages: use --backend openai-chat")
        body["prompt"] = prompt.prompt
        body["max_tokens"] = prompt.output_len
    if arguments.ignore_eos:
        body["ignore_eos"] = True
    return body | arguments.extra_body


# ---- before the run ----


def _listed_models(target: Target, deadline: float) -> list[dict[str, Any]]:
    """GET /v1/models, until it answers. Raises BenchError."""
    prefix = target.path.partition("/v1/")[0] if "/v1/" in target.path else ""
    host = f"[{target.host}]" if ":" in target.host else target.host
    url = f"{'https' if target.tls else 'http'}://{host}:{target.port}{prefix}/v1/models"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # nor do the clients ask a proxy
    told = False
    while True:
        try:
            with opener.open(urllib.request.Request(url, headers=target.headers), timeout=30) as response:
                listed: list[dict[str, Any]] = json.load(response)["data"]
                if not listed:
                    raise BenchError(f"{url} lists no model: name one with --model")
                return listed
        except urllib.error.HTTPError as error:
            cause = f"HTTP {error.code}: {error_message(error.read())}"
            if error.code < 500:
                raise BenchError(f"{url} answers {cause}; name the model with --model") from None
        except (OSError, ValueError, KeyError) as error:
            cause = str(getattr(error, "reason", error)) or type(error).__name__
        if time.monotonic() > deadline:
            raise BenchError(f"no server at {url} ({cause}): start it, or say where it is with --host and --port")
        if not told:
            left = f"for {deadline - time.monotonic():.0f} s at most (--ready-check-timeout-sec)"
            print(f"vserve: waiting for {url}, {left}: {cause}", file=sys.stderr, flush=True)
            told = True
        time.sleep(0.5)


def _probe(target: Target, body: dict[str, Any], deadline: float) -> None:
    """One request, until it succeeds. Raises BenchError, at once for what waiting does not mend."""
    body = {name: value for name, value in body.items() if name not in ("ignore_eos", "min_tokens")}  # one is enough
    while True:
        timeout = max(1.0, deadline - time.monotonic())
        job = Job(target, [TimedRequest(0, 0.0, body)], patience=timeout)
        try:
            probe = run_job(job, time.monotonic(), lambda result: None)
            (result,) = asyncio.run(asyncio.wait_for(probe, timeout)).results
            error = result.error
        except TimeoutError:
            error = f"no answer in {timeout:.0f} s"
        if error is None:
            return
        if error.startswith("HTTP 4") or time.monotonic() > deadline:
            raise BenchError(f"the test request failed: {error}")
        time.sleep(0.5)


# ---- results ----


def _details(results: Sequence[StreamResult], prompt_lengths: Sequence[int | None], start: float) -> dict[str, Any]:
    """Lists with one entry a request, in vLLM's names; seconds."""
    return {
        "input_lens": [length if r.prompt_tokens is None else r.prompt_tokens
                       for r, length in zip(results, prompt_lengths, strict=True)],
        "output_lens": [r.output_tokens for r in results],
        "start_times": [r.start - start for r in results],
        "ttfts": [r.ttft if r.stamps else None for r in results],
        "itls": [r.itls for r in results],
        "request_errors": [r.error or "" for r in results],
    }  # fmt: skip
