"""Which tests a change can reach: no more than these where a minute is given, and never fewer where all must hold."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "selection.py"
REACHES = ("tests/*test_*.py", "tests/*conftest.py")
MODULE = runpy.run_path(str(SCRIPT))
# Each test of this tree reaches one thing in one way.
TREE = {
    "__init__.py": "",
    "engine/__init__.py": "",
    "engine/a.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from .types import T
def f():
    from . import late
""",
    "engine/late.py": "",
    "engine/types.py": "",
    "engine/choice.py": "from importlib import import_module\ndef f(name):\n    import_module(f'.{name}', __package__)",
    "engine/room/deep.py": "",
    "engine/started.py": "from . import late",
    "server/__init__.py": "",
    "server/app.py": "from ..engine.a import f\nfrom .parser import g",
    "server/parser.py": "FOLDER = 'web'",
    "server/web/page.js": "",
    "server/only.py": "",
    "server/wide.py": "from .only import x",
    "tests/conftest.py": "def pytest_configure(): pass",
    "tests/server/conftest.py": """
import pytest
from vserve.server.app import create
from vserve.engine import types

@pytest.fixture
def app():
    return create()

@pytest.fixture
def client(app):
    return app

@pytest.fixture(autouse=True)
def _always():
    types
""",
    "tests/server/test_app.py": "def test(client): pass",
    "tests/server/test_parser.py": "from vserve.server.parser import g",
    "tests/server/test_asked.py": "def test(request): request.getfixturevalue('app')",
    "tests/server/test_nothing.py": "",
    "tests/test_import.py": "from vserve.engine.a import f",
    "tests/test_started.py": "COMMAND = ['-m', 'vserve.engine.started']",
    "tests/test_program.py": "CODE = 'import sys; from vserve.engine.started import x'",
    "tests/test_choice.py": "def test():\n    from vserve.engine import choice",
    "tests/test_beside.py": "FILE = 'helper.py'",
    "tests/helper.py": "import vserve.server.parser",
    "tests/test_folders.py": "REACHES = ('docs/*', 'server/*')",
    "docs/page.md": "",
    "docs/told.md": "",
    "tests/test_told.py": "PAGE = ROOT / 'docs' / 'told.md'",
    "Makefile": "",
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    return tmp_path


def selected(checkout: Path, *options: str) -> tuple[set[str], str]:
    """The tests' names, and what it said."""
    command = [sys.executable, str(SCRIPT), *(options or ("1",)), f"--root={checkout}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {Path(path).stem.removeprefix("test_") for path in done.stdout.split()}, done.stderr


def reached(checkout: Path, path: str) -> set[str]:
    (checkout / path).write_text((checkout / path).read_text() + "\n# changed")
    return selected(checkout)[0]


WAYS = {
    "engine/late.py": "app asked import choice folders program started",
    "engine/started.py": "choice program started",  # not by its own name alone: whoever chooses may choose it
    "engine/room/deep.py": "choice",
    "engine/types.py": "app asked choice nothing parser",  # a fixture that runs for all of the folder
    "server/parser.py": "app asked beside folders parser",
    "server/web/page.js": "app asked beside folders parser",
    "tests/helper.py": "beside",
    "tests/server/conftest.py": "app asked nothing parser",
    "tests/server/test_nothing.py": "nothing",
    "docs/told.md": "folders told",
    "docs/page.md": "folders told",  # whoever names the folder
    "tests/conftest.py": "tests",
    "Makefile": "tests",
    "server/only.py": "tests",  # that a test looks through its folder is no test of it
}


@pytest.mark.parametrize("path", WAYS)
def test_what_a_change_reaches(checkout: Path, path: str) -> None:
    assert reached(checkout, path) == set(WAYS[path].split()) - ({"folders"} if path.startswith("engine/") else set())


def test_what_was_deleted_or_is_new_counts(checkout: Path) -> None:
    (checkout / "server/parser.py").unlink()
    assert selected(checkout)[0] == {"app", "asked", "beside", "folders", "parser"}
    subprocess.run(["git", "checkout", "-q", "."], cwd=checkout, check=True)
    (checkout / "tests/test_new.py").write_text("")
    assert selected(checkout)[0] == {"new"}
    (checkout / "tests/test_new.py").unlink()
    assert selected(checkout)[0] == set(), "nothing has changed"


def test_a_tree_will_do_and_an_unknown_commit_will_not(checkout: Path) -> None:
    tree = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=checkout, capture_output=True, text=True).stdout
    (checkout / "docs/told.md").write_text("more")
    assert selected(checkout, tree.strip())[0] == {"folders", "told"}
    done = subprocess.run([sys.executable, SCRIPT, "0" * 40, f"--root={checkout}"], capture_output=True, text=True)
    assert done.returncode != 0 and not done.stdout and "0000" in done.stderr


def test_near_leaves_out_who_comes_through_a_door_and_says_so(checkout: Path) -> None:
    (checkout / "server/parser.py").write_text("")
    names, said = selected(checkout, "1", "--near")
    assert names == {"beside", "folders", "parser"}
    assert "server/parser.py: 3 files of tests reach it, of 5" in said and "left out: 2 " in said
    (checkout / "server/app.py").write_text("from .door import x")
    assert {"app", "asked"} <= selected(checkout, "1", "--near")[0], "what is changed itself is no door"
    (checkout / "server/door.py").write_text("")
    assert {"app", "asked"} <= selected(checkout, "1", "--near")[0], "where nobody else reaches it"


@cache
def graph() -> Any:
    paths: Iterable[str] = MODULE["git"](ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return MODULE["Graph"](ROOT, [path for path in paths if (ROOT / path).exists()])


def test_here_every_file_is_reached_by_a_test_or_by_none_on_purpose() -> None:
    known = MODULE["EVERYTHING"] | MODULE["NOTHING"]
    reached = set(graph().tests)
    ahead = [*reached]
    while ahead:
        new = graph().edges[ahead.pop()] - reached
        reached |= new
        ahead += new
    for path in sorted(graph().paths - known - reached):
        looked = graph().declared_for(path) and not path.startswith(MODULE["PACKAGE"])
        assert looked or f"{path}::" in reached, f"{path}: name it in the REACHES of a test that reads it"
    assert {path for path in (known | MODULE["DOORS"]) if not (ROOT / path).exists()} == set()


def test_here_parsers_have_tests_of_their_own_and_servers_reach_all() -> None:
    path, doors = "server/parsers/hermes.py", MODULE["DOORS"]
    near, far = graph().reached_from(path, doors), graph().reached_from(path)
    assert {"tests/server/test_parsers.py", "tests/server/test_tools.py"} <= near
    assert len(near) < 30 and not any(test.startswith(("tests/kernels/", "tests/models/")) for test in far)
    for test in ("e2e/test_auth.py", "e2e/test_tool_calls.py", "clients/test_openai.py", "server/test_access.py"):
        assert f"tests/{test}" in far, test


def test_here_kernels_are_reached_by_their_tests_and_by_every_engine() -> None:
    far = graph().reached_from("kernels/lora/lora_triton.py")
    for test in ("kernels/test_lora.py", "engine/test_ranks.py", "e2e/test_auth.py", "models/test_ranks.py"):
        assert f"tests/{test}" in far, test
