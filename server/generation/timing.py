"""When a request waited, began and ended: for its line in the log, its span, and answers that carry it."""

from __future__ import annotations

from typing import Any, NamedTuple

from .choice import Choice
from .generation import Generation


class Timing(NamedTuple):
    """The numbers of a generation, over all of its choices. Seconds; None where it did not come so far."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue: float | None
    ttft: float | None
    tpot: float | None
    prefill: float | None
    decode: float | None
    inference: float | None
    finish_reasons: tuple[str, ...]

    @staticmethod
    def of(generation: Generation) -> Timing:
        usage = generation.usage()
        begun = [c for c in generation.choices if c.first_token is not None and c.last_token is not None]
        scheduled = [c for c in begun if c.first_scheduled is not None]
        first = min((c.first_token for c in begun if c.first_token is not None), default=None)
        last = max((c.last_token for c in begun if c.last_token is not None), default=None)
        spent = sum(c.last_token - c.first_token for c in begun if c.last_token and c.first_token)
        intervals = sum(c.num_tokens - 1 for c in begun)
        start = min((c.first_scheduled for c in scheduled if c.first_scheduled is not None), default=None)
        return Timing(
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            max((max(0.0, c.first_scheduled - c.submitted) for c in scheduled if c.first_scheduled), default=None),
            None if first is None else first - generation.arrival,
            spent / intervals if intervals > 0 else None,
            None if first is None or start is None else first - start,
            None if first is None or last is None else last - first,
            None if last is None or start is None else last - start,
            tuple(dict.fromkeys(_ending(generation, c) for c in generation.choices if c.finish_reason)),
        )

    def milliseconds(self) -> dict[str, float | int | None]:
        """As vLLM's `metrics` of an answer has it, and the tokens that the cache held."""
        rate = None if not self.inference else self.completion_tokens / self.inference
        times = {
            "time_to_first_token_ms": self.prefill, "generation_time_ms": self.decode, "queue_time_ms": self.queue,
            "mean_itl_ms": self.tpot,
        }  # fmt: skip
        shown: dict[str, float | int | None] = {
            name: None if seconds is None else round(1000 * seconds, 3) for name, seconds in times.items()
        }
        return shown | {
            "tokens_per_second": None if rate is None else round(rate, 3),
            "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens,
        }  # fmt: skip


def _ending(generation: Generation, choice: Choice) -> str:
    cancelled = generation.abort_reason == "cancel" and choice.stop_reason == "abort"  # told the client as "stop"
    return "abort" if cancelled else choice.finish_reason or ""


def told(generation: Generation) -> dict[str, Any]:
    """{"metrics": …} of an answer of one choice, where answers are to carry it; else nothing."""
    if not generation.tells_timing or len(generation.choices) != 1:
        return {}
    return {"metrics": Timing.of(generation).milliseconds()}
