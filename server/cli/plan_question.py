"""What a plan is asked, and how its answer is found and told."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...engine.errors import ConfigError
from ...engine.planning.load import (
    MOST_ENGINES,
    Fleet,
    Result,
    Wanted,
    alone,
    fewest,
    knee,
    likely_engines,
    likely_rate,
    replay,
    steady,
)
from ...engine.planning.setup import Setup
from ...engine.planning.simulation import Ask
from ..options.given import Given
from .plan_command import advised
from .plan_table import head, row, table

SHARES = (0.25, 0.5, 0.75, 1.0, 1.1, 1.25)  # of the knee, that are looked at around it

Answer = tuple[list[dict[str, Any]], int]  # the rows of the table, the exit code


@dataclass(frozen=True)
class Question:
    """What was asked of which engines, the smallest first."""

    arguments: argparse.Namespace
    given: Mapping[str, Given]  # options of the engine
    wanted: Wanted
    setups: list[Setup]
    trace: Sequence[Ask]  # (): a rate, or the knee
    architecture: str
    model: str
    named: bool  # there is one division only, which was asked for

    def answer(self) -> Answer:
        """Raises ConfigError."""
        head(self.setups[0], self.architecture, self.model)
        if self.arguments.rate is None and not self.trace:
            return self._around_the_knee()
        searches = self.arguments.replicas is None and (self.wanted.has_target or not self.trace)
        if searches:
            likely: list[int] = []

            def guess(setup: Setup) -> int:
                likely.append(self._likely(setup))
                return likely[-1]

            best, asked = fewest(self.setups, self.wanted, self._ask, guess, self._most)
            if not asked:
                if any(likely):
                    raise self._too_many(min(filter(None, likely)))
                return self._too_slow()
        else:
            best, asked = self._of_so_many(self.arguments.replicas or 1)
        rows = [row(fleet.setup, fleet.replicas, fleet.result, self.wanted) for fleet in asked]
        table(rows)
        if best is None:
            is_cut = any(fleet.replicas == MOST_ENGINES for fleet in asked)
            print("\nnone of these meets what is wanted" + (", and more engines are not computed" if is_cut else ""))
            return rows, 1
        self._tell_of(best.setup)
        if best.result.keeps_up is False:
            print("\nthe load is not worked off as it comes: a queue grows")
        if best.replicas > 1:
            rows.append({"one_dies": self._with_one_dead(best)})
        elif searches:
            print("\nwith its only engine dead, nobody is served until that has started again: -dp 2 would go on")
        if searches:
            print(f"\n{advised(self.given, best.setup, best.replicas)}")
        return rows, 0

    @property
    def _size(self) -> tuple[int, int]:
        return self.arguments.num_prompt, self.arguments.num_output

    @property
    def _most(self) -> int:
        """Engines that are asked: of more than it has requests a trace makes nothing."""
        return min(MOST_ENGINES, len(self.trace)) if self.trace else MOST_ENGINES

    def _ask(self, setup: Setup, replicas: int) -> Result:
        if self.trace:
            return replay(setup, self.trace, replicas)
        return steady(setup, self.arguments.rate, *self._size, replicas)

    def _of_so_many(self, replicas: int) -> tuple[Fleet | None, list[Fleet]]:
        """The least divided engines of which so many are enough; where nothing is wanted of them, the smallest."""
        asked = []
        for setup in self.setups:
            asked.append(Fleet(setup, replicas, self._ask(setup, replicas)))
            if not self.wanted.has_target or self.wanted.held(asked[-1].result):
                return asked[-1], asked
        return None, asked

    def _likely(self, setup: Setup) -> int:
        """Engines that a load needs, about; 0: no number of them is enough. Says what one holds."""
        if self.trace:
            return min(self._most, likely_engines(setup, self.trace, self.wanted))
        rate = likely_rate(setup, *self._size)
        if self.wanted.has_target or self.arguments.rate > MOST_ENGINES * rate:  # nothing is refused by a guess
            if (best := knee(setup, self.wanted, *self._size)) is None:
                return 0
            rate = best.rate
            print(
                f"{_engine(setup)} holds {rate:.3g} requests a second ({best.output_rate:.0f} output tokens a second)"
            )
        if (count := max(1, int(self.arguments.rate / rate))) > MOST_ENGINES:
            print(f"the load needs some {count} of them: at most {MOST_ENGINES} are computed")
        return count

    def _too_many(self, count: int) -> ConfigError:
        """However the model is divided, more engines are needed than are computed."""
        remedy = "ask for a smaller rate" + (", or for engines of more cards (-tp, -pp)" if self.named else "")
        return ConfigError(
            f"--rate {self.arguments.rate:g} needs some {count} engines: at most {MOST_ENGINES} are computed; {remedy}"
        )

    def _with_one_dead(self, best: Fleet) -> dict[str, Any]:
        """Says what the others make of the load. Returns their row."""
        left = self._ask(best.setup, best.replicas - 1)
        times = f"TTFT p95 {left.ttft(0.95) * 1e3:.0f} ms, TPOT p95 {left.tpot(0.95) * 1e3:.1f} ms"
        if self.wanted.has_target:
            verdict = f"the load {'still' if self.wanted.held(left) else 'no longer'} meets it: "
        elif left.keeps_up is None or not best.result.keeps_up:
            verdict = ""  # a short trace shows no queue, and one that all of them have grows anyway
        else:
            verdict = f"the load {'still' if left.keeps_up else 'no longer'} is worked off as it comes: "
        print(f"\nwith one of them dead, {verdict}{times}")
        return row(best.setup, best.replicas - 1, left, self.wanted)

    def _around_the_knee(self) -> Answer:
        count = self.arguments.replicas or 1
        for setup in self.setups:
            if (best := knee(setup, self.wanted, *self._size, count)) is None:
                continue
            holds = f"{count} of them hold" if count > 1 else f"{_engine(setup)} holds"
            print(f"{holds} {best.rate:.3g} requests a second ({best.output_rate:.0f} output tokens a second)")
            rows = [
                row(setup, count, steady(setup, best.rate * share, *self._size, count), self.wanted) for share in SHARES
            ]
            table(rows)
            self._tell_of(setup)
            print(f"\n{advised(self.given, setup, count)}")
            return rows, 0
        return self._too_slow()

    def _too_slow(self) -> Answer:
        rows = [row(setup, 1, alone(setup, *self._size), self.wanted) for setup in self.setups]
        table(rows)
        print(
            "\nno rate meets this, not even one request at a time: take a faster card, "
            + ("another division (-tp), " if self.named else "")
            + "or more time"
        )
        return rows, 1

    def _tell_of(self, setup: Setup) -> None:
        """What was not told of it above, and how sure times between cards are."""
        if setup is not self.setups[0]:
            print()
            head(setup, self.architecture, self.model)
        if setup.cards > 1:
            stage = setup.stages[0]
            links = [stage.link] if setup.ranks > 1 else []
            links += [stage.way] if len(setup.stages) > 1 and stage.way not in links else []
            print(
                "\nwhat cards tell each other is computed of data sheets, and was not measured: "
                + "; ".join(
                    f"{link.name}, {link.bandwidth / 1e9:.0f} GB/s each way, of which {link.share:.0%} are used, "
                    f"{link.latency * 1e6:.0f} µs to begin"
                    for link in links
                )
            )


def _engine(setup: Setup) -> str:
    return "one card" if setup.cards == 1 else f"one engine of {setup.cards} cards ({setup.options.strip()})"
