"""When to launch the next step: a moment before the one in flight ends, so that whoever arrives meanwhile is in it."""

from __future__ import annotations

from ..link.plan import StepPlan

Kind = tuple[int, int, int]

LEARNING_RATE = 0.25
SAFETY = 0.6e-3  # seconds: results reach the host a little after the step has ended, and so seem to begin late
RELATIVE_SAFETY = 0.05  # of the step
HOST_FACTOR = 1.5  # of the time that launching takes


class Pacer:
    """Learns how long launching takes the host, and steps of each kind the device. Times: time.perf_counter(), s."""

    def __init__(self) -> None:
        self._device: dict[Kind, float] = {}
        self._host = 0.0
        self._kind: Kind = (0, 0, 0)  # of the step launched last
        self._begun = 0.0  # when the device began with the oldest step in flight, as far as the host can tell

    @staticmethod
    def kind(plan: StepPlan) -> Kind:
        prompts = plan.total_tokens - plan.num_decode_tokens
        return (plan.num_decodes + 7) // 8, (prompts + 63) // 64, plan.num_drafts

    def launched(self, plan: StepPlan, seconds: float, alone: bool, now: float) -> None:
        """`alone`: nothing else was in flight, the device begins with it at once."""
        self._kind = self.kind(plan)
        self._host += LEARNING_RATE * (seconds - self._host) if self._host else seconds
        if alone:
            self._begun = now

    def finished(self, kind: Kind, seconds: float, now: float) -> None:
        """The oldest step is over and took the device that long; the next one in flight begins."""
        known = self._device.get(kind)
        self._device[kind] = seconds if known is None else known + LEARNING_RATE * (seconds - known)
        self._begun = now

    def slack(self, now: float) -> float:
        """Seconds for which the next launch can wait while only the step launched last is in flight; often 0."""
        expected = self._device.get(self._kind)
        if expected is None:
            return 0.0
        lead = SAFETY + RELATIVE_SAFETY * expected + HOST_FACTOR * self._host
        return max(0.0, self._begun + expected - lead - now)
