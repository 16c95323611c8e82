"""What a plan came to: for the terminal, and as a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.errors import ConfigError
from .machine import gib

if TYPE_CHECKING:
    from ...engine.planning.load import Result, Wanted
    from ...engine.planning.setup import Setup

BAR = 30
_FORMATS = (".svg", ".json")
_VERDICTS = {None: "", True: "met", False: "not met"}
_MEASURES = (("ttft", "time to first token"), ("tpot", "time an output token"))
_COLOURS = {"p50": "#4c78a8", "p95": "#e45756"}
_WIDTH, _HEIGHT, _EDGE = 640, 240, 56  # of one of the pictures


def head(setup: Setup, architecture: str, name: str) -> None:
    known = "from its data sheet: expect 20 % either way"
    if setup.card.measured:
        known = "measured: off by 10 % at most on three models' loads"
    where, each = (f"{setup.cards} × {setup.card.name}", " a card") if setup.cards > 1 else (setup.card.name, "")
    print(
        f"{architecture} ({name}) on {where} ({known}){setup.options and ','}{setup.options}: weights "
        f"{gib(setup.weights)}{each}, cache {gib(setup.cache)}{each} = {setup.cache_tokens} tokens"
    )
    if setup.acceptance:
        most, held = len(setup.acceptance), sum(setup.acceptance)
        print(f"drafts: up to {most} of every request in a step, of which {held:.3g} are assumed to hold")


def row(setup: Setup, replicas: int, result: Result, wanted: Wanted) -> dict[str, Any]:
    return {
        "cards": setup.cards * replicas,
        "tensor_parallel_size": setup.ranks,
        "pipeline_parallel_size": len(setup.stages),
        "replicas": replicas,
        "rate": round(result.rate or len(result.answers) / result.seconds, 3),
        **{f"ttft_p{p}_ms": round(result.ttft(p / 100) * 1e3, 1) for p in (50, 95)},
        **{f"tpot_p{p}_ms": round(result.tpot(p / 100) * 1e3, 2) for p in (50, 95)},
        "output_tokens_per_second": round(result.output_rate, 1),
        "preemptions": result.num_preemptions,
        "met": wanted.held(result) if wanted.has_target else None,
    }


def table(rows: list[dict[str, Any]]) -> None:
    print("\ncards  as               requests/s  TTFT p50 / p95 ms   TPOT p50 / p95 ms   out tok/s  preempted")
    most = max(row["ttft_p95_ms"] for row in rows)
    for row in rows:
        bar = "#" * max(1, round(BAR * row["ttft_p95_ms"] / most))
        print(
            f"{row['cards']:5d}  {named(row):<15}  {row['rate']:10.3g}  "
            f"{row['ttft_p50_ms']:8.0f} / {row['ttft_p95_ms']:<8.0f} "
            f"{row['tpot_p50_ms']:8.1f} / {row['tpot_p95_ms']:<8.1f} {row['output_tokens_per_second']:10.0f}  "
            f"{row['preemptions']:9d}  {_VERDICTS[row['met']]:<8}{bar}"
        )


def named(row: dict[str, Any]) -> str:
    """By the options that make it: -tp 2 -dp 3."""
    sizes = (("tp", "tensor_parallel_size"), ("pp", "pipeline_parallel_size"), ("dp", "replicas"))
    return " ".join(f"-{short} {row[name]}" for short, name in sizes if row[name] > 1) or "-"


def check_output(path: Path) -> None:
    """Before anything is computed, which may take minutes. Raises ConfigError."""
    if path.suffix not in _FORMATS:
        raise ConfigError(
            f"--output {path}: what is computed is written as a picture, .svg, or as JSON, .json; let the name end so"
        )
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}; make it, or name another one")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--output {path} may not be written: name a file that you may write")


def write(path: Path, found: dict[str, Any]) -> None:
    """As JSON, or as a picture where the name ends with .svg. Raises ConfigError."""
    text = picture(found) if path.suffix == ".svg" else json.dumps(found, indent=1)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written ({error.strerror}): name another file") from None


def picture(found: dict[str, Any]) -> str:
    """SVG: both times by the rate where all rows are of the same cards, as around a knee, otherwise by the cards: of a
    trace or of requests that come alone rates differ too, as each fleet answers them."""
    rows = [row for row in found["rows"] if "rate" in row]
    by_rate = len(rows) > 1 and len({named(row) for row in rows}) == 1
    rows.sort(key=lambda row: row["rate" if by_rate else "cards"])
    ticks = [f"{row['rate']:.3g}/s" if by_rate else f"{row['cards']} ({named(row)})" for row in rows]
    parts = [_drawn(rows, ticks, *measure, top=index * _HEIGHT) for index, measure in enumerate(_MEASURES)]
    title = f"{_escaped(found['model'])} on {found['gpu']}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{len(parts) * _HEIGHT + 24}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{_EDGE}" y="16" font-weight="bold">{title}</text>{"".join(parts)}</svg>\n'
    )


def _drawn(rows: list[dict[str, Any]], ticks: list[str], measure: str, title: str, top: int) -> str:
    """One measure of all rows, as a line of each percentile."""
    highest = max(row[f"{measure}_p95_ms"] for row in rows) or 1.0
    left, bottom = _EDGE, top + _HEIGHT - 24
    width, height = _WIDTH - 2 * _EDGE, _HEIGHT - 80
    places = [left + width * (index / max(1, len(rows) - 1)) for index in range(len(rows))]
    found = [f'<text x="{left}" y="{top + 40}">{title}, ms</text>']
    for share in (0, 0.5, 1):
        y = bottom - height * share
        found.append(f'<path d="M{left} {y:.0f}H{left + width}" stroke="#ddd"/>')
        found.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{highest * share:.4g}</text>')
    for place, tick in zip(places, ticks, strict=True):
        found.append(f'<text x="{place:.0f}" y="{bottom + 16}" text-anchor="middle">{tick}</text>')
    for index, (percentile, colour) in enumerate(_COLOURS.items()):
        points = [
            f"{place:.1f},{bottom - height * row[f'{measure}_{percentile}_ms'] / highest:.1f}"
            for place, row in zip(places, rows, strict=True)
        ]
        found.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        found += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in (p.split(",") for p in points)]
        found.append(f'<text x="{left + width - 60 + 36 * index}" y="{top + 40}" fill="{colour}">{percentile}</text>')
    return "".join(found)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
