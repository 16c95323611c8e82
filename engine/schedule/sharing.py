"""How prompts share a step where options say so: how many of them at once, and how much of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..options.config import SchedulerConfig
from .kv_cache import KVCacheManager
from .request import Request

if TYPE_CHECKING:
    from .step import Step


class Sharing:
    """The limits of one step. A prompt is in progress from its first chunk on until its last is planned."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._most = config.max_num_partial_prefills
        self._most_long = config.max_long_partial_prefills
        self._long = config.long_prefill_token_threshold
        self.chunk = 0  # tokens that a prompt may have of this step
        self.promised = 0  # blocks that prompts in progress still need, which nobody else may be admitted on
        self._open = self._open_long = 0  # prompts in progress behind this step

    @classmethod
    def of(cls, config: SchedulerConfig) -> Sharing | None:
        """None where no option says anything: whoever is first gets all that is left."""
        limits = (
            config.max_num_partial_prefills,
            config.max_long_partial_prefills,
            config.long_prefill_token_threshold,
        )
        return cls(config) if any(limits) else None

    def begin(self, budget: int, num_prompts: int) -> None:
        """`num_prompts`: that could use the budget, begun or waiting."""
        shares = min(self._most, num_prompts) or 1
        self.chunk = max(1, budget // shares)
        if self._long:
            self.chunk = min(self.chunk, self._long)

    def count(self, running: Iterable[Request], step: Step, kv: KVCacheManager) -> None:
        """When the prompts begun earlier are planned: what is in progress, and what it will need."""
        self._open = self._open_long = self.promised = 0
        for request in running:
            self.note(request, request.num_computed_tokens + step.scheduled.get(request, 0), kv)

    def note(self, request: Request, planned: int, kv: KVCacheManager) -> None:
        """`planned`: its tokens that are computed at the end of this step."""
        if planned < request.target:
            # one that lacks a single token beyond its prompt decodes, and sits this step out
            is_open = request.target - planned > 1 or planned < request.num_prompt_tokens
            self._open += is_open
            self._open_long += is_open and self._is_long(request)
            self.promised += kv.num_blocks_missing(request)

    @property
    def is_full(self) -> bool:
        """Nobody may begin."""
        return bool(self._most) and self._open >= self._most

    def allows(self, request: Request) -> bool:
        """Whether this one may begin. Short prompts pass long ones that have to wait."""
        if self.is_full:
            return False
        return not self._most_long or self._open_long < self._most_long or not self._is_long(request)

    def _is_long(self, request: Request) -> bool:
        return request.num_tokens > self._long
