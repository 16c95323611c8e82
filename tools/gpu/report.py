"""What was measured so far: a table for people, and a file with everything, written anew after each run."""

from __future__ import annotations

import functools
import json
import os
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from processes import COUNTERS

HEAD = ("workload", "figure", "target", "median", "runs", "events/token", *COUNTERS, "API µs/token")


@dataclass(frozen=True)
class Figure:
    """A number in the JSON of `vserve bench`."""

    label: str
    key: str  # with dots where it lies deeper
    target: float | None = None
    more_is_better: bool = False

    def aims(self, target: float) -> Figure:
        return replace(self, target=target)

    def value(self, run: dict[str, Any]) -> float:
        found: float = functools.reduce(lambda level, name: level[name], self.key.split("."), run["bench"])
        return found

    def reached(self, value: float) -> bool:
        if self.target is None:
            return False
        return value >= self.target if self.more_is_better else value <= self.target


@dataclass
class Row:
    name: str
    mode: str  # "default" or a preset
    title: str
    figures: tuple[Figure, ...]
    runs: list[dict[str, Any]] = field(default_factory=list)

    def lines(self) -> list[list[str]]:
        """Cells under HEAD, a line for each figure."""
        title = self.title if self.mode == "default" else f"{self.title} (--performance-mode {self.mode})"
        lines = []
        for figure in self.figures:
            values = [figure.value(run) for run in self.runs]
            median = statistics.median(values) if values else None
            text = "not measured" if median is None else number(median)
            if median is not None and figure.reached(median):
                text = f"**{text}**"
            target = "" if figure.target is None else number(figure.target)
            lines.append([title, figure.label, target, text, " ".join(map(number, values))])
        lines[0] += self._of_the_server()
        return [line + [""] * (len(HEAD) - len(line)) for line in lines]

    def _of_the_server(self) -> list[str]:
        """The last cells, where there was one: it was watched, whatever the figure."""
        runs = [run for run in self.runs if "counters" in run]
        if not runs:
            return []
        events = " ".join(f"{run['bench']['sse_events_per_token']:.2f}" for run in runs)
        sums = [f"{sum(run['counters'][name] for run in runs):.0f}" for name in COUNTERS]
        return [events, *sums, number(statistics.median(run["api_us_per_token"] for run in runs))]


class Report:
    def __init__(self, output: Path | None, about: dict[str, Any]) -> None:
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self._output = output
        self._about = about
        self._servers: dict[str, list[dict[str, Any]]] = {}
        self._save()  # a file that cannot be written is known before anything is measured

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def started(self, mode: str, start: dict[str, Any]) -> None:
        self._servers.setdefault(mode, []).append(start)
        print(f"server ({mode}): ready after {start['ready']:.2f} s, first token after {start['first_token']:.2f} s")
        for phase, seconds in start["phases"].items():
            print(f"  {phase:<20} {seconds:6.2f} s")
        print(f"  {'imports, processes':<20} {start['ready'] - sum(start['phases'].values()):6.2f} s", flush=True)
        self._save()

    def ran(self, row: Row, run: dict[str, Any]) -> None:
        row.runs.append(run)
        values = ", ".join(f"{figure.label} {number(figure.value(run))}" for figure in row.figures)
        print(f"{row.name} ({row.mode}), run {len(row.runs)}: {values}", flush=True)
        self._save()

    def failed(self, what: str, error: Exception) -> None:
        self.failures.append(f"{what}: {error}")
        print(f"{what} failed: {error}", flush=True)
        self._save()

    def table(self) -> str:
        """Markdown, the modes of a workload below each other."""
        names = list(dict.fromkeys(row.name for row in self.rows))
        rows = sorted(self.rows, key=lambda row: names.index(row.name))
        lines = [list(HEAD), ["---"] * len(HEAD), *(line for row in rows for line in row.lines())]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _save(self) -> None:
        if self._output is None:
            return
        content = self._about | {
            "table": self.table().splitlines(),
            "failures": self.failures,
            "servers": self._servers,
            "rows": [asdict(row) for row in self.rows],
        }
        self._output.parent.mkdir(parents=True, exist_ok=True)
        new = self._output.with_name(self._output.name + ".new")
        new.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(new, self._output)  # at no moment is there half a file


def number(value: float) -> str:
    """Four digits and no more."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.4g}"
