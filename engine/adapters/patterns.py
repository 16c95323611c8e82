"""Regular expressions of an adapter's configuration, matched by a process of its own: one that backtracks without end
holds the interpreter's lock for as long, and no step would run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

LONGEST_PATTERN = 1000  # characters
SECONDS = 1  # of the processor; a good one takes a thousandth for all names of a model
_PER_MATCH = 5e-6  # seconds more for each pattern and name: a good one takes a fifth of that for a name
_MOST_SECONDS = 20
_PATIENCE = 60.0  # seconds in all, on a machine that has other things to do
# Nothing is repeated in it: for a name it takes at most the product of their lengths, 1.4 ns each. A reference to a
# group, which may be as long as the name, is none.
_PLAIN = re.compile(r"(?:[\w.-]|\\\D)*")
_AT_ONCE = 1 << 24  # of that product: less time than a process takes to start
_NAME = re.compile(r"[\w.-]+")
_PROGRAM = """
import json, re, resource, sys
expressions, names, seconds = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
matches = [re.compile(each).fullmatch for each in expressions]
first = ((name, next((i for i, match in enumerate(matches) if match(name)), None)) for name in names)
json.dump({name: i for name, i in first if i is not None}, sys.stdout)
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


def endings(name: str) -> Iterator[str]:
    """The name, and what is behind each of its dots."""
    yield name
    for dot in re.finditer(r"\.", name):
        yield name[dot.end() :]


def first_matches(patterns: Sequence[str], names: Sequence[str], *, ends: bool = False) -> dict[str, int]:
    """Of each name that a pattern matches whole, or, with `ends`, whose last parts one does: the first such pattern's
    index. Raises PatternError.

    With `ends`, a pattern that is the last parts of some names, as it stands, means no others: PEFT writes thousands of
    a mixture's. Its dots would stand for other characters too, but no two modules' names differ by that alone.
    """
    found, literal = _literally(patterns, names) if ends else ({}, set())
    rest = [index for index in range(len(patterns)) if index not in literal]
    for name, index in _matched([patterns[index] for index in rest], names, ends).items():
        found[name] = min(rest[index], found.get(name, len(patterns)))
    return found


def _literally(patterns: Sequence[str], names: Sequence[str]) -> tuple[dict[str, int], set[int]]:
    """The same for patterns that are the last parts of a name as they stand; and the indices of these."""
    index_of = {pattern: index for index, pattern in enumerate(patterns) if _NAME.fullmatch(pattern)}
    found: dict[str, int] = {}
    literal: set[int] = set()
    for name in names if index_of else ():
        if here := [index_of[end] for end in endings(name) if end in index_of]:
            found[name] = min(here)
            literal.update(here)
    return found, literal


def _matched(patterns: Sequence[str], names: Sequence[str], ends: bool) -> dict[str, int]:
    expressions = [rf"(.*\.)?({pattern})" if ends else pattern for pattern in patterns]
    work = sum(map(len, expressions)) * sum(map(len, names))
    if work <= _AT_ONCE and all(_PLAIN.fullmatch(pattern) for pattern in patterns):
        matches = [re.compile(each).fullmatch for each in expressions]
        first = ((name, next((i for i, match in enumerate(matches) if match(name)), None)) for name in names)
        return {name: i for name, i in first if i is not None}
    seconds = SECONDS + int(min(_MOST_SECONDS, len(patterns) * len(names) * _PER_MATCH))
    which, takes, remedy = f"{patterns[0][:60]!r} which", "takes", "write a simpler one"
    if len(patterns) > 1:
        which, takes = f"{len(patterns)} regular expressions for {len(names)} names which", "take"
        remedy = "write fewer, or simpler ones"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM], input=json.dumps([expressions, names, seconds]),
            capture_output=True, text=True, timeout=_PATIENCE,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PatternError(
            f"{which} could not be matched within {_PATIENCE:g} s on a machine that is busy: load it again later"
        ) from None
    if done.returncode == -signal.SIGXCPU:
        raise PatternError(f"{which} {takes} more than {seconds} s to match: {remedy}")
    if done.returncode < 0:
        raise PatternError(
            f"{which} could not be matched (signal {-done.returncode} ended it, perhaps as memory is short): load it "
            "again later"
        )
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2][:100]
        raise PatternError(f"{which} cannot be matched ({said})")
    found: dict[str, int] = json.loads(done.stdout)
    return found
