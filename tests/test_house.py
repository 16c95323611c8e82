"""The house, its decisions and recipes name what is there: rooms in their order, files, classes and functions."""

from __future__ import annotations

import ast
import io
import re
import runpy
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REACHES = ("server/*.py", "engine/*.py", "kernels/*.py", "configs/*.py", "docs/*.md")
HOUSE, *OTHERS = [
    (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("house", "decisions", "recipes")
]
PAGES = "\n".join((HOUSE, *OTHERS))
# What a room may import of the others.
BELOW: dict[str, set[str]] = {"server": {"engine"}, "engine": {"kernels"}, "kernels": set(), "configs": set()}
ROOMS = tuple(BELOW)
SERVER = ROOT / "server"
LEFTOVERS = ("build", "dist", "__pycache__")  # of tools, where they ran here


def listed() -> list[str]:
    """The rooms: paths in the first columns of its tables."""
    return re.findall(r"^\| `([\w/]+/|[\w/]+\.py)` \|", HOUSE, re.MULTILINE)


def named() -> set[str]:
    return set(re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", PAGES))


@pytest.mark.parametrize("folder", ["server", "engine", "kernels"])
def test_the_rooms_are_these_in_this_order(folder: str) -> None:
    rooms = [path.removeprefix(f"{folder}/") for path in listed() if path.startswith(f"{folder}/")]
    rooms = [room for room in rooms if room]
    floors = runpy.run_path(str(ROOT / "tests" / "test_rooms.py"))["FLOORS"][folder]
    assert [room.rstrip("/").removesuffix(".py") for room in rooms] == list(floors)
    here = {path.name for path in (ROOT / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {room.rstrip("/") for room in rooms} == here - {"__init__.py"}


def test_every_folder_is_a_room_or_in_one() -> None:
    packages = {init.parent for room in ROOMS for init in (ROOT / room).rglob("__init__.py")}
    rooms = {ROOT / path for path in listed() if path.endswith("/")}
    assert rooms <= packages
    assert {path for path in packages if not path.is_relative_to(SERVER) or path.parent == SERVER} <= rooms
    for folder in ROOT.iterdir():
        if folder.is_dir() and folder.name not in LEFTOVERS and not folder.name.startswith("."):
            assert f"`{folder.name}/`" in HOUSE or folder.suffix == ".egg-info", folder.name


def test_every_file_that_it_names_is_there() -> None:
    paths = {name for name in named() if "/" in name or name.endswith((".py", ".toml", ".md"))}
    assert len(paths) > 100
    assert not (missing := sorted(path for path in paths if not (ROOT / path).exists())), missing


def test_the_classes_and_functions_that_it_names_are_there() -> None:
    """`EngineClient`, `Scheduler.schedule`, `answer()`, `FORMATS`."""
    code = "\n".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    known = set(re.findall(r"^\s*(?:(?:async )?def |class )?(\w+)", code, re.MULTILINE))
    names = {part for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?|\w+(?=\(\)`))", PAGES) for part in name.split(".")}
    assert len(names) > 15
    assert names <= known, names - known


def test_the_four_rooms_import_what_it_says() -> None:
    for room, below in BELOW.items():
        for path in (ROOT / room).rglob("*.py"):
            depth = len(path.relative_to(ROOT).parts)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == depth and node.module:
                    other = node.module.split(".")[0]
                    assert other not in ROOMS or other in below, f"{path} imports {other}"


def test_the_path_of_a_token_is_as_long_as_it_says() -> None:
    """Lines of the files named in the twelve steps, without docstrings, comments and blanks, within a tenth."""
    (said,) = re.findall(r"some ([\d,]+) lines of code", HOUSE)
    steps = HOUSE[HOUSE.index("## Twelve steps") : HOUSE.index("## Two steps at once")]
    files = {name for name in re.findall(r"`([\w/]+\.py)`", steps) if "/" in name}
    assert sum(map(_code_lines, files)) == pytest.approx(int(said.replace(",", "")), rel=0.1)


def _code_lines(name: str) -> int:
    source = (ROOT / name).read_text(encoding="utf-8")
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)
