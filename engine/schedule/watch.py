"""What the engine does, step by step, for whoever watches; while nobody does, none of this runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

from ..link.messages import BlockMap, StepReport, StepReports
from .kv_cache import KVCacheManager
from .step import Step

INTERVAL = 0.1  # seconds between two messages
MAX_STEPS = 128  # of a message: of more, the last ones
MAX_REQUESTS = 48  # of a step that are named; a page has no room for more
MAX_CELLS = 512  # of the block map
PARTS = 20  # messages that a look at all blocks is spread over: of 100,000 blocks it takes milliseconds


class StepWatch:
    """Collects step reports and sends them ten times a second. Steps drive it: an idle engine has no clock to run."""

    def __init__(self, kv: KVCacheManager, send: Callable[[StepReports], None]) -> None:
        self._pool = kv.pool
        self._send = send
        self._reports: list[StepReport] = []
        self._sent = self._latest = time.monotonic()
        num_blocks = kv.pool.num_blocks - 1  # block 0 is nobody's
        self._per_cell = -(-num_blocks // MAX_CELLS)
        self._num_cells = -(-num_blocks // self._per_cell)
        self._part = -(-self._num_cells // PARTS)
        self._next_cell = 0
        self.greet()

    def greet(self) -> None:
        """For who has just come: all blocks, and no step."""
        self._send(StepReports([], self._look(0, self._num_cells)))

    @staticmethod
    def rows(step: Step) -> list[tuple[int, int, bool]]:
        """(request id, tokens, whether they are of its prompt) of a step just scheduled; of many, the first and last:
        decodes come first, prompts last.
        """
        rows = list(islice(step.scheduled.items(), MAX_REQUESTS))
        if len(step.scheduled) > MAX_REQUESTS:
            rows[MAX_REQUESTS // 2 :] = islice(reversed(step.scheduled.items()), MAX_REQUESTS // 2)
        return [(r.id, new, r.num_computed_tokens - new < r.num_prompt_tokens) for r, new in rows]

    def add(self, report: StepReport, now: float) -> None:
        """`now`: time.monotonic()."""
        self._reports.append(report)
        self._latest = now
        if now - self._sent >= INTERVAL:
            blocks = self._look(self._next_cell, min(self._next_cell + self._part, self._num_cells))
            self._next_cell = (blocks.start + len(blocks.used)) % self._num_cells
            self._flush(blocks)

    def rest(self) -> None:
        """The engine falls asleep: sends what there is."""
        if self._reports:
            self._flush(self._look(0, self._num_cells))

    def _flush(self, blocks: BlockMap) -> None:
        self._sent = self._latest
        reports, self._reports = self._reports[-MAX_STEPS:], []
        self._send(StepReports(reports, blocks))

    def _look(self, start: int, end: int) -> BlockMap:
        """At these cells: how many of a cell's blocks are in use, and how many are free but can still be hit."""
        refs, keys, size = self._pool.refs, self._pool.keys, self._per_cell
        used, cached = [], []
        for cell in range(start, end):
            first = 1 + cell * size
            cell_refs, cell_keys = refs[first : first + size], keys[first : first + size]
            used.append(len(cell_refs) - cell_refs.count(0))
            if used[-1] == 0:
                cached.append(len(cell_keys) - cell_keys.count(None))
            else:
                pairs = zip(cell_refs, cell_keys, strict=True)
                cached.append(sum(1 for count, key in pairs if not count and key is not None))
        return BlockMap(self._num_cells, size, start, used, cached)
