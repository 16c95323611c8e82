"""README's table of options is the code's: `python tests/test_readme.py` writes it anew."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from vserve.engine.config import flag
from vserve.server.cli.given import options

README = Path(__file__).parents[1] / "README.md"
BETWEEN = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- end of options -->)", re.DOTALL)


def table() -> str:
    groups: dict[str, list[str]] = {}
    for name, (spec, kind) in options().items():
        shown = f"--[no-]{flag(name)[2:]}" if kind is bool else flag(name)
        default = spec.default
        if isinstance(default, bool):
            default = "on" if default else "off"
        elif default is None or default == ():
            default = ""
        choices = f" ({', '.join(spec.metadata['choices'])})" if spec.metadata["choices"] else ""
        help = spec.metadata["help"].replace("|", "\\|") + choices
        groups.setdefault(spec.metadata["group"], []).append(f"| `{shown}` | {default} | {help} |\n")
    parts = [
        f"\n**{group}**\n\n| option | default | |\n|---|---|---|\n{''.join(rows)}" for group, rows in groups.items()
    ]
    return "".join(parts) + "\n"


def test_the_table_of_options_is_the_codes() -> None:
    found = BETWEEN.search(README.read_text(encoding="utf-8"))
    assert found is not None, "README has lost the marks around its table of options"
    assert found[0] == table(), "run python tests/test_readme.py"


def test_what_readme_links_to_is_there() -> None:
    text = README.read_text(encoding="utf-8")
    for path in re.findall(r"\]\((?!https?:|#)([^)]+)\)", text):
        assert (README.parent / path).exists(), f"README links to {path}"


def test_the_python_in_readme_needs_nothing_that_it_does_not_show() -> None:
    """Read from the top: a name is defined where it is used, or earlier."""
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(examples) > 4
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"],
        input="\n".join(examples), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    README.write_text(BETWEEN.sub(lambda _: table(), README.read_text(encoding="utf-8")), encoding="utf-8")
