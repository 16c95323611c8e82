"""How a pipeline's plans share the work, so that every stage has some: who decodes in which, and how long chunks are.

As many plans as there are stages are computed at once, and one more waits for its turn. A request is in one of them at
a time, as its next token begins with its last. So if one plan took all who decode, the other stages would idle.
"""

from __future__ import annotations

from math import sqrt
from operator import attrgetter

from .request import Request


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
