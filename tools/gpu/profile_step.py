"""What each kernel of a layer adds to a step of one token: python tools/gpu/profile_step.py [--quantization Q]

With dependent launch kernels overlap, and how long one lasts says little. Here a kernel has the time from the end of
the one before it until its own: these times add up to the layer's. Made-up weights, a captured step, replayed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from bench_steps import GREEDY, Case, make_runner, milliseconds, prepare
from model_folder import SHAPES, write_model
from torch.profiler import ProfilerActivity, profile

from vserve.engine.cache.batch import Shape
from vserve.engine.cache.kv_format import CODES, KVFormat

REPLAYS = 10


class Part(NamedTuple):
    """A kernel at its place in a layer; medians, in microseconds."""

    name: str
    added: float
    lasted: float
    ahead: float  # how long before the end of the one before it this one has started


def parts_of_layer(events: Sequence[dict[str, Any]], first: str) -> list[Part]:
    """events: kernels as a Chrome trace has them; a layer goes from a kernel named like `first` to the next such."""
    events = sorted(events, key=_end)
    starts = [place for place, event in enumerate(events) if first in event["name"]]
    lengths = [behind - place for place, behind in pairwise(starts)]
    if not lengths:
        raise ValueError(f"no two kernels are named like {first!r}: see {sorted({e['name'] for e in events})}")
    length = Counter(lengths).most_common(1)[0][0]  # others: with what is between two steps
    layers = [place for place, found in zip(starts, lengths, strict=False) if found == length and place]
    parts = []
    for place in range(length):
        mine = [(events[layer + place], events[layer + place - 1]) for layer in layers]
        parts.append(Part(
            mine[0][0]["name"],
            median(_end(event) - _end(before) for event, before in mine),
            median(event["dur"] for event, _ in mine),
            median(_end(before) - event["ts"] for event, before in mine),
        ))  # fmt: skip
    return parts


def _end(event: dict[str, Any]) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--quantization", help="as vserve has it")
    parser.add_argument("--kv-cache-dtype", choices=CODES, help="as vserve has it, of codes")
    parser.add_argument("--context", type=int, default=256, help="tokens (default: 256)")
    parser.add_argument(
        "--first", default="rope_write_kv", metavar="NAME", help="in whose kernels' names a layer begins"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("profile_step.py profiles a GPU: run it on a machine with one")
    shape = Shape(1, 0, 1, 0)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", arguments.shape)
        kv_format = KVFormat(CODES.get(arguments.kv_cache_dtype, ""))
        runner = make_runner(model, {shape}, arguments.quantization, [(1, 1, GREEDY)], kv_format)
        run = prepare(runner, Case(shape, (1, arguments.context)), random.Random(1))
        step = milliseconds(run, 0.5)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(REPLAYS):
                run()
            torch.cuda.synchronize()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    parts = parts_of_layer([event for event in events if event.get("cat") == "kernel"], arguments.first)
    print(f"{step:.3f} ms a step without its logits; a layer, us:\n   adds   lasts   ahead")
    for part in parts:
        print(f"{part.added:7.2f} {part.lasted:7.2f} {part.ahead:7.2f}  {part.name[:80]}")
    print(f"{sum(part.added for part in parts):7.2f}  the layer")


if __name__ == "__main__":
    main()
