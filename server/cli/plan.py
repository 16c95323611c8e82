"""how many cards with a copy of a model each hold a load: the real scheduler under a virtual clock, without cards"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.config import ConfigError, EngineConfig
from .flags import add_flags, read_flags
from .machine import gib

if TYPE_CHECKING:
    from ...engine.planning import Result, Setup, Wanted
    from ...engine.simulation import Ask
    from ...engine.step_model import Costs

EXAMPLES = (
    "vserve plan Qwen/Qwen3-8B --gpu h200 --rate 20 --in 1024 --out 256 --ttft 500 --tpot 40",
    "vserve plan ./my-model --gpu h100 --trace requests.jsonl --replicas 2",
)
_ENGINE = (
    "model", "revision", "max_model_len", "dtype", "gpu_memory_utilization", "kv_cache_memory_bytes", "quantization",
    "kv_cache_dtype", "calculate_kv_scales", "max_num_batched_tokens", "max_num_seqs", "max_mixed_tokens", "block_size",
    "speculative_config", "tensor_parallel_size", "pipeline_parallel_size",
)  # fmt: skip
BAR = 40
_VERDICTS = {None: "", True: "met", False: "not met"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig, only=_ENGINE)
    group = parser.add_argument_group("plan")

    def add(name: str, text: str, **options: Any) -> None:
        group.add_argument(name, help=text, **options)

    number, whole = {"type": _above(float), "metavar": "N"}, {"type": _above(int), "metavar": "N"}
    cards = "h200 (measured), h100, h20, a100, l40s, l4, b200 (from data sheets)"
    add("--gpu", f"the card: {cards}; default: h200", default="h200", metavar="NAME")
    add("--rate", "requests a second", **number)
    add("--in", "tokens of a prompt (default: 1024)", default=1024, dest="num_prompt", **whole)
    add("--out", "tokens of an answer (default: 256)", default=256, dest="num_output", **whole)
    add("--ttft", "time to first token that 95 of 100 requests must not exceed", type=_above(float), metavar="MS")
    add("--tpot", "time an output token that 95 of 100 must not exceed", type=_above(float), metavar="MS")
    add("--replicas", "so many, instead of as many as are needed", **whole)
    add("--trace", "JSON lines with timestamp (ms), input_length and output_length, instead of --rate", metavar="FILE")
    add("--fit", "a vserve server with this model on such a card: its last steps, under a load like --in and --out, "
        "correct the numbers of the card", metavar="URL")  # fmt: skip
    add("--output", "also write what was computed, as JSON", metavar="FILE")


def _above(kind: type) -> Any:
    def read(text: str) -> float:
        value = kind(text)
        if not 0 < value < 1e9:
            raise argparse.ArgumentTypeError(f"{text}: a number above 0 and below 1e9 belongs here")
        return float(value) if kind is float else value

    read.__name__ = "number"
    return read


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 where the plan was made, 1 where the model does not fit or nothing meets what is wanted, 2 for a wrong
    option."""
    try:
        engine, _ = read_flags(arguments)
        return _plan(arguments, engine)
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2


def _plan(arguments: argparse.Namespace, engine: EngineConfig) -> int:
    from ...engine.model_file import ModelError
    from ...engine.model_source import resolve_model_path
    from ...engine.overrides import read_model_config
    from ...engine.planning import Wanted, replay, set_up, stored_bytes
    from ...engine.step_model import CARDS

    if (card := CARDS.get(arguments.gpu.lower())) is None:
        raise ConfigError(f"--gpu {arguments.gpu}: there are numbers of {', '.join(CARDS)}; choose the nearest")
    if engine.world_size > 1:
        raise ConfigError(
            f"{engine.divided_by}: plans are of copies on one card each, as there are no measured times of what cards "
            "tell each other: leave it out, and measure a divided model with `vserve bench serve`"
        )
    if arguments.rate is None and arguments.trace is None and arguments.ttft is None and arguments.tpot is None:
        raise ConfigError("say what is asked: --rate (requests a second), --trace, or --ttft and --tpot for the knee")
    try:
        folder = resolve_model_path(engine.model, engine.revision, engine.download_dir, "dummy")
        model = read_model_config(folder, engine)
        setup = set_up(stored_bytes(folder), model, engine, card, _fitted(arguments, engine, model, card))
        _head(setup, model.architecture, engine.model)
        wanted = Wanted(_seconds(arguments.ttft), _seconds(arguments.tpot))
        if arguments.trace is not None:
            result = replay(setup, read_trace(Path(arguments.trace)), arguments.replicas or 1)
            rows, code = [_row(arguments.replicas or 1, result, wanted)], 0
            _table(rows)
        else:
            rows, code = _search(setup, wanted, arguments)
    except (ModelError, ConfigError) as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    if arguments.output:
        Path(arguments.output).write_text(json.dumps({"gpu": card.name, "model": engine.model, "rows": rows}, indent=1))
    return code


