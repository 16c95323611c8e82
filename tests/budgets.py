"""What the tests of each folder may cost: python tests/budgets.py test|test-all REPORT.xml …, as the Makefile calls it.

The reports are pytest's (--junitxml) of all runs of that target; a test's time is that of its set-up, itself and its
end, in whatever process. budgets.toml holds the seconds. Prints used and allowed; exit code 1 where a folder took more
than 1.5 times its budget, for machines differ, or all together more than 1.5 times the target's minutes. Part of the
tests, run by hand, is judged by nobody.

`--pace FILE`: seconds of the same bit of work, which each file of tests has done (conftest.py). A machine that takes
twice as long for that as the one that the budgets are of, may take twice as long for the tests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BUDGETS = Path(__file__).with_name("budgets.toml")
TOLERANCE = 1.5
PACE = 0.009  # seconds of that bit of work where the budgets were measured


def read_reports(paths: Iterable[Path]) -> tuple[dict[str, float], float]:
    """→ seconds by folder, added over processes, and seconds from the first test to the last, run by run."""
    seconds: defaultdict[str, float] = defaultdict(float)
    elapsed = 0.0
    for path in paths:
        for suite in ElementTree.parse(path).iter("testsuite"):
            elapsed += float(suite.attrib["time"])
            for test in suite.iter("testcase"):  # tests.server.test_mailbox, or tests.test_rooms
                if "classname" not in test.attrib:  # it was tried once, and the run broken off
                    continue
                _, folder, *_ = test.attrib["classname"].split(".")
                seconds["." if folder.startswith("test_") else folder] += float(test.attrib["time"])
    return dict(seconds), elapsed


def read_pace(path: Path | None) -> float:
    """How many times as long as there this machine took, in the median; at least once."""
    if path is None or not path.exists():
        return 1.0
    return max(1.0, statistics.median(map(float, path.read_text().split())) / PACE)


def judge(
    seconds: Mapping[str, float], elapsed: float, budgets: Mapping[str, float], minutes: float, pace: float
) -> tuple[list[str], list[str]]:
    """→ the table's lines, and what is wrong. pace: see read_pace."""
    most = TOLERANCE * pace
    how = f"{TOLERANCE} times" if pace == 1 else f"{TOLERANCE} times (and {pace:.1f} times, for the machine is slow)"
    lines, wrong = [f"{'tests of':<18}{'used, s':>10}{'allowed, s':>12}"], []
    for folder in sorted({*seconds, *budgets}):
        used, allowed = seconds.get(folder, 0.0), budgets.get(folder, 0.0)
        lines.append(f"{folder:<18}{used:>10.0f}{allowed:>12.0f}{'  above it' if used > allowed else ''}")
        if folder not in budgets:
            wrong.append(f"the tests of {folder} have no budget: give them one in {BUDGETS.name}")
        elif used > most * allowed:
            wrong.append(
                f"the tests of {folder} took {used:.0f} s, more than {how} the {allowed:.0f} s that "
                f"{BUDGETS.name} allows: make them faster, or others, and change the budget"
            )
    late = "  above it" if elapsed > 60 * minutes else ""
    lines.append(f"{'all, by the clock':<18}{elapsed:>10.0f}{60 * minutes:>12.0f}{late}")
    if elapsed > most * 60 * minutes:
        wrong.append(
            f"all tests took {elapsed / 60:.1f} minutes, more than {how} the {minutes:g} that "
            f"{BUDGETS.name} allows: make some faster"
        )
    return lines, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=("test", "test-all"))
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--budgets", type=Path, default=BUDGETS)
    parser.add_argument("--pace", type=Path)
    args = parser.parse_args()
    said: dict[str, Any] = tomllib.loads(args.budgets.read_text())
    target = said[args.target]
    pace = read_pace(args.pace)
    lines, wrong = judge(*read_reports(args.reports), target["seconds"], target["minutes"], pace)
    lines += [f"this machine took {pace:.1f} times as long as the one that the budgets are of"] if pace > 1 else []
    print("\n".join([*lines, *(f"FAILED: {why}" for why in wrong)]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
