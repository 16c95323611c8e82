"""Which files of tests a change can reach: python tests/selection.py COMMIT [--near], as the Makefile calls it.

COMMIT is a commit or a tree; 1 is HEAD. What differs from it in the working tree is the change. Prints the files of
tests, `tests` where that is all of them, and nothing where no test reads what has changed. Why, it says on stderr.

A test reaches what it imports, on whatever line, and what that imports in turn; modules that a string names, for there
are programs in strings and `python -m vserve.server.cli.main`; files and folders that a string names; and what it says
in REACHES = ("docs/*", …), where it looks through folders. Of conftest.py it reaches the fixtures that it names and
those that nobody has to name. A module that chooses others by name reaches all beside and below it. A file that no test
reaches selects every test.

`--near`: for the minute after a change, not for a proof. A test that starts a whole server or engine reaches nearly
everything: it is left out where others reach the same file by themselves, and stderr says how many were.
"""

from __future__ import annotations

import argparse
import ast
import gc
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
# They say how every test runs, or what is installed.
EVERYTHING = {
    "tests/conftest.py", "tests/retries.py", "tests/selection.py", "tests/zygote.py", "pyproject.toml",
    "constraints.txt", "Makefile", ".ci/run", "__init__.py",
}  # fmt: skip
ON_REQUEST = {"tests/zygote.py"}  # it starts what a test names, which is reached by that name
NOTHING = {".ci/base", ".gitignore", "tests/gpu/RESULTS.md"}  # that a test runs by
# Whoever comes through one of these starts, or reads a request for, all that is behind it.
DOORS = {
    "server/app.py", "server/cli/main.py", "server/api_process.py", "server/service.py", "server/ray_serve.py",
    "server/offline/llm.py", "server/offline/jobs.py", "server/offline/engine.py",
    "server/text/model.py", "server/wire/requests.py", "server/client/engine_client.py",
    "server/client/process.py", "server/text/tool_text.py", "engine/start/engine.py", "engine/start/process.py",
    "engine/start/rank_process.py",
    "engine/start/loop.py", "tests/engine/test_stress.py",
}  # fmt: skip
PACKAGE = ("server/", "engine/", "kernels/", "configs/")
ELSEWHERE = (*PACKAGE, "docs/", "docker/", "tools/")
MODULE = re.compile(r"\bvserve((?:\.\w+)+)")
BESIDE = re.compile(r"\.\w+(?:\.\w+)*\.?")


