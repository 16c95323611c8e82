"""What must hold of the engine's books, checked at run time: `assert` would say nothing under `python -O`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..errors import require

if TYPE_CHECKING:
    from .request import Request
    from .scheduler import Scheduler


def check_scheduler(scheduler: Scheduler, thorough: bool) -> None:
    running = scheduler.roster.running
    scheduler.kv.check_invariants(running, thorough)
    scheduler.roster.check()
    if scheduler.adapters is not None:
        scheduler.adapters.check(Counter(request.adapter for request in running.values() if request.adapter))
    steps = Counter(request for step in scheduler.in_flight for request in step.scheduled)
    samples: Counter[Request] = Counter()
    drafts: Counter[Request] = Counter()
    for step in scheduler.in_flight:
        samples.update(filter(None, step.sampled))
        drafts.update(dict.fromkeys(filter(None, step.sampled[: step.num_drafting]), step.num_drafts))
    for request in running.values():
        computed = request.num_computed_tokens
        pooled = request.sampling.pooling is not None and request.num_in_flight_steps > 0
        require(computed < request.target + pooled, f"{request}: nothing left")
        require(not request.num_in_flight_tokens or computed == request.target - 1, f"{request}: not one behind")
    live = scheduler.roster.find(scheduler.roster.entries)
    require(scheduler.roster.num_constrained == sum(r.grammar is not None for r in live), "grammars miscounted")
    scheduler.prompt_results.check(live)
    for request in live:
        counted = (request.num_in_flight_steps, request.num_in_flight_tokens, request.num_in_flight_drafts)
        in_flight = (steps[request], samples[request] + drafts[request], drafts[request])
        require(counted == in_flight, f"{request}: what is in flight is miscounted")
        pooled = request.sampling.pooling is not None
        require(request.num_tokens <= scheduler.stop + pooled, f"{request}: should have ended")
