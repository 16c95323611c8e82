"""README and the pages under docs/: what they name is there, and what they show runs."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from vserve.engine.families.registry import FAMILIES

ROOT = Path(__file__).parents[1]
REACHES = ("*.md", "server/*", "engine/*", "kernels/*", "configs/*", "tools/*", "docker/*", "tests/*")
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """Without what stands between fences."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """Those that GitHub gives to headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\((?!https?:)([^)]+)\)", prose(page))


def test_readme_is_a_door() -> None:
    assert len(README.read_bytes()) <= 9 * 1024, "README is to be read in five minutes: the rest belongs under docs/"


def test_the_tables_of_options_are_the_codes() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "docs" / "options_page.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run: python tools/docs/options_page.py"


@each_page
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.relative_to(ROOT)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.relative_to(ROOT)} links to {link}: no such heading"


def test_every_page_is_reached_from_readme() -> None:
    reached, ahead = {README}, [README]
    while ahead:
        page = ahead.pop()
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target not in reached:
                reached.add(target)
                ahead.append(target)
    assert set(PAGES) <= reached


@each_page
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    """`server/app.py`, `configs/presets/`: what begins with a folder of the repository."""
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    named = re.findall(rf"(?<![\w/.:-])(?:{folders})/[\w./*-]*", page.read_text(encoding="utf-8"))
    for name in named:
        assert list(ROOT.glob(name.rstrip("./"))), f"{page.relative_to(ROOT)} names {name}"


@each_page
def test_the_python_of_a_page_needs_nothing_that_it_does_not_show(page: Path) -> None:
    """Read from the top: a name is defined where it is used, or earlier."""
    examples = python_of(page)
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"],
        input="\n".join(examples), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_on_the_api_name_every_route_and_every_field() -> None:
    from vserve.server.openapi import OPERATIONS
    from vserve.server.wire.embeddings import EmbeddingRequest
    from vserve.server.wire.requests import ChatRequest, CompletionRequest

    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "using").glob("*.md"))
    fields = {name for model in (ChatRequest, CompletionRequest, EmbeddingRequest) for name in model.model_fields}
    wanted = fields | {operation.path.partition("/{")[0] for operation in OPERATIONS}
    missing = {name for name in wanted if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)}
    assert not missing, f"docs/using/ does not mention {', '.join(sorted(missing))}"


def test_the_page_on_models_has_these_architectures() -> None:
    named = re.findall(
        r"`(\w+(?:For(?:CausalLM|ConditionalGeneration)|ChatModel))`", (ROOT / "docs/running/models.md").read_text()
    )
    assert len(named) > 15
    assert set(named) == {family.architecture for family in FAMILIES}


def test_the_demo_models_scores_are_those_that_were_measured() -> None:
    table = (ROOT / "docs" / "demo-model.md").read_text(encoding="utf-8")
    shown = {skill: float(percent) for skill, percent in re.findall(r"^(\w+) +([\d.]+) %", table, re.MULTILINE)}
    measured = json.loads((ROOT / "configs" / "demo" / "evaluation.json").read_text())
    assert shown == {skill: round(100 * share, 1) for skill, share in measured.items()}


def test_the_pages_show_python() -> None:
    assert sum(len(python_of(page)) for page in PAGES) > 5


def python_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
