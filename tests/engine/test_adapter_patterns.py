"""Names and expressions of an adapter's configuration: matched as PEFT does, by the thousands, in bounded time."""

from __future__ import annotations

import json
import random
import re
import subprocess
from typing import Any

import pytest

from vserve.engine.adapters import patterns
from vserve.engine.adapters.patterns import PatternError, first_matches
from vserve.engine.adapters.peft_files import AdapterError, PeftConfig

EXPERTS = [
    f"model.layers.{i}.mlp.experts.{e}.{n}_proj" for i in range(24) for e in range(250) for n in ("gate", "up", "down")
]


def peft_s(expressions: list[str], name: str) -> int | None:
    """get_pattern_key's choice."""
    return next((i for i, each in enumerate(expressions) if re.match(rf"(.*\.)?({each})$", name)), None)


def test_the_first_that_matches_counts() -> None:
    rng = random.Random(0)
    names = [f"model.layers.{i}.{part}" for i in range(12) for part in ("self_attn.q_proj", "mlp.up_proj", "mlp.0")]
    kinds = [*names, "q_proj", "q.proj", "1.mlp.0", "mlp", "layers", r"layers\.1\.mlp\.0", ".", "..", "0", r"\d",
        r".*\.1\..*", "(mlp|self_attn).*", "[qu]p?_proj", "layers.1.*"]  # fmt: skip
    for _ in range(30):
        chosen = rng.sample(kinds, rng.randrange(1, 9))
        wanted = {name: index for name in names if (index := peft_s(chosen, name)) is not None}
        assert first_matches(chosen, names, ends=True) == wanted, chosen
        wanted = {
            n: i
            for n in names
            if (i := next((i for i, p in enumerate(chosen) if re.fullmatch(p, n)), None)) is not None
        }
        assert first_matches(chosen, names) == wanted, chosen


@pytest.mark.timeout(60)
@pytest.mark.slow
def test_thousands_of_names_are_matched_with_as_many() -> None:
    """A mixture's, each with a rank of its own: as pairs the two would take minutes."""
    config = PeftConfig(
        8, 8, rank_pattern={name: rank for rank, name in enumerate(EXPERTS, 1)}, targets=tuple(EXPERTS),
        alpha_pattern={name.removeprefix("model."): 1 for name in EXPERTS} | {"down_proj": 2},
        saved=("lm_head",) * 1000, parameters=tuple(f"other.{i}.weight" for i in range(5000)),
    )  # fmt: skip
    assert config.ranks_of([*EXPERTS, "lm_head"]) == {name: rank for rank, name in enumerate(EXPERTS, 1)} | {
        "lm_head": 8
    }
    assert set(config.alphas_of(EXPERTS).values()) == {1}
    assert config.targeted(EXPERTS) == EXPERTS
    assert len(config.parameters_without(EXPERTS)) == 5000


def heard(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[Any]:
    """What another process is asked, in the place of which `answer` comes, or is raised."""
    asked: list[Any] = []

    def run(command: Any, *, input: str, **options: Any) -> Any:
        asked.append(json.loads(input))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(patterns.subprocess, "run", run)
    return asked


def test_plain_ones_are_matched_elsewhere_too_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes of names, or references to what is as long as a name."""
    asked = heard(monkeypatch, subprocess.CompletedProcess([], 0, "{}", ""))
    assert first_matches(["." * 30], EXPERTS[:100]) == {name: 0 for name in EXPERTS[:100] if len(name) == 30}
    assert not asked
    assert first_matches(["." * 999], ["." * 1000] * 20) == {}
    assert first_matches([r"\1\1"], ["a.aa"], ends=True) == {}
    assert len(asked) == 2


def test_time_grows_with_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = heard(monkeypatch, subprocess.CompletedProcess([], 0, "{}", ""))
    for number in (1, 1000, 18000):
        first_matches([f"x{i}+" for i in range(number)], EXPERTS[:1000])
    assert [seconds for *_, seconds in asked] == [1, 6, 21]


def ended(status: int) -> Any:
    return subprocess.CompletedProcess([], -status, "", "")


ENDS: dict[str, tuple[Any, int, str]] = {  # how, how many patterns, what is said
    "the limit": (ended(24), 1, "'x0.' which takes more than 1 s to match: write a simpler one"),
    "the limit of many": (
        ended(24), 2,
        "2 regular expressions for 1000 names which take more than 1 s to match: write fewer, or simpler ones",
    ),
    "killed": (ended(9), 1, r"could not be matched \(signal 9 ended it, perhaps as memory"),
    "late": (
        subprocess.TimeoutExpired("python", 60), 1, "could not be matched within 60 s on a machine that is busy: load"
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_what_ended_it_is_said(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who has taken the processor for too long is at fault."""
    answer, number, said = ENDS[how]
    heard(monkeypatch, answer)
    with pytest.raises(PatternError, match=said):
        first_matches([f"x{i}+" for i in range(number)], EXPERTS[:1000])
    config = PeftConfig(8, 8, rank_pattern={f"x{i}+": 4 for i in range(number)})
    with pytest.raises(AdapterError, match=rf"rank_pattern has .*{said}"):
        config.ranks_of(EXPERTS[:1000])
