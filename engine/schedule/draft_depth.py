"""How many tokens of each request are drafted for a step: by the load, and by how many lately were right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..link.plan import StepResult
    from .step import Step

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
            for place in range(held):
                self.num_accepted_tokens[place] += 1
            self._tried += min(held + 1, proposed)
            self._held += held
