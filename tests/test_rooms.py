"""The rooms of the server: arrows between them go one way, and no file of the package is in a circle of imports."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the ground up: a room knows what is below it.
FLOORS = (
    "client", "errors", "pace", "lanes", "histogram", "options", "parsers", "text", "grammar", "wire", "generation",
    "observe", "http", "router", "dialects", "colleagues", "state", "api", "openapi", "app", "desk", "api_processes",
    "service", "api_process", "ray_serve", "offline", "cli",
)  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(folder: str) -> dict[str, set[str]]:
    """module → those of the package that it imports, on whatever line: for types and late ones count too"""
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


@pytest.mark.parametrize("folder", ["server", "kernels"])
def test_no_circles(folder: str) -> None:
    try:
        TopologicalSorter(imports(folder)).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))


def test_rooms_know_what_is_below_them() -> None:
    for name, others in imports("server").items():
        if name == "server":
            continue
        floor = FLOORS.index(name.split(".")[1])
        for other in others:
            assert FLOORS.index(other.split(".")[1]) <= floor, f"{name} imports {other}, which is above it"


def test_rooms_say_what_they_know() -> None:
    for path in ROOT.glob("server/**/__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path
