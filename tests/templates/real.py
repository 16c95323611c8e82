"""make test-templates: the templates of real models, from source distributions that carry them. What was said must
be in the prompt.

    python tests/templates/real.py [--folder FOLDER] [NAME …]

The templates are read where they lie, in the archives; nothing is installed or kept. NAMEs: parts of templates' names.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.templates.histories import SPECIAL, TOOLS, as_templates_get, history, lost, tokenizer
from vserve.server.errors import ApiError
from vserve.server.parsers.formats import choose
from vserve.server.text.capabilities import AS_SENT
from vserve.server.text.shape import text_of
from vserve.server.text.tokenizer import Tokenizer
from vserve.server.text.tool_text import reader_of

PACKAGES = ("llama-cpp-python", "trl")
SEEDS = range(12)
# Special tokens, as the templates spell them: what a tokenizer would say is not in the archives.
_SPECIAL = re.compile(r"<\|[^|<>\s]*\|>|<｜[^｜]*｜>|</?s>|<\w+_of_\w+>|\[/?INST\]|\[/?\w+_RESULTS\]")
_TAKEN = AS_SENT.described()
Prompt = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]


def download(folder: Path) -> None:
    """Raises CalledProcessError where there is no registry."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, "--no-binary", ",".join(PACKAGES), *PACKAGES], check=True)


def templates(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, source), each source once."""
    seen = set()
    for archive in sorted(folder.glob("*.tar.gz")):
        with tarfile.open(archive) as files:
            for file in files:
                if file.isfile() and re.search(r"(chat_templates|models/templates)/[^/]+\.jinja$", file.name):
                    content = files.extractfile(file)
                    assert content is not None
                    source = content.read().decode()
                    if source not in seen:
                        seen.add(source)
                        yield f"{archive.name.partition('-')[0]}/{Path(file.name).stem}", source


def before(made: Tokenizer) -> Prompt:
    """As messages were sent on: texts of several parts joined, nothing else changed."""

    def prompt(chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        plain = [{**one, "content": text_of(one["content"])} for one in as_templates_get(chat)]
        return made.template().render(plain, {**SPECIAL, "tools": tools, "add_generation_prompt": True})

    return prompt


def after(made: Tokenizer) -> Prompt:
    return lambda chat, tools: made.render(as_templates_get(chat), {"tools": tools, "add_generation_prompt": True})


def tried(prompt: Prompt, *, agent: bool) -> Counter[str]:
    """How many histories come whole, are refused, or lose something."""
    found: Counter[str] = Counter()
    for seed in SEEDS:
        chat, tools = history(seed, agent=agent), TOOLS if agent else None
        try:
            found["lost" if lost(prompt(chat, tools), chat, tools) else "whole"] += 1
        except ApiError as error:
            found["told" if "--tools-in-system" in error.message else "refused"] += 1
    return found


def format_of(made: Tokenizer, source: str) -> str:
    """The format that was found for calls, and whether it reads what the template writes."""
    formats = choose(source, source, None, "auto", "auto")
    if formats.tools is None:
        return "-"
    written = made.written_call()
    special = sorted(set(_SPECIAL.findall(written)), key=len, reverse=True)
    if not written:
        return formats.tools.name
    found = reader_of(formats.tools, formats.reasoning, written, special)
    return (
        formats.tools.name if found is formats.tools else f"{formats.tools.name}: {found.name if found else 'unread'}"
    )


def _cell(found: Counter[str]) -> str:
    return "/".join(str(found[name]) for name in ("whole", "lost", "refused", "told"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the archives already are")
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        if given.folder is None:
            download(folder)
        return report([(n, s) for n, s in templates(folder) if not given.names or any(one in n for one in given.names)])


def report(found: list[tuple[str, str]]) -> int:
    """A table, and 1 where something is lost without a word."""
    ways = ("chats before", "chats", "agents before", "agents", "in system")
    print(f"{len(found)} templates, {len(SEEDS)} histories each; whole/lost/refused/told that it cannot be shown")
    print(f"{'template':<52} {'ms':>4}" + "".join(f" {way:>13}" for way in ways) + "  format of calls; deviations")
    sums = {way: Counter[str]() for way in ways}
    num_templates = {way: Counter[str]() for way in ways}
    for name, source in found:
        made = tokenizer(source)
        try:
            template = made.template()
        except ApiError as error:
            print(f"{name:<52} {error.message}")
            continue
        start = time.thread_time()
        can = made.capabilities(template)
        seconds = time.thread_time() - start
        cells = (
            tried(before(made), agent=False), tried(after(made), agent=False), tried(before(made), agent=True),
            tried(after(made), agent=True), tried(after(tokenizer(source, in_system=True)), agent=True),
        )  # fmt: skip
        for way, cell in zip(ways, cells, strict=True):
            sums[way] += cell
            num_templates[way].update(what for what in cell if cell[what])
        differing = [field for field, value in can.described().items() if value != _TAKEN[field] and field != "parts"]
        row = "".join(f" {_cell(cell):>13}" for cell in cells)
        print(f"{name:<52} {seconds * 1000:4.0f}{row}  {format_of(made, source)}; {' '.join(differing)}", flush=True)
    for title, numbers in (("histories", sums), ("templates that have some", num_templates)):
        print(f"{title:<57}" + "".join(f" {_cell(numbers[way]):>13}" for way in ways))
    return 1 if any(sums[way]["lost"] for way in ("chats", "agents", "in system")) else 0


if __name__ == "__main__":
    sys.exit(main())
