"""Everything at once, against each request alone: adapters, drafts, grammars, prefix hits, preemption, aborts, failures.

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

from .injector import Injector
from .stressed import Alone, Stressed, grammars
from .workload import ADAPTERS, Workload

FIRST = os.environ.get("VSERVE_STRESS_SEED")
SECONDS = float(os.environ.get("VSERVE_STRESS_SECONDS", "0"))
FAMILIES = {"llama": 1, "gemma3_text": 3}  # and groups of layers with a block table of their own
WAVE = 20  # requests at once


def seeds(first: int, count: int) -> Iterator[int]:
    begun = time.monotonic()
    for seed in itertools.count(int(FIRST or first)):
        if SECONDS and time.monotonic() - begun > SECONDS:
            return
        if not SECONDS and seed >= int(FIRST or first) + (1 if FIRST else count):
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
    caplog.set_level(logging.CRITICAL, "vserve.engine.loop")


def keys() -> list[str]:
    return [grammar.key for grammar in grammars()]


async def waves(stressed: Stressed, count: int, models: Models, seen: Counter[str], injector: Any = None) -> None:
    async with stressed:
        for _ in range(count):
            seen["whole"] += await stressed.run(stressed.workload.wave(WAVE), models.alone, injector)
        stats = stressed.client.stats
        seen["preempted"] += stats.num_preemptions
        seen["hit"] += stats.prefix_hits
        seen["drafted"] += stats.num_draft_tokens
        seen["accepted"] += sum(stats.num_accepted_tokens)
        print(stats.num_steps, stats.num_preemptions, stressed.client.config.speculative_config)


@pytest.mark.parametrize(("first", "count"), [(0, 6), pytest.param(100, 30, marks=pytest.mark.slow)])
def test_one_engine(
    models: dict[str, Models], runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, first: int, count: int
) -> None:
    """One step in flight or two, whose passes fail in attention, while they sample, while they draft, and behind."""
    injector, seen = Injector(monkeypatch), Counter[str]()
    for seed in seeds(first, count):
        family = list(models.values())[seed % len(models)]
        stressed = Stressed(family.base, Workload(seed, keys(), family.drafters, family.num_groups), family.adapters)
        if stressed.workload.rng.random() < 0.6:
            stressed.overlap(2)
        t = time.process_time()
        runner.run(waves(stressed, 3, family, seen, injector))
        print(time.process_time() - t)
    print(seen, injector.raised)
    if not FIRST:
        assert min(seen.values()) > 20 and min(injector.raised.values()) > 0, (seen, injector.raised)


@pytest.mark.parametrize(("first", "count"), [(0, 2), pytest.param(200, 6, marks=pytest.mark.slow)])
def test_two_ranks(models: dict[str, Models], runner: asyncio.Runner, first: int, count: int) -> None:
    """Which of their collectives a step runs depends on who is in it: greedy rows alone, sampled ones, masked ones."""
    seen = Counter[str]()
    for seed in seeds(first, count):
        family = list(models.values())[seed % len(models)]
        workload = Workload(seed, keys(), family.drafters, family.num_groups)
        stressed = Stressed(family.base, workload, family.adapters, tensor_parallel_size=2)
        t = time.process_time()
        runner.run(waves(stressed, 4, family, seen))
        print(time.process_time() - t)
    print(seen)
    if not FIRST:
        assert min(seen.values()) > 20, seen


@pytest.mark.parametrize(("first", "count"), [(0, 1), pytest.param(300, 6, marks=pytest.mark.slow)])
def test_two_stages(models: dict[str, Models], runner: asyncio.Runner, first: int, count: int) -> None:
    """Three steps in flight. A rank's failure is the end of such an engine: who asks the next one is answered right."""
    seen = Counter[str]()
    for seed in seeds(first, count):
        family = list(models.values())[seed % len(models)]
        workload = Workload(seed, keys(), [], family.num_groups)
        stressed = Stressed(family.base, workload, family.adapters, {}, pipeline_parallel_size=2)
        t = time.process_time()
        runner.run(waves(stressed, 4, family, seen))
        print(time.process_time() - t)
