"""Options of pictures in prompts: how many, from where, and what of them is kept."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any

from ...engine.options.option import Bounds, option

# Without --limit-mm-per-prompt. A conversation of an agent that looks at a screen has dozens.
MOST_PICTURES = 32
KINDS = ("image", "video", "audio")
_DOMAIN = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]+\]")


def _limits(text: str) -> str | None:
    try:
        read_limits(text)
    except ValueError as error:
        return str(error)
    return None


def read_limits(text: str) -> dict[str, int]:
    """Of `{"image": 2}`, or of `image=2,video=0` in vLLM's older form. Raises ValueError with what is wrong."""
    try:
        content: Any = json.loads(text)
    except ValueError:
        pairs = [pair.partition("=")[::2] for pair in re.split(r"[,\s]+", text.strip())]
        content = {name.strip(): int(count) if count.strip().isdecimal() else count for name, count in pairs}
    if not isinstance(content, dict):
        raise ValueError("it must be a JSON object such as '{\"image\": 4}', or image=4")
    found = {}
    for kind, count in content.items():
        if kind not in KINDS:
            raise ValueError(f"it has {kind[:60]!r}: it may limit {', '.join(KINDS)}")
        if isinstance(count, dict):  # vLLM's newer form, whose sizes are for its profiling
            count = count.get("count")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 4096:
            raise ValueError(f"it has {count!r:.60} for {kind}: give a number from 0 to 4096, such as {kind}=4")
        found[kind] = count
    return found


def _folder(path: str) -> str | None:
    if not path or os.path.isdir(path):
        return None
    return "it is no folder: give the path of the one that holds the pictures"


def _domains(names: tuple[str, ...]) -> str | None:
    wrong = next((name for name in names if not _DOMAIN.fullmatch(name)), None)
    return None if wrong is None else f"{wrong!r:.80} is no name of a host, such as pictures.example.org"


@dataclass(frozen=True)
class MediaConfig:
    limit_mm_per_prompt: str | None = option(
        None, "how many pictures a prompt may have: image=4, or a JSON object such as '{\"image\": 4}'; 0: none "
        f"(default: {MOST_PICTURES})", group="media", problem=_limits, is_json=True,
    )  # fmt: skip
    allowed_local_media_path: str = option(
        "", "folder whose pictures requests may name as file:///…; empty: none", group="media", problem=_folder
    )
    allowed_media_domains: tuple[str, ...] = option(
        (), "hosts that pictures may be fetched from (default: any with a public address)", group="media",
        problem=_domains,
    )  # fmt: skip
    media_fetch_timeout: float = option(
        10.0, "seconds until a picture that a URL names must be there", group="media",
        bounds=Bounds(0.1, 600, unit="seconds"),
    )  # fmt: skip
    max_media_size: int = option(
        20 << 20, "bytes of one picture as it comes, compressed", group="media", bounds=Bounds(1, 1 << 30)
    )
    media_processes: int | None = option(
        None, "processes that decode pictures (default: cores - 2, from 1 to 8)", group="media", bounds=Bounds(1, 64)
    )
    mm_processor_cache_gb: float = option(
        1.0, "GiB of memory for decoded pictures that may come again, in each API process; 0: none are kept",
        group="media", bounds=Bounds(0, 1024, zero="none", unit="GiB"),
    )  # fmt: skip
    disable_mm_preprocessor_cache: bool = option(False, "the same as --mm-processor-cache-gb 0", group="media")

    def most_pictures(self) -> int:
        """Of one prompt."""
        limits = {} if self.limit_mm_per_prompt is None else read_limits(self.limit_mm_per_prompt)
        return limits.get("image", MOST_PICTURES)

    @property
    def media_cache_bytes(self) -> int:
        return 0 if self.disable_mm_preprocessor_cache else int(self.mm_processor_cache_gb * (1 << 30))
