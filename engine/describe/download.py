"""Files of the Hugging Face hub: downloaded, resumed where a download was broken off, or found in its cache."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ModelError, one_line
from ..options.model_path import cache_folder

Report = Callable[[int, int], None]  # (bytes that are here, bytes in all), while files come

SKIPPED = ["consolidated*", "original/*", "onnx/*"]  # second copies of the weights in other formats
EVERY = 0.2  # seconds between two reports


def from_hub(
    name: str, revision: str | None, files: Sequence[str], download_dir: str | None, report: Report | None = None
) -> Path:
    """The snapshot's folder, with at least the files that these patterns name. Raises ModelError."""
    import huggingface_hub  # slow, and not needed for a folder

    options: dict[str, Any] = {
        "revision": revision, "cache_dir": cache_folder(download_dir), "allow_patterns": list(files),
        "ignore_patterns": SKIPPED,
    }  # fmt: skip
    try:
        if report is not None:
            options["tqdm_class"] = _counting(report, lambda: _bytes_in_all(name, revision, options["allow_patterns"]))
        with _without_bars():
            return Path(huggingface_hub.snapshot_download(name, **options))
    except Exception as error:  # one line whatever went wrong: network, name, licence, disk
        wanted = f"{name} (revision {revision})" if revision else name
        raise ModelError(
            f"cannot get {wanted} from the hub ({type(error).__name__}: {one_line(error)}): check name, network and "
            "HF_TOKEN, or pass a folder"
        ) from error


@contextmanager
def _without_bars() -> Iterator[None]:
    """Several processes of a server download: none of them draws bars over the line that says how far the start is."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled() or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is not None:
        yield  # somebody has decided it
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _bytes_in_all(name: str, revision: str | None, patterns: list[str]) -> int:
    """Of the files that these patterns name; 0 where the hub does not say."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    try:
        found = HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(name, revision=revision, files_metadata=True)
    except Exception:  # the download itself says what is wrong
        return 0
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    wanted = filter_repo_objects(list(sizes), allow_patterns=patterns, ignore_patterns=SKIPPED)
    return sum(sizes[file] for file in wanted)


def _counting(report: Report, in_all: Callable[[], int]) -> type[Any]:
    """A bar that draws nothing and counts bytes: the hub's library has several, and fills one with those that are on
    the disk. The total is asked for once there is something to download."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    reported, total = [0.0], list[int]()

    class Counting(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | {"file": io.StringIO(), "disable": False, "mininterval": EVERY}))

        def display(self, *_: Any, **__: Any) -> None:
            now, done = time.monotonic(), int(self.n)
            if self.unit != "B" or not done or now - reported[0] < EVERY:
                return
            if not total:
                total.append(in_all())
            reported[0] = now
            report(done, max(total[0], done, int(self.total or 0)))

    return Counting