def _search(setup: Setup, wanted: Wanted, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    from ...engine.planning import MOST_REPLICAS, knee, steady

    size = arguments.num_prompt, arguments.num_output
    rows: list[dict[str, Any]] = []
    best = knee(setup, wanted, *size) if wanted.ttft or wanted.tpot else None
    if wanted.ttft or wanted.tpot:
        if best is None:
            slow = steady(setup, 0.01, *size, seconds=2000)
            _table([_row(1, slow, wanted)])
            print("\nno rate meets this on one card, not even one request at a time: take a faster card, or more time")
            return rows, 1
        print(f"one card holds {best.rate:.3g} requests a second ({best.output_rate:.0f} output tokens a second)")
    if arguments.rate is None:
        assert best is not None, "one of them was given"
        rows = [_row(1, steady(setup, best.rate * share, *size), wanted) for share in (0.25, 0.5, 0.75, 1.0, 1.1, 1.25)]
        _table(rows)
        return rows, 0
    first = arguments.replicas or (max(1, int(arguments.rate / best.rate)) if best else 1)
    last = first if arguments.replicas else 2 * first + 2
    if last > MOST_REPLICAS:
        raise ConfigError(
            f"--rate {arguments.rate:g} needs some {first} cards: at most {MOST_REPLICAS} are computed; ask for a "
            "smaller rate"
        )
    found = None
    for replicas in range(first, last + 1):
        result = steady(setup, arguments.rate, *size, replicas)
        rows.append(_row(replicas, result, wanted))
        if arguments.replicas or (wanted.met(result) and result.keeps_up):
            found = replicas
            break
    _table(rows)
    if found is None:
        print("\nnone of these meets what is wanted")
        return rows, 1
    if found > 1:
        left = steady(setup, arguments.rate, *size, found - 1)
        rows.append({"one_dies": _row(found - 1, left, wanted)})
        verdict = "still" if wanted.met(left) else "no longer"
        print(
            f"\nwith one of them dead, the load {verdict} meets it: TTFT p95 {left.ttft(0.95) * 1e3:.0f} ms, "
            f"TPOT p95 {left.tpot(0.95) * 1e3:.1f} ms"
        )
    told = " --spec-method ngram" if setup.acceptance else ""
    if not arguments.replicas:
        print(f"\nvserve {arguments.model or 'MODEL'}" + (f" -dp {found}" if found > 1 else "") + told)
    return rows, 0


def _head(setup: Setup, architecture: str, name: str) -> None:
    known = "measured" if setup.card.measured else "from its data sheet: expect 20 % either way"
    print(
        f"{architecture} ({name}) on {setup.card.name} ({known}): weights {gib(setup.weights)}, cache "
        f"{gib(setup.cache)} = {setup.cache_tokens} tokens"
    )
    if setup.acceptance:
        most, held = len(setup.acceptance), sum(setup.acceptance)
        print(f"drafts: up to {most} of every request in a step, of which {held:.3g} are assumed to hold")


def _row(replicas: int, result: Result, wanted: Wanted) -> dict[str, Any]:
    return {
        "replicas": replicas,
        "rate": round(result.rate or len(result.answers) / result.seconds, 3),
        **{f"ttft_p{p}_ms": round(result.ttft(p / 100) * 1e3, 1) for p in (50, 95)},
        **{f"tpot_p{p}_ms": round(result.tpot(p / 100) * 1e3, 2) for p in (50, 95)},
        "output_tokens_per_second": round(result.output_rate, 1),
        "preemptions": result.num_preemptions,
        "met": wanted.met(result) if wanted.ttft or wanted.tpot else None,
    }


def _table(rows: list[dict[str, Any]]) -> None:
    print("\ncards  requests/s  TTFT p50 / p95 ms   TPOT p50 / p95 ms   out tok/s  preempted")
    most = max(row["ttft_p95_ms"] for row in rows)
    for row in rows:
        bar = "#" * max(1, round(BAR * row["ttft_p95_ms"] / most))
        print(
            f"{row['replicas']:5d}  {row['rate']:10.3g}  {row['ttft_p50_ms']:8.0f} / {row['ttft_p95_ms']:<8.0f} "
            f"{row['tpot_p50_ms']:8.1f} / {row['tpot_p95_ms']:<8.1f} {row['output_tokens_per_second']:10.0f}  "
            f"{row['preemptions']:9d}  {_VERDICTS[row['met']]:<8}{bar}"
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def read_trace(path: Path) -> list[Ask]:
    """Raises ConfigError."""
    from ...engine.simulation import Ask

    asks = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            ask = Ask(float(entry["timestamp"]) / 1e3, int(entry["input_length"]), int(entry["output_length"]))
            if ask.num_prompt < 1 or ask.num_output < 1 or ask.arrival < 0:
                raise ValueError("lengths are at least 1, timestamps at least 0")
        except (ValueError, KeyError, TypeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ConfigError(
                f"--trace {path}, line {number}: {what}; a line is "
                '{"timestamp": 27.5, "input_length": 1024, "output_length": 256}'
            ) from None
        asks.append(ask)
    if not asks:
        raise ConfigError(f"--trace {path} has no requests: give a file with a JSON object a line")
    return asks


def _fitted(arguments: argparse.Namespace, engine: EngineConfig, model: Any, card: Any) -> Costs | None:
    if arguments.fit is None:
        return None
    import httpx

    from ...engine.planning import fit, set_up

    try:
        answer = httpx.get(f"{arguments.fit.rstrip('/')}/server_info?steps=1024", timeout=30)
        answer.raise_for_status()
        steps = answer.json()["steps"]
    except (httpx.HTTPError, ValueError, KeyError) as failure:
        raise ConfigError(
            f"--fit {arguments.fit}: {failure}; name a vserve server that has answered requests"
        ) from None
    context = arguments.num_prompt + arguments.num_output // 2
    costs, error, count = fit(set_up(0, model, engine, card).model, steps, context)
    print(f"fitted on {count} steps: products × {costs.products:.2f}, weights × {costs.weights:.2f}, a step "
          f"{costs.step * 1e6:.0f} µs; on as many others the median error is {100 * error:.1f} %")  # fmt: skip
    return costs
