"""Every row of the checklist of attacks and faults has a test that is named for it, or a reason why not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
REACHES = ("tests/*test_*.py",)

# What each row is about; the answers that are expected are in the tests.
ROWS = {
    1: "n", 2: "max_tokens and lengths", 3: "best_of", 4: "logprobs", 5: "numbers that are none",
    6: "top_k, min_p, seed", 7: "stop strings, stop tokens, biases", 8: "prompts", 9: "messages", 10: "stream_options",
    11: "schemas and grammars", 12: "tools", 13: "chat templates", 14: "special tokens in text",
    15: "unknown models and fields", 16: "labels and request ids", 17: "encoded tensors", 18: "addresses",
    19: "bodies that are no JSON", 20: "bodies too large, cut off, compressed", 21: "headers too large",
    22: "wrong method, path, type", 23: "slow clients", 24: "smuggling", 25: "locked routes by other names",
    26: "odd keys", 27: "paths that lead out", 28: "errors that tell too much", 29: "clients that leave",
    30: "clients that do not read", 31: "too many at once", 32: "more than the cache holds", 33: "starvation",
    34: "time limits", 35: "tenants and the prefix cache", 36: "seeds in company", 37: "shutdown",
    38: "killed and stopped processes", 39: "a killed rank", 40: "out of memory", 41: "an exception at one request",
    42: "NaN", 43: "full disks, no descriptors, jumping clocks", 44: "broken checkpoints", 45: "a port in use",
    46: "killed while starting", 47: "log injection", 48: "sockets and what is read from them",
    49: "private routes by other names", 50: "private sockets",
}  # fmt: skip
UNTESTED = {39: "needs several GPUs: there is one rank so far"}
# Tested, but not all of it where there is no GPU.
PARTLY = {
    40: "an allocation that fails for real, and a real illegal access, need a GPU: here both are injected",
    46: "a kill in the middle of a CUDA-graph capture and starts that share Triton's cache need a GPU",
}


def names() -> Iterator[str]:
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(r"test_rows?_\d", node.name):
                yield node.name


def rows_of(name: str) -> set[int]:
    """test_row_5_…, test_rows_1_to_10_…, test_rows_41_and_42_…"""
    match = re.match(r"test_rows?_(\d+)(?:_(to|and)_(\d+))?_", name)
    assert match, f"{name} names no row"
    first, word, last = int(match[1]), match[2], int(match[3] or match[1])
    return set(range(first, last + 1)) if word == "to" else {first, last}


NAMES = list(names())  # once: every file is read for them
TESTED = {row: sorted(name for name in NAMES if row in rows_of(name)) for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row}-{ROWS[row].replace(' ', '-')}")
def test_there_is_a_test(row: int) -> None:
    if row in UNTESTED:
        assert not TESTED[row], "it has a test now: take it out of UNTESTED"
        pytest.skip(UNTESTED[row])
    assert TESTED[row], f"no test is named for row {row}: {ROWS[row]}"


def test_no_test_names_a_row_that_is_none() -> None:
    assert set().union(*map(rows_of, names())) <= ROWS.keys()
    assert list(ROWS) == list(range(1, 51)) and ROWS.keys() >= UNTESTED.keys() | PARTLY.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("row", PARTLY)
def test_what_needs_a_gpu(row: int) -> None:
    pytest.skip(PARTLY[row])
