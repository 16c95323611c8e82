"""What the tests of each folder may cost: python tests/budgets.py test|test-all REPORT.xml …, as the Makefile calls it.

The reports are pytest's (--junitxml) of all runs of that target; a test's time is that of its set-up, itself and its
end, in whatever process. budgets.toml holds the seconds. Prints used and allowed; exit code 1 where a folder took more
than 1.5 times its budget, for machines differ, or all together more than 1.5 times the target's minutes. Part of the
tests, run by hand, is judged by nobody.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BUDGETS = Path(__file__).with_name("budgets.toml")
TOLERANCE = 1.5


def read_reports(paths: Iterable[Path]) -> tuple[dict[str, float], float]:
    """→ seconds by folder, added over processes, and seconds from the first test to the last, run by run."""
    seconds: defaultdict[str, float] = defaultdict(float)
    elapsed = 0.0
    for path in paths:
        for suite in ElementTree.parse(path).iter("testsuite"):
            elapsed += float(suite.attrib["time"])
            for test in suite.iter("testcase"):  # tests.server.test_mailbox, or tests.test_rooms
                _, folder, *_ = test.attrib["classname"].split(".")
                seconds["." if folder.startswith("test_") else folder] += float(test.attrib["time"])
    return dict(seconds), elapsed


def judge(
    seconds: Mapping[str, float], elapsed: float, budgets: Mapping[str, float], minutes: float
) -> tuple[list[str], list[str]]:
    """→ the table's lines, and what is wrong."""
    lines, wrong = [f"{'tests of':<18}{'used, s':>10}{'allowed, s':>12}"], []
    for folder in sorted({*seconds, *budgets}):
        used, allowed = seconds.get(folder, 0.0), budgets.get(folder, 0.0)
        lines.append(f"{folder:<18}{used:>10.0f}{allowed:>12.0f}{'  above it' if used > allowed else ''}")
        if folder not in budgets:
            wrong.append(f"the tests of {folder} have no budget: give them one in {BUDGETS.name}")
        elif used > TOLERANCE * allowed:
            wrong.append(
                f"the tests of {folder} took {used:.0f} s, more than {TOLERANCE} times the {allowed:.0f} s that "
                f"{BUDGETS.name} allows: make them faster, or others, and change the budget"
            )
    late = "  above it" if elapsed > 60 * minutes else ""
    lines.append(f"{'all, by the clock':<18}{elapsed:>10.0f}{60 * minutes:>12.0f}{late}")
    if elapsed > TOLERANCE * 60 * minutes:
        wrong.append(
            f"all tests took {elapsed / 60:.1f} minutes, more than {TOLERANCE} times the {minutes:g} that "
            f"{BUDGETS.name} allows: make some faster"
        )
    return lines, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=("test", "test-all"))
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--budgets", type=Path, default=BUDGETS)
    args = parser.parse_args()
    said: dict[str, Any] = tomllib.loads(args.budgets.read_text())
    target = said[args.target]
    lines, wrong = judge(*read_reports(args.reports), target["seconds"], target["minutes"])
    print("\n".join([*lines, *(f"FAILED: {why}" for why in wrong)]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
