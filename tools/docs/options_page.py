"""docs/running/options.md is the options' declarations as tables: this script writes it anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vserve.engine.options.config import flag
from vserve.server.options.reading import options

PAGE = Path(__file__).parents[2] / "docs" / "running" / "options.md"
HEAD = """# Options

`vserve serve --help` says this too; `python tools/docs/options_page.py` makes these tables from the code. Each option
is also a variable (`VSERVE_MAX_MODEL_LEN`) and a line of the file that `--config` names:
[which comes first](command-line.md#options-from-elsewhere). Whole numbers may end in `k`, `m`, `g` (thousands) or
`K`, `M`, `G` (powers of 1024): `--max-model-len 32K`.
"""


def page() -> str:
    groups: dict[str, list[str]] = {}
    for name, (spec, kind) in options().items():
        shown = f"--[no-]{flag(name)[2:]}" if kind is bool else flag(name)
        default = spec.default
        if isinstance(default, bool):
            default = "on" if default else "off"
        elif default is None or default == ():
            default = ""
        help = spec.metadata["help"].replace("|", "\\|")
        groups.setdefault(spec.metadata["group"], []).append(
            f"| `{shown}` | {default} | {allowed(spec.metadata)} | {help} |\n"
        )
    tables = [
        f"\n## {group}\n\n| option | default | may be | |\n|---|---|---|---|\n{''.join(rows)}"
        for group, rows in groups.items()
    ]
    return HEAD + "".join(tables)


def allowed(declared: Mapping[str, Any]) -> str:
    """What an option's declaration lets it be; nothing where it says nothing."""
    if declared["choices"]:
        return ", ".join(declared["choices"])
    bounds = declared["bounds"]
    if bounds is None:
        return ""
    least, most, above = bounds.at_least, bounds.at_most, bounds.above
    words = [f"above {above:,}"] if above is not None else []
    if least is not None:
        words.append(f"{least:,} to {most:,}" if most is not None else f"{least:,} or more")
    elif most is not None:
        words.append(f"at most {most:,}")
    return " and ".join(words)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
