"""Which tests find each fault of planted.toml: python tests/planted.py [WORD …], as `make faults` calls it.

In a copy of the tree, one fault after the other: a text of a file becomes another, and those tests run that
`make test CHANGED=1` would take after such a change, the nearest to it first, until one fails. Prints a table;
exit code 1 where no test has found one. A test that fails without the fault too has found nothing.

WORD: only faults that have it in their names or paths.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from selection import EVERYTHING, Graph, git, select

ROOT = Path(__file__).parents[1]
OWN = "tests/test_planted.py"  # every fault is one to it: it looks for the texts
TIMEOUT = 120  # seconds of a test: who waits for ever has found a fault, too
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+(?: [^-\s]\S*)*)", re.MULTILINE)
KEPT = (".venv", "build")  # what is not the repository's, and tests want


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str  # once in the file
    new: str

    @property
    def room(self) -> str:
        return "/".join(self.file.split("/")[:2])

    def plant(self, root: Path) -> str:
        """→ the file as it was. Raises ValueError where the text is there more than once, or not at all."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.old!r} {count} times, and one is to be broken")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return text


def read(path: Path) -> list[Fault]:
    return [Fault(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]]


class Copy:
    """A repository of its own with the tree as it is, and its tests."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.root = folder / "vserve"
        for name in git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard"):
            if (source / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, self.root / name)
        for name in KEPT:
            if (source / name).exists():
                (self.root / name).symlink_to((source / name).resolve())
        git(self.root, "init", "--quiet")
        git(self.root, "add", "--all")
        git(self.root, "-c", "user.name=-", "-c", "user.email=-", "commit", "--quiet", "--message=-")
        self.graph = Graph(self.root, git(self.root, "ls-files", "-z"))
        self.broken: set[str] = set()  # tests that fail here without any fault

    def tests_of(self, fault: Fault) -> list[str]:
        """The files that `make test CHANGED=1` takes, the nearest first, and of these those that reach the least."""
        assert fault.file not in EVERYTHING
        chosen = select(self.graph, [fault.file], near=True, say=lambda _: None)
        files = self.graph.tests if chosen == ["tests"] else chosen
        away = self.distances(fault.file)
        files = [file for file in files if file != OWN]
        return sorted(files, key=lambda file: (away.get(file, len(away)), self.reach(file), file))

    def distances(self, path: str) -> dict[str, int]:
        """Of what reaches the file, how many steps away it is."""
        away, ahead = {path: 0, f"{path}::": 0}, deque([path, f"{path}::"])
        while ahead:
            one = ahead.popleft()
            for other in self.graph.back.get(one, ()):
                if other not in away:
                    away[other] = away[one] + 1
                    ahead.append(other)
        return away

    def reach(self, test: str) -> int:
        """How many files of the package it imports or names, and these in turn."""
        seen, ahead = {test}, [test]
        while ahead:
            new = self.graph.edges[ahead.pop()] - seen
            seen |= new
            ahead += new
        return len(seen)

    def first_failure(self, tests: Sequence[str], jobs: int) -> str | None:
        """The name of the first test that fails; None: all pass, or there are none."""
        parallel = ["--numprocesses", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"] if jobs > 1 else []
        command = [
            sys.executable, "-m", "pytest", "-q", "-x", "--timeout", str(TIMEOUT), "-p", "no:cacheprovider", *parallel,
            "-m", "not slow and not gpu", *(f"--deselect={name}" for name in sorted(self.broken)), *tests,
        ]  # fmt: skip
        path = os.pathsep.join([str(self.root.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        done = subprocess.run(
            command, cwd=self.root, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode in (0, 5):
            return None
        if found := FAILED.search(done.stdout):
            return found[1]
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def finder(self, fault: Fault, tests: Sequence[str], jobs: int) -> str | None:
        """The first test that fails with the fault alone."""
        while True:
            whole = fault.plant(self.root)
            try:
                found = self.first_failure(tests, jobs)
            finally:
                (self.root / fault.file).write_text(whole, encoding="utf-8")
            if found is None or self.first_failure([found], 1) is None:
                return found
            if found in self.broken:
                raise RuntimeError(f"{found} cannot be left out, and fails without any fault")
            self.broken.add(found)


def table(rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--faults", type=Path, default=Path(__file__).with_name("planted.toml"))
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    faults = read(args.faults)
    faults = [one for one in faults if not args.words or any(word in f"{one.name} {one.file}" for word in args.words)]
    rows: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory(prefix="vserve-faults-") as folder:
        copy = Copy(args.root, Path(folder))
        for fault in faults:
            begun, tests = time.monotonic(), copy.tests_of(fault)
            found = copy.finder(fault, tests, args.jobs)
            seconds = time.monotonic() - begun
            rows.append((fault.room, fault.name, len(tests), found or "**nobody**", f"{seconds:.0f}"))
            print(table(rows[-1:]), flush=True)
        for name in sorted(copy.broken):
            print(f"fails without any fault: {name}")
    missed = sum(row[3] == "**nobody**" for row in rows)
    heads = ("room", "fault", "files of tests", "found by", "seconds")
    print("\n" + table([heads, ["---"] * len(heads), *rows]) + f"\n\n{len(rows) - missed} of {len(rows)} are found")
    return 1 if missed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
