"""Regular expressions of an adapter's configuration, matched by a process of its own: one that backtracks without end
holds the interpreter's lock for as long, and no step would run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

LONGEST_PATTERN = 1000  # characters
SECONDS = 1  # of the processor; a good one takes a thousandth for all names of a model
_PATIENCE = 60.0  # seconds in all, on a machine that has other things to do
_PLAIN = re.compile(r"[\w.\\-]*")  # takes no time
_PROGRAM = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
expressions, names = json.load(sys.stdin)
json.dump([[name for name in names if re.fullmatch(each, name)] for each in expressions], sys.stdout)
"""


class PatternError(ValueError):
    """One line: which, and why."""


def check_pattern(pattern: str) -> None:
    """Raises PatternError."""
    if len(pattern) > LONGEST_PATTERN:
        raise PatternError(f"a regular expression of {len(pattern)} characters: {LONGEST_PATTERN} fit")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"{pattern[:60]!r}, which is no regular expression ({error})") from None


def matching(patterns: Sequence[str], names: Sequence[str], *, ends: bool = False) -> list[list[str]]:
    """Of each pattern the names that it matches whole, or, with `ends`, whose last parts it does. Raises
    PatternError."""
    expressions = [rf"(.*\.)?({pattern})" if ends else pattern for pattern in patterns]
    if all(_PLAIN.fullmatch(pattern) for pattern in patterns):
        return [[name for name in names if re.fullmatch(each, name)] for each in expressions]
    which = repr(patterns[0][:60]) if len(patterns) == 1 else f"{len(patterns)} regular expressions, one of"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM], input=json.dumps([expressions, names]), capture_output=True,
            text=True, timeout=_PATIENCE,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode < 0:
        raise PatternError(f"{which} which takes more than {SECONDS} s to match: write a simpler one")
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2][:100]
        raise PatternError(f"{which} which cannot be matched ({said})")
    found: list[list[str]] = json.loads(done.stdout)
    return found
