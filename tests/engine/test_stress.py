"""Adapters, drafts, grammars, prefix hits, preemption, aborts and failures at once, against each request alone.

VSERVE_STRESS_SEED=17 begins with that seed, VSERVE_STRESS_SECONDS=600 goes on with the next ones for so long.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.link.messages import sum_of

from .injector import Injector
from .stressed import Alone, Stressed, grammars
from .workload import ADAPTERS, Workload

FIRST = os.environ.get("VSERVE_STRESS_SEED")
SECONDS = float(os.environ.get("VSERVE_STRESS_SECONDS", "0"))
FAMILIES = {"llama": 1, "gemma3_text": 3}  # and groups of layers with a block table of their own
WAVE = 16  # requests at once


def seeds(*usual: int) -> Iterator[int]:
    """These, or where somebody has named one or a time, that one and those that follow within the time."""
    begun = time.monotonic()
    first = int(FIRST or usual[0])
    for seed in itertools.count(first) if SECONDS else [first] if FIRST else usual:
        if SECONDS and time.monotonic() - begun > SECONDS:
            return
        print(f"VSERVE_STRESS_SEED={seed} repeats this round")  # shown when a test fails
        yield seed


class Models:
    """Of a family: the model, its adapters, who may draft, and the engine that has each request to itself."""

    def __init__(self, folder: Path, base: Path, files: Any, drafters: list[Path], num_groups: int) -> None:
        self.base, self.drafters, self.num_groups = base, drafters, num_groups
        names: list[tuple[str, ...]] = [files.SEVEN, ("q_proj", "v_proj"), ("v_proj", "lm_head")]
        self.adapters = {
            id: files.write_adapter(folder / str(id), base, modules, seed=id, rank=2 * id)
            for id, modules in zip(ADAPTERS, names, strict=True)
        }
        self.alone = Alone(base, self.adapters)


@pytest.fixture(scope="module")
def models(
    tiny_model: Any, adapter_files: Any, load_module: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Models]:
    made = load_module(Path(__file__).parents[1] / "draft_models.py")
    folder = tmp_path_factory.mktemp("stress")
    found = {}
    for family, num_groups in FAMILIES.items():
        base = tiny_model(family)
        drafters = [base, made.eagle(folder / "head")] if family == "llama" else [base]
        found[family] = Models(folder / family, base, adapter_files, drafters, num_groups)
    return found


@pytest.fixture(scope="module")
def runner(models: dict[str, Models]) -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        for one in models.values():
            runner.run(one.alone.start())
        gc.collect()
        gc.freeze()  # the books are looked at after a collection, each time: it need not look at what was imported
        yield runner
        gc.unfreeze()
        for one in models.values():
            runner.run(one.alone.close())


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Records of failed steps would keep their frames, and with these what should be gone."""
    caplog.set_level(logging.CRITICAL, "vserve.engine.start.loop")


def keys() -> list[str]:
    return [grammar.key for grammar in grammars()]


def stressed(models: dict[str, Models], seed: int, drafters: bool = True, **options: Any) -> tuple[Stressed, Alone]:
    family = list(models.values())[seed % len(models)]
    workload = Workload(seed, keys(), family.drafters if drafters else [], family.num_groups)
    return Stressed(family.base, workload, family.adapters, **options), family.alone


async def waves(engine: Stressed, alone: Alone, count: int, injector: Injector | None = None) -> Counter[str]:
    """→ what was seen to happen."""
    async with engine:
        whole = sum([await engine.run(engine.workload.wave(WAVE), alone, injector) for _ in range(count)])
        stats = sum_of(engine.client.past_stats, engine.client.stats)
        return Counter(
            whole=whole, preempted=stats.num_preemptions, hit=stats.prefix_hits, drafted=stats.num_draft_tokens,
            accepted=sum(stats.num_accepted_tokens),
        )  # fmt: skip


def check_seen(seen: Counter[str], *names: str) -> None:
    """Seeds that let a kind of event out prove nothing of it. Whoever names one seed knows what it does."""
    print(seen)
    assert FIRST or all(seen[name] > 5 for name in ("whole", "preempted", "hit", "drafted", "accepted", *names)), seen


# Of either family one, with n-grams and with a model that drafts; together they come through every place of a failure.
QUICK = (1, 2)
ALL = (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("usual", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_one_engine(
    models: dict[str, Models], runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, usual: tuple[int, ...]
) -> None:
    """One step in flight or two, whose passes fail in attention, while they sample, while they draft, and behind."""
    injector, seen = Injector(monkeypatch), Counter[str]()
    for seed in seeds(*usual):
        engine, alone = stressed(models, seed)
        if engine.workload.rng.random() < 0.6:
            engine.overlap(2)
        seen += runner.run(waves(engine, alone, 2, injector))
    check_seen(seen)
    assert FIRST or all(injector.raised.values()), injector.raised


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_two_ranks(models: dict[str, Models], runner: asyncio.Runner, count: int) -> None:
    """Which of their collectives a step runs depends on who is in it: greedy rows alone, sampled ones, masked ones."""
    seen = Counter[str]()
    for seed in seeds(10):
        seen += runner.run(waves(*stressed(models, seed, tensor_parallel_size=2), count))
    check_seen(seen)


@pytest.mark.slow  # half a minute goes by in engines that start and ranks that wait, however few requests there are
def test_two_stages(models: dict[str, Models], runner: asyncio.Runner) -> None:
    """Three steps in flight. A rank's failure is the end of such an engine: who asks the next one is answered right."""
    seen = Counter[str]()
    for seed in seeds(0):
        fault = {"VSERVE_ALLOW_FAULTS": "1", "VSERVE_FAULT": f"step:{80 + 20 * (seed % 5)}:error:1"}
        engine, alone = stressed(models, seed, drafters=False, environment=fault, pipeline_parallel_size=2)
        seen += runner.run(waves(engine, alone, 3))
        assert engine.client.num_restarts == 1
    check_seen(seen)
