"""How steps are shared: by prompts where options say so, by the stages of a pipeline, and between drafts and tokens."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..options.scheduler_config import SchedulerConfig
from .kv_cache import KVCacheManager
from .request import Request

if TYPE_CHECKING:
    from ..link.plan import StepResult
    from .step import Step


class Sharing:
    """The limits of one step. A prompt is in progress from its first chunk on until its last is planned."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._most = config.max_num_partial_prefills
        self._most_long = config.max_long_partial_prefills
        self._long = config.long_prefill_token_threshold
        self._least = config.least_chunk
        self.chunk = 0  # tokens that a prompt may have of this step
        self.promised = 0  # blocks that prompts in progress still need, which nobody else may be admitted on
        self._open = self._open_long = 0  # prompts in progress behind this step

    @classmethod
    def of(cls, config: SchedulerConfig) -> Sharing | None:
        """None where no option says anything: whoever is first gets all that is left. Where chunks end in whole grains,
        a rest of the step is left that the next prompt may use."""
        limits = (
            config.max_num_partial_prefills,
            config.max_long_partial_prefills,
            config.long_prefill_token_threshold,
            config.num_state_slots,
        )
        return cls(config) if any(limits) else None

    def begin(self, budget: int, num_prompts: int) -> None:
        """`num_prompts`: that could use the budget, begun or waiting."""
        shares = min(self._most, num_prompts) or 1
        self.chunk = max(self._least, budget // shares)
        if self._long:
            self.chunk = min(self.chunk, max(self._least, self._long))

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


def whose_turn(decodes: list[Request], step: int, num_stages: int, prompts: bool) -> list[Request]:
    """At most one in `num_stages` of those who could decode in plan `step`: who has waited longest.

    Whose token is not sampled yet would hold up all stages: it will be, by the time that this plan begins, if that was
    planned `num_stages` plans ago. Where nobody else has anything to compute (`prompts`: somebody has), such a plan
    may as well wait on the device, for it needs not wait for the host as well.
    """
    most = -(-len(decodes) // num_stages)
    ready = [r for r in decodes if not r.num_in_flight_tokens or step - r.last_sampled >= num_stages]
    if not ready and not prompts:
        ready = [r for r in decodes if r.num_in_flight_tokens - r.num_in_flight_drafts < 2]
    return sorted(ready, key=attrgetter("last_sampled"))[:most]


def equal_chunk(budget: int, computed: int, context_cost: float, unit: int) -> int:
    """Tokens behind `computed` others that cost what the first `budget` ones of a prompt do: chunks that take longer
    and longer would leave the stages before idle. In whole units, where it is more than one.

    A token costs 1, and `context_cost` for every token that it sees.
    """
    each = 1 + context_cost * computed
    whole = budget * (1 + context_cost * budget / 2)
    found = int((sqrt(each * each + 2 * context_cost * whole) - each) / context_cost)
    found = min(found, budget)
    return found - found % unit if found > unit else min(budget, max(1, found))


WORTHWHILE = 0.15  # a draft that holds less often costs more than it brings
# With more than a few requests, all compute as many tokens as those who have drafts: that has to bring this share of
# them a token. One step in so many tries nevertheless.
FEW, LEAST_GAIN, PROBES = 8, 0.05, 32
FORGETTING = 0.95  # of what drafts did, with each step that has some


class Depth:
    """As many as the load allows, of the numbers that there are CUDA graphs for; none while nobody has a match, fewer
    where few hold."""

    def __init__(self, depths: tuple[tuple[int, int], ...]) -> None:
        """`depths`: (up to so many requests, drafts of each), the former growing."""
        self.depths = depths
        self.levels = sorted({drafts for _, drafts in depths if drafts})
        self._reach = {drafts: most for most, drafts in depths}  # of its CUDA graphs, in requests
        self.num_drafts = 0  # rows of steps for which somebody had proposed drafts
        self.num_draft_tokens = 0  # proposed and verified
        self.num_accepted_tokens = [0] * max(self.levels, default=0)  # by their position
        self._num_proposed = 0  # rows with drafts for the step to come
        self._num_asked = 0
        self._tried = self._held = 0.0  # lately: drafts behind right ones only, and of them the right ones

    def depth(self, num_running: int) -> int:
        """For the step about to be planned, of each request that decodes."""
        if not self._num_proposed:
            return 0
        allowed = next((drafts for most, drafts in self.depths if num_running <= most), 0)
        rate = (self._held + 1) / (self._tried + 1)
        self._num_asked += 1
        if num_running > FEW and rate * self._num_proposed < LEAST_GAIN * num_running and self._num_asked % PROBES:
            return 0
        levels = [level for level in self.levels if level <= allowed and num_running <= self._reach[level]]
        worthwhile = [level for level in levels if rate**level >= WORTHWHILE]
        return max(worthwhile) if worthwhile else min(levels, default=0)

    def counts(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": tuple(self.num_accepted_tokens),
        }

    def learn(self, step: Step, result: StepResult) -> None:
        """What became of a step, and whether the one to come has drafts."""
        self._num_proposed = result.num_proposed
        if not step.num_drafting:
            return
        self._tried *= FORGETTING
        self._held *= FORGETTING
        for request, count, proposed in zip(step.sampled, result.counts, result.drafted, strict=False):
            if request is None or not proposed:  # what it sampled is thrown away, or nobody drafted
                continue
            held = min(count - 1, proposed)
            self.num_drafts += 1
            self.num_draft_tokens += proposed
            for position in range(held):
                self.num_accepted_tokens[position] += 1
            self._tried += min(held + 1, proposed)
            self._held += held
