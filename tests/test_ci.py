"""What `.ci/run` runs: all quick tests and the slow ones that a change reaches, or all where none knows the change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    for tool in ("make", "curl", "promtool", "chromium"):
        (tmp_path / "bin" / tool).write_text('#!/bin/sh\necho "make $*"\n[ "$1" != "$FAILS" ]')
        (tmp_path / "bin" / tool).chmod(0o755)
    (tmp_path / ".gitignore").write_text("bin\n.ci\n")
    for words in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    return tmp_path


def run(checkout: Path, base: str | None = None, **variables: str) -> tuple[int, list[str]]:
    """Exit code, and what make was asked for."""
    if base is not None:
        (checkout / ".ci" / "base").write_text(f"{base}\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("BASE", "FULL")}
    environment |= {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", **variables}
    done = subprocess.run(
        ["bash", checkout / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, re.findall(r"^make (.*)$", done.stdout, re.MULTILINE)


def tree(checkout: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD^{tree}"], cwd=checkout, capture_output=True, text=True
    ).stdout.strip()


def test_what_differs_from_the_tree_that_passed(checkout: Path) -> None:
    base = tree(checkout)
    assert run(checkout, base) == (0, ["lint", "test", f"test-slow CHANGED={base}"])
    assert run(checkout, base, BASE="HEAD") == (0, ["lint", "test", "test-slow CHANGED=HEAD"])


@pytest.mark.parametrize("base", [None, "", "0" * 40, "no such branch"])
def test_all_of_it_where_git_does_not_know_that_tree(checkout: Path, base: str | None) -> None:
    assert run(checkout, base) == (0, ["lint", "test-all"])


def test_all_of_it_where_it_is_asked_for(checkout: Path) -> None:
    assert run(checkout, tree(checkout), FULL="1") == (0, ["lint", "test-all"])


@pytest.mark.parametrize("fails", ["lint", "test", "test-slow"])
def test_one_failure_fails_it(checkout: Path, fails: str) -> None:
    code, asked = run(checkout, tree(checkout), FAILS=fails)
    assert code != 0 and asked[-1].split()[0] == fails


def test_the_base_is_a_tree() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}\n", (ROOT / ".ci" / "base").read_text())
