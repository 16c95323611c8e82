"""Scripts that need a GPU or hours run in no test here: at least the names that they import are there."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REACHES = ("tools/*.py", "tests/gpu/*.py")
SCRIPTS = sorted([*ROOT.glob("tools/*/*.py"), *ROOT.glob("tests/gpu/*.py")])
BESIDE = (ROOT / "tests" / "noticing", ROOT / "tools" / "gpu")  # where scripts look beside their own folder


def defined(path: Path) -> set[str]:
    """The names at the top of a script."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        else:
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        names = {alias.name for alias in node.names}
        if node.module.split(".")[0] == "vserve":
            module = importlib.import_module(node.module)
            for name in names:
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")
        else:
            siblings = [folder / f"{node.module}.py" for folder in (script.parent, *BESIDE)]
            for sibling in [path for path in siblings if path.exists()][:1]:
                assert names <= defined(sibling), f"{sibling} has no {', '.join(names - defined(sibling))}"
