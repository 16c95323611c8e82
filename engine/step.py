"""A plan in the making, and what the scheduler must remember of it until its result is in."""

from __future__ import annotations

from .kv_cache import Registered
from .request import Request


class Step:
    """A plan while it is made, and what its result will need while it is in flight."""

    __slots__ = (
        "admitted",
        "appended",
        "budget",
        "constrained",
        "filled",
        "index",
        "limit",
        "pooled",
        "registered",
        "sampled",
        "scheduled",
        "scored",
        "total",
    )

    def __init__(self, index: int, budget: int) -> None:
        self.index = index
        self.limit = budget  # tokens the step may compute
        self.budget = budget  # of them left
        self.total = 0  # tokens planned
        self.scheduled: dict[Request, int] = {}  # → query length, in the order of the passes
        self.appended: dict[Request, int] = {}  # → entries appended to its block table, hits included
        self.filled: list[Request] = []  # may complete a block in this step
        self.admitted: dict[Request, int] = {}  # → tokens of its prefix hit
        self.sampled: list[Request | None] = []  # None: its sample is to be thrown away
        self.registered: Registered = []
        self.scored: list[tuple[Request, int]] = []  # → the first token computed: the log-probabilities come from there
        self.pooled: list[Request | None] = []  # whose prompts end in this step; None: to be thrown away
        self.constrained = False  # a grammar limits what some row samples