class Graph:
    """What each file of the tree refers to. `paths`: all files, those that were deleted too."""

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self.root = root
        self.paths = set(paths)
        self.tests = sorted(path for path in self.paths if fnmatch(path, "tests/*test_*.py") and (root / path).exists())
        self._by_name: defaultdict[str, set[str]] = defaultdict(set)
        self._data: defaultdict[str, set[str]] = defaultdict(set)  # folder's name → files in it that are no Python
        for path in self.paths:
            whole = PurePosixPath(path)
            self._by_name[whole.name].add(path)
            if whole.suffix != ".py":
                for folder in whole.parents[:-1]:
                    self._data[folder.name].add(path)
        self.edges: defaultdict[str, set[str]] = defaultdict(set)
        self.declared: dict[str, tuple[str, ...]] = {}  # REACHES, by test
        read = {path for path in self.paths if path.endswith(".py") and (root / path).exists()}
        trees = {path: ast.parse((root / path).read_text(encoding="utf-8")) for path in read}
        self._conftests = {path: Conftest(trees[path]) for path in read if PurePosixPath(path).name == "conftest.py"}
        for path in read - set(self._conftests) - ON_REQUEST:
            self.edges[path] |= self.references(path, trees[path])
        for path, conftest in self._conftests.items():
            self._add_conftest(path, conftest)
        for path in read:
            if path.startswith("tests/"):
                self._add_fixtures(path, trees[path])

    @cached_property
    def back(self) -> dict[str, set[str]]:
        found: defaultdict[str, set[str]] = defaultdict(set)
        for name, others in self.edges.items():
            for other in others:
                found[other].add(name)
        return found

    def reached_from(self, path: str, doors: Iterable[str] = ()) -> set[str]:
        """The tests that reach it, by ways that do not lead through `doors`."""
        closed, ahead = set(doors) - {path}, [path, f"{path}::"]  # of conftest.py: all that lies below it, too
        seen = set(ahead)
        while ahead:
            for other in self.back.get(ahead.pop(), ()):
                if other not in seen and other not in closed:
                    seen.add(other)
                    ahead.append(other)
        return seen.intersection(self.tests)

    def declared_for(self, path: str) -> set[str]:
        """The tests that look through folders and find it there."""
        return {test for test, globs in self.declared.items() if any(fnmatch(path, glob) for glob in globs)}

    def references(self, path: str, tree: ast.AST) -> set[str]:
        """The files that a module, or a definition in it, imports or names."""
        found: set[str] = set()
        strings: set[str] = set()
        for node in executed(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for _, targets in self.imported(path, node):
                    found |= targets
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value)
            elif isinstance(node, ast.Call) and called(node) in ("import_module", "iter_modules") and node.args:
                if not isinstance(node.args[0], ast.Constant) and not path.startswith("tests/") and "/" in path:
                    folder = f"{PurePosixPath(path).parent}/"
                    found |= {one for one in self.paths if one.startswith(folder) and one.endswith(".py")}
            elif isinstance(node, ast.Assign) and [getattr(one, "id", "") for one in node.targets] == ["REACHES"]:
                self.declared[path] = ast.literal_eval(node.value)
        return found.union(*(self._named(path, text) for text in strings)) - {path}

    def imported(self, path: str, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, set[str]]]:
        """(the name that it gets, files) of each name of an import."""
        for alias in node.names:
            if isinstance(node, ast.Import):
                yield (alias.asname or alias.name.split(".")[0]), self._module(path, alias.name)
                continue
            if alias.name == "__version__":  # the package's own file has it, and loads the rest for other names only
                continue
            base = node.module or ""
            if node.level:
                folder = PurePosixPath(path).parent.parts
                base = ".".join(["vserve", *folder[: len(folder) - (node.level - 1)], *base.split(".")]).rstrip(".")
            yield (alias.asname or alias.name), self._module(path, f"{base}.{alias.name}") or self._module(path, base)

    def _module(self, path: str, name: str) -> set[str]:
        """The file of a dotted name, or of the module that it is in, with those of the packages around it."""
        first, *parts = name.split(".")
        if first != "vserve":  # a script that is beside this one
            beside = str(PurePosixPath(path).with_name(f"{first}.py"))
            return {beside} if beside in self.paths and not path.startswith(PACKAGE) else set()
        for length in range(len(parts), -1, -1):
            stem = "/".join(parts[:length])
            for file in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")):
                if file in self.paths:
                    around = {f"{'/'.join(parts[:depth])}/__init__.py" for depth in range(1, length)}
                    return {file} | (around & self.paths)
        return set()

    def _named(self, path: str, text: str) -> set[str]:
        found: set[str] = set()
        for match in MODULE.finditer(text) if "vserve" in text else ():
            found |= self._module(path, match[0])
        if text.startswith(".") and BESIDE.fullmatch(text):
            stem = "/".join([*PurePosixPath(path).parent.parts, *text.strip(".").split(".")])
            found |= {f"{stem}.py"} & self.paths
            if text.endswith("."):
                found |= {one for one in self.paths if one.startswith(f"{stem}/")}
        name = text.rstrip("/").rpartition("/")[2]
        if name not in self._by_name and name not in self._data:
            return found
        files = self._by_name.get(name, set())
        if "/" in text:
            files = {one for one in files if one.endswith(text.lstrip("./"))}
        beside = {f"{PurePosixPath(path).parent}/{name}"} & files
        found |= beside or files
        # Words such as "data" are names of folders too: the package has those in it, a test those beside it.
        own = "" if path.startswith(("tests/test_", "tools/")) else f"{PurePosixPath(path).parent}/"
        near = (own, "configs/", "server/") if path.startswith(PACKAGE) else (own, *ELSEWHERE)
        return found | {one for one in self._data.get(name, ()) if one.startswith(near)}

    def _add_conftest(self, path: str, conftest: Conftest) -> None:
        around = self._around(path)
        for name, part in conftest.parts.items():
            node = f"{path}::{name}"
            self.edges[node] |= self.references(path, part)
            names = words(part)
            self.edges[node] |= {f"{path}::{other}" for other in conftest.parts if other in names and other != name}
            for imported in conftest.imports:
                for local, targets in self.imported(path, imported):
                    self.edges[node] |= targets if local in names else set()
            for outer in around:
                self.edges[node] |= {f"{outer}::{other}" for other in self._conftests[outer].parts if other in names}

    def _add_fixtures(self, path: str, tree: ast.AST) -> None:
        if path in self._conftests:
            self.edges[path] |= {f"{path}::{name}" for name in self._conftests[path].parts}
            return
        names = words(tree)
        for outer in self._around(path):
            conftest = self._conftests[outer]
            self.edges[path].add(f"{outer}::")
            self.edges[path] |= {f"{outer}::{one}" for one in conftest.parts if one in names or one in conftest.always}

    def _around(self, path: str) -> list[str]:
        folders = [str(folder / "conftest.py") for folder in PurePosixPath(path).parents]
        return [one for one in folders if one in self._conftests and one != path]


