"""All pairs are among the quick cases, and all cases among those of `make test-all`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pairs(load_module: Callable[[Path], Any]) -> Any:
    return load_module(Path(__file__).with_name("pairs.py"))


def met(cases: Any) -> set[Any]:
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 4, 2, 5), (1, 6, 3), (2,) * 7], ids=str)
@pytest.mark.parametrize("whole", [True, False])
def test_each_two_values_meet_in_few_cases(pairs: Any, sizes: tuple[int, ...], whole: bool) -> None:
    cases = list(product(*map(range, sizes)))
    cases = cases if whole else [case for case in cases if sum(case) % 3 != 1]  # some combinations are not there
    chosen = [cases[number] for number in pairs.covering(cases)]
    assert met(chosen) == met(cases)
    a, b = sorted(sizes)[-2:]
    assert len(chosen) <= 2 * a * b and len(set(chosen)) == len(chosen)
    assert pairs.covering(cases) == pairs.covering(cases)


TESTS = """
import importlib.util, pytest
spec = importlib.util.spec_from_file_location("pairs", {path!r})
pairs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pairs)
"""
CONFTEST = """
def pytest_collection_modifyitems(items):
    pairs.mark_the_rest(items)
    for item in items:
        slow, product = (item.get_closest_marker(name) is not None for name in ("slow", "product"))
        print("ITEM", item.originalname, slow, product)
"""
CASES = """
import pytest

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b, c", [(1, 2), (3, 4)])
@pytest.mark.parametrize("d", "xyz")
def test_three(a, b, c, d): pass

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
def test_two(a, b): pass

@pytest.fixture(params=range(2))
def made(request): return request.param

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
def test_with_a_fixture(a, b, made): pass

@pytest.mark.slow
@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("c", range(2))
def test_slow(a, b, c): pass
"""


def test_the_rest_is_slow(tmp_path: Path) -> None:
    path = str(Path(__file__).with_name("pairs.py"))
    (tmp_path / "conftest.py").write_text(TESTS.format(path=path) + CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: some\n")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    found = Counter(re.findall(r"^ITEM (\w+) (\w+) (\w+)$", done.stdout, re.MULTILINE))
    assert found == {
        ("test_three", "False", "False"): 9, ("test_three", "True", "True"): 9, ("test_two", "False", "False"): 9,
        ("test_with_a_fixture", "False", "False"): 9, ("test_with_a_fixture", "True", "True"): 9,
        ("test_slow", "True", "False"): 8,
    }  # fmt: skip
