"""How far a call of the offline API is, and how fast."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...engine.link.messages import Progress as Loading


class Progress:
    """The bar and the rates beside it."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._start = time.monotonic()
        self._num_input = self._num_output = 0

    def finished(self, num_input: int, num_output: int) -> None:
        """One more prompt, and the tokens that it has and got."""
        if self._bar is None:
            return
        self._num_input += num_input
        self._num_output += num_output
        seconds = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input {self._num_input / seconds:.1f} tok/s, output {self._num_output / seconds:.1f} tok/s", refresh=False
        )
        self._bar.update(1)


@contextlib.contextmanager
def progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Any]:
    if not use_tqdm or not total:
        yield None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    make = use_tqdm if callable(use_tqdm) else tqdm
    with make(total=total, desc="Processed prompts", dynamic_ncols=True) as bar:
        yield bar


@contextlib.contextmanager
def loading_bar(wanted: bool) -> Iterator[Callable[[Loading], None]]:
    """What takes the engine's reports while it starts, and shows them in one line: on a terminal, or in a notebook."""
    if not wanted or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        yield lambda loading: None
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    with tqdm(unit="B", unit_scale=True, dynamic_ncols=True, leave=False) as bar:

        def report(loading: Loading) -> None:
            bar.set_description_str(f"vserve: {loading.phase}", refresh=not loading.total)
            if loading.total:
                bar.total = loading.total
                bar.update(loading.done - bar.n)

        yield report
