"""The rooms of server, engine and kernels: arrows go one way, and no files import each other in a circle."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REACHES = ("server/*.py", "engine/*.py", "kernels/*.py")
# From the ground up: a room knows what is below it.
FLOORS = {
    "server": (
        "client", "errors", "pace", "lanes", "histogram", "options", "parsers", "media", "text", "grammar", "wire",
        "generation", "observe", "http", "router", "dialects", "batches", "colleagues", "state", "api", "openapi",
        "app", "desk", "api_processes", "team", "reporter", "service", "api_process", "ray_serve", "offline", "cli",
    ),
    "engine": (
        "errors", "parallel", "link", "options", "grammar", "quant", "families", "files", "describe", "layers",
        "vision", "models", "foreign", "cache", "adapters", "weights", "schedule", "speculation", "step", "planning",
        "ranks", "start",
    ),
    "kernels": ("launch", "norm", "attention", "state", "rows", "linear", "sampling", "lora", "experts"),
}  # fmt: skip
# What stays although it goes up or in a circle, with the reason.
STAYS = {
    # transformers' code describes its own models: they are built to be described, and imported only then.
    ("engine.describe.reading", "engine.foreign.config"),
    # It names the type of what it checks, whose method calls it.
    ("engine.options.config_checks", "engine.options.config"),
}
MOST_EXCEPTIONS = 10


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(folder: str) -> dict[str, set[str]]:
    """module → those of the folder that it imports, on whatever line: for types and late ones count too"""
    paths = {module_name(path): path for path in ROOT.glob(f"{folder}/**/*.py")}
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - (node.level - 1)] + (node.module.split(".") if node.module else [])
                for alias in node.names:
                    target = ".".join([*base, alias.name])
                    found[name].add(target if target in paths else ".".join(base))
    return {name: {one for one in others if one in paths} for name, others in found.items()}


def arrows(folder: str) -> dict[str, set[str]]:
    """The same without those that stay."""
    return {name: {other for other in others if (name, other) not in STAYS} for name, others in imports(folder).items()}


@pytest.mark.parametrize("folder", FLOORS)
def test_no_circles(folder: str) -> None:
    try:
        TopologicalSorter(arrows(folder)).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))


@pytest.mark.parametrize("folder", FLOORS)
def test_rooms_know_what_is_below_them(folder: str) -> None:
    floors = FLOORS[folder]
    for name, others in arrows(folder).items():
        if name == folder:
            continue
        floor = floors.index(name.split(".")[1])
        for other in others:
            assert floors.index(other.split(".")[1]) <= floor, f"{name} imports {other}, which is above it"


def test_what_stays_is_there_and_little() -> None:
    assert len(STAYS) <= MOST_EXCEPTIONS
    for name, other in STAYS:
        assert other in imports(name.split(".")[0])[name], f"{name} does not import {other} any more: strike it out"


@pytest.mark.parametrize("folder", FLOORS)
def test_rooms_say_what_they_know(folder: str) -> None:
    for path in ROOT.glob(f"{folder}/**/__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


@pytest.mark.parametrize("folder", ["engine", "kernels"])
def test_rooms_name_their_files(folder: str) -> None:
    for init in ROOT.glob(f"{folder}/*/__init__.py"):
        told = ast.get_docstring(ast.parse(init.read_text())) or ""
        alike = re.search(r"a file each: (.*?)\.", told, re.DOTALL)  # of many that are of one kind
        named = re.findall(r"^(\w+): ", told, re.MULTILINE) + re.findall(r"\w+", "" if alike is None else alike[1])
        assert sorted(named) == sorted(path.stem for path in init.parent.glob("*.py") if path != init), init.parent
