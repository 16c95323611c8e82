"""Times single steps of the 8B shape on an NVIDIA GPU: python tools/gpu/bench_steps.py [--only m1024,d64] [--seconds S]

Each case is a captured step (or, where none is captured, a launched one) with contexts as under load, replayed until
the card has its working temperature and power: what a change gives shows to half a percent, on the same card in the
same run. Made-up weights, random keys and values.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from model_folder import write_model

from vserve.engine.cache.batch import Shape
from vserve.engine.cache.kv_format import NUMBERS, KVFormat
from vserve.engine.describe.reading import read_folder
from vserve.engine.link.messages import pack_tokens
from vserve.engine.link.plan import BlockWrite, NewRow, StepPlan
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.start.warm_steps import warm_up_steps
from vserve.engine.step.runner import ModelRunner
from vserve.engine.weights.loader import load_model

PAGE, NUM_BLOCKS = 16, 40_000
MAX_TOKENS, MIXED_TOKENS, MAX_DECODES = 8192, 1024, 512
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class Case:
    """decodes: how many, and their context; prompts: tokens computed before and in this step."""

    shape: Shape | None  # of the graph; None: launched kernel by kernel
    decodes: tuple[int, int]
    prompts: tuple[tuple[int, int], ...] = ()


CASES = {
    "d1": Case(Shape(1, 0, 1, 0), (1, 256)),
    "d1-8k": Case(Shape(1, 0, 1, 0), (1, 8000)),
    "d64": Case(Shape(64, 0, 64, 0), (64, 1100)),
    "d256": Case(Shape(256, 0, 256, 0), (256, 256)),
    "d448": Case(Shape(448, 0, 448, 0), (448, 1100)),
    "m1040": Case(Shape(16, 16, 1040, 1040), (6, 1100), ((0, 1024),)),
    "m1024": Case(Shape(64, 16, 1024, 1024), (60, 1100), ((524, 500), (0, 464))),
    "m1024-256": Case(Shape(256, 16, 1024, 1024), (248, 256), ((0, 128),) * 6),
    "m4224": Case(Shape(256, 64, 4224, 4224), (250, 1100), ((0, 1024), (0, 1024), (0, 1024), (122, 902))),
    "p8000": Case(None, (0, 0), ((0, 8000),)),
}


def make_runner(
    folder: Path,
    shapes: set[Shape],
    quantization: str | None = None,
    steps: Sequence[Any] = (),
    kv_format: KVFormat = NUMBERS,
) -> ModelRunner:
    """With the kernels of `steps` ready (none: of all), random caches (of codes: zeros), and graphs of these shapes
    only."""
    device = torch.device("cuda", torch.cuda.current_device())
    config = read_folder(folder, quantization=quantization)
    model = load_model(
        folder, config, dtype=torch.bfloat16, device=device, load_format="dummy", max_model_len=MAX_TOKENS
    )  # fmt: skip
    runner = ModelRunner(
        model, max_num_seqs=1024, max_model_len=MAX_TOKENS, block_size=PAGE, device=device, kv_format=kv_format
    )
    runner.bind_cache(NUM_BLOCKS, torch.bfloat16)
    for layer in () if kv_format.code else model.attention_layers():
        assert layer.cache is not None
        layer.cache.keys.normal_()
        layer.cache.values.normal_()
    for step in steps or warm_up_steps(runner.max_num_seqs, MAX_TOKENS):
        runner.dummy_step(*step)
    graphs = runner.plan_graphs(MAX_DECODES, MIXED_TOKENS, ())
    setattr(graphs, "shapes", lambda: sorted(shapes, key=lambda shape: -shape.tokens))  # noqa: B010
    runner.capture_graphs(graphs)
    return runner


def prepare(runner: ModelRunner, case: Case, rng: random.Random) -> Callable[[], object]:
    """→ what runs the step once more. Its rows stay where they are: nothing commits a token."""
    free = rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    count, context = case.decodes
    work = [(context, 1)] * count + list(case.prompts)
    new, blocks = [], []
    for row, (computed, tokens) in enumerate(work):
        total = computed + tokens
        token_ids = pack_tokens([rng.randrange(3, 128_000) for _ in range(total)])
        new.append(NewRow(row, row, token_ids, total, computed, GREEDY))
        blocks.append(BlockWrite(row, 0, [free.pop() for _ in range(-(-total // PAGE))]))
    rows, (computed, tokens) = list(range(len(work))), map(list, zip(*work, strict=True))
    plan = StepPlan(1, rows, tokens, computed, rows, count, new, [blocks])
    graph = runner.graphs.find(plan) if runner.graphs is not None else None
    assert (graph and graph.shape) == case.shape, f"the step found {graph and graph.shape}"
    runner.execute(plan)
    runner.sample().wait()
    runner.tables.num_computed[: len(work)] = torch.tensor(computed, dtype=torch.int32)
    if graph is not None:
        return graph.graph.replay  # with the header of the execution above
    again = StepPlan(1, rows, tokens, computed, rows, count, [], [[]])

    def run() -> None:
        runner.execute(again)
        runner._launched = None  # no sample: it would move the rows on

    return run


def milliseconds(run: Callable[[], object], seconds: float, pause: float = 0.0) -> float:
    """Median of what a step takes, after a third of the time for the card to get warm; pauses between, in seconds."""
    started, times = time.monotonic(), []
    repeats = 1 if pause else 8
    while time.monotonic() - started < seconds:
        time.sleep(pause)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return median(times[len(times) // 3 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), metavar="NAME,...", help=f"of {', '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each case (default: 1.5)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps, as under a light load")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--only names {unknown[0]!r}: choose from {', '.join(CASES)}")
    if not torch.cuda.is_available():
        sys.exit("bench_steps.py times a GPU: run it on a machine with one")
    shapes = {case.shape for name in names if (case := CASES[name]).shape is not None}
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(write_model(Path(folder) / "llama-8b"), {shape for shape in shapes if shape})
    rng = random.Random(1)
    milliseconds(prepare(runner, CASES[names[0]], rng), arguments.seconds)  # a cold card is faster
    for name in names:
        run = prepare(runner, CASES[name], rng)
        print(f"{name:10s} {milliseconds(run, arguments.seconds, arguments.pause):8.3f} ms", flush=True)


if __name__ == "__main__":
    main()