class Conftest:
    """Fixtures and what they use, each by itself: `parts` by name, and those that are for all tests in `always`."""

    def __init__(self, tree: ast.Module) -> None:
        self.parts: dict[str, ast.AST] = {}
        self.imports: list[ast.Import | ast.ImportFrom] = []
        self.always: set[str] = set()
        for number, node in enumerate(tree.body):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imports.append(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.parts[node.name] = node
                automatic = any("autouse=True" in ast.unparse(one) for one in node.decorator_list)
                if automatic or node.name.startswith("pytest_"):
                    self.always.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.parts[ast.unparse(target)] = node
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                self.parts[f"line {number}"] = node
                self.always.add(f"line {number}")


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Its nodes, without docstrings and what only type checkers read."""
    ahead: list[ast.AST] = [tree]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            ahead += node.orelse
            continue
        yield node
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            ahead += below(node)


def below(node: ast.AST) -> list[ast.AST]:
    """As ast.iter_child_nodes, in half the time: there are millions."""
    found: list[ast.AST] = []
    for field, value in vars(node).items():
        if isinstance(value, list):
            found += [one for one in value if isinstance(one, ast.AST)]
        elif isinstance(value, ast.AST) and field not in ("ctx", "op"):
            found.append(value)
    return found


def words(tree: ast.AST) -> set[str]:
    """All names in it, of arguments and in strings too: a fixture is asked for by any of these."""
    found: set[str] = set()
    ahead = [tree]
    while ahead:
        node = ahead.pop()
        ahead += below(node)
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"\w+", node.value))
    return found


def select(graph: Graph, changed: Iterable[str], near: bool, say: Callable[[str], None]) -> list[str]:
    """The files of tests that a change of these files can reach; ["tests"] for all."""
    found: set[str] = set()
    left: set[str] = set()
    for path in sorted(changed):
        if path in NOTHING:
            continue
        far, declared = graph.reached_from(path), graph.declared_for(path)
        known = far or (declared and not path.startswith(PACKAGE))  # all look through these, for what it says not does
        if not known:
            say(f"{path}: no test is known to read it: all run")
            return ["tests"]
        close = ((graph.reached_from(path, DOORS) if near else far) or far) | declared
        far |= declared
        say(f"{path}: {len(close)} files of tests reach it{f', of {len(far)}' if near else ''}")
        found |= close
        left |= far - close
    if left - found:
        say(f"left out: {len(left - found)} that reach it by starting all of the server; without CHANGED they run")
    return sorted(found)


def git(root: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip() or f"git {words[0]} failed")
    return done.stdout.rstrip("\0").split("\0") if done.stdout else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="a commit or a tree; 1: HEAD")
    parser.add_argument("--near", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args()
    say = partial(print, file=sys.stderr)
    since = "HEAD" if args.commit == "1" else args.commit
    untracked = git(args.root, "ls-files", "-z", "--others", "--exclude-standard")
    changed = {*git(args.root, "diff", "--name-only", "--no-renames", "-z", since, "--"), *untracked}
    if most := sorted(changed & EVERYTHING):
        say(f"{most[0]}: says how all tests run: all run")
        print("tests")
        return 0
    gc.disable()  # millions of nodes, and no circles among them: half of the time
    graph = Graph(args.root, {*git(args.root, "ls-files", "-z"), *untracked, *changed})
    print(*select(graph, changed, args.near, say))
    return 0


if __name__ == "__main__":
    sys.exit(main())
